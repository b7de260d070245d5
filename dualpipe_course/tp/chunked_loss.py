"""Exercises of "A loss without logits": what a document costs, gradients of uneven chunks.

Chapter: book/tp/chunked-loss.  Losses and gradients are judged against one process in float64, messages by the ledger,
chunks by the largest tensor of logits that an operation makes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Numbers
from dualpipe_course.declared import Predict, Repair
from dualpipe_course.switched_off import AUTOGRAD

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX, TOKENS, WIDTH = -100, 10, 11
LIBRARY = tuple(f"dualpipe_lab.tp.{name}" for name in ("chunked_cross_entropy", "cross_entropy", "lm_head"))


def _batch(words: int, scale: float) -> "tuple[Tensor, Tensor, Tensor]":
    """Tokens, all words' rows, targets."""
    import torch

    generator = torch.Generator().manual_seed(words)
    x, weight = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (TOKENS, words))
    return scale * x, weight, torch.arange(TOKENS) * 5 % words


def _gradients(rank: int, world_size: int, fn: Callable[..., Any], words: int, chunk: int, kept: int) -> Found:
    from torch.nn.functional import cross_entropy

    from dualpipe_lab.tp.shard import TensorParallel

    x, weight, targets = _batch(words, 1.0)
    targets[kept:] = IGNORE_INDEX
    start, stop = TensorParallel().span(words)
    logits = x @ weight.t()
    largest = logits.amax(1)
    log_sum = (logits - largest[:, None]).exp().sum(1).log()
    full_x, full_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    total = cross_entropy(full_x @ full_weight.t(), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    (total / max(kept, 1)).backward()  # before the answer runs, which may not
    dx, d_weight = fn(x.clone(), weight[start:stop].clone(), targets, start, chunk, largest, log_sum)
    names = ("the gradient of x", "the gradient of the weight")
    found, expected = (
        dict(zip(names, map(Numbers.of, values), strict=True))
        for values in ((dx, d_weight), (full_x.grad, full_weight.grad[start:stop]))
    )
    return Found(found, expected)


_SLIPS = (
    {
        1_048_576_000: "those are the logits of all 32 chunks",
        262_144_000: "each of 8 ranks has the logits of 16,000 words",
        65_536_000: "a logit in bf16 has 2 bytes",
    },
    {
        96: "the chunks send nothing; what they leave is exchanged once",
        65: "the chunks send nothing; what they leave is exchanged once",
        34: "the sum of dx is one collective too, behind the last chunk",
        2: "the backward sums dx over the ranks",
        4: "the sums of exponentials and the targets' logits travel in one message",
    },
    {
        12_884_901_888_000: "the backward computes the logits once more",
        137_438_953_472_000: "a rank multiplies with its own eighth of the words",
        8_589_934_592_000: "a product adds as often as it multiplies: 2 operations",
    },
)


numbers = Predict(
    "chunked_loss-1",
    "A long document",
    ("bytes of a chunk's logits", "collectives", "operations of a rank"),
    lambda tokens, words, chunk: (chunk * words // 4, 3, 4096 * tokens * words),
    "One document of {tokens:,} tokens",
    "{words:,} words on 8 ranks",
    "chunks of {chunk:,} tokens",
    minutes=6,
    points=1,
    hints=(
        "A rank has an eighth of the words. Only one chunk's logits exist at a time, 2 bytes each.",
        "Count the collectives of the chunks first. Then those behind the last chunk, forward and backward.",
        "The forward has one product of 2 T h V / t operations. Which three does the backward have?",
    ),
    slips=_SLIPS,
    tokens=(32_768, 16_384, 65_536),
    words=(128_000, 64_000, 96_000, 160_000),
    chunk=(1024, 512, 2048),
)


gradients = Repair(
    "chunked_loss-3",
    "Chunks with few targets",
    "Repair `gradients(x, weight, targets, first, chunk, M, L)`, whose result depends on the size of the chunks.",
    cases=((1, 6, 5, 10), (2, 8, 4, 10), (2, 8, 4, 5), (4, 9, 3, 7), (2, 7, 10, 0)),
    run=_gradients,
    named=f"{{3}} targets of {TOKENS} tokens, chunks of {{2}}, {{0}} rank(s)",
    without=(*LIBRARY, *AUTOGRAD),
    right="dx and dW equal one process for any chunks, also where a chunk or the batch has no target",
    minutes=10,
    points=2,
    hints=(
        "With the same number of targets in each chunk the gradients differ from the right ones by one factor. Which?",
        "The loss is the sum over all valid targets, divided by their number. Does a chunk know that number?",
        "Count the valid targets once, in front of the loop, and at least 1: a batch without any has gradient 0.",
    ),
)
