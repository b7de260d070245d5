"""Exercises of "A loss without logits": what a document costs, losses chunk by chunk, gradients of uneven chunks.

Chapter: book/tp/chunked-loss.  Losses and gradients are judged against one process in float64, messages by the ledger,
chunks by the largest tensor of logits that an operation makes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, Unchanged, compare_on_ranks
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.switched_off import AUTOGRAD, Without

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_INDEX, TOKENS, WIDTH = -100, 10, 11
LIBRARY = tuple(f"dualpipe_lab.tp.{name}" for name in ("chunked_cross_entropy", "cross_entropy", "lm_head"))


_ROWS = "an operation made logits of {found:.0f} tokens at once, and a chunk has {most:.0f}"
_BYTES = "the ranks sent {found:,} bytes in all; all-reduces of three numbers per token send {most:,}"
_CALLS = "rank {rank} called {found} collectives; at most {most} are needed, behind the last chunk"


def _loss_in_words(off: Off) -> str:
    if off.found is None or off.has_other_shape:
        return f"{len(off.found.flat) if off.found else 0} losses, expected {len(off.expected.flat)}"
    ours, theirs = off.found.flat[off.place], off.expected.flat[off.place]
    if ours != ours:
        return f"the loss of token {off.place} is not a number, expected {theirs:.6g}"
    return f"the loss of token {off.place} is {ours:.6g}, expected {theirs:.6g}" + f": {off.slip}" * bool(off.slip)


def _batch(words: int, scale: float) -> "tuple[Tensor, Tensor, Tensor]":
    """Tokens, all words' rows, targets."""
    import torch

    generator = torch.Generator().manual_seed(words)
    x, weight = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (TOKENS, words))
    return scale * x, weight, torch.arange(TOKENS) * 5 % words


def _losses(rank: int, world_size: int, fn: Callable[..., Any], words: int, chunk: int) -> Found:
    import torch
    from torch.nn.functional import cross_entropy

    from dualpipe_lab.tp.shard import TensorParallel

    x, weight, targets = _batch(words, 200.0)  # a sum without the right maximum overflows, or vanishes
    targets[3:7] = IGNORE_INDEX
    start, stop = TensorParallel().span(words)
    own, unchanged = weight[start:stop].clone(), Unchanged(x=x, weight=weight, targets=targets)
    rows = _rows_of(stop - start)
    with rows:
        found = fn(x, own, targets, start, chunk)
    unchanged.check()
    parts = weight.split(-(-words // world_size))
    shifted = torch.cat([x @ part.t() - (x @ part.t()).amax(1, keepdim=True) for part in parts], 1)
    logits = x @ weight.t()
    expected = cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    slip = expected - logits.logsumexp(1) + logits.amax(1) + shifted.exp().sum(1).log()
    slip = slip.masked_fill(targets == IGNORE_INDEX, 0.0)
    words_for = "sums of exponentials with different maxima were added up"
    return Found(
        {"losses": Numbers.of(torch.as_tensor(found).flatten())},
        {"losses": Numbers.of(expected)},
        {"losses": {words_for: Numbers.of(slip)}},
        {"rows": float(rows.most)},
    )


def _rows_of(width: int) -> Any:
    """Watch for the most rows of a matrix as wide as this rank's words, but for its weight, transposed."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Rows(TorchDispatchMode):  # type: ignore[misc]
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, Tensor) and made.dim() == 2 and made.shape[1] == width > 1 and len(made) != WIDTH:
                self.most = max(self.most, made.shape[0])
            return made

    return Rows()


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


def _judge_losses(fn: Callable[..., Any], num_ranks: int, words: int, chunk: int) -> None:
    case = f"{words} words on {num_ranks} rank(s), chunks of {chunk}"
    most = 2 * (num_ranks - 1) * 3 * TOKENS * 8
    limits = [
        Limit("rows", chunk, _ROWS, scope="each"),
        Limit("bytes", most, _BYTES, least=most / 3),
        Limit("calls", 3, _CALLS, least=min(num_ranks - 1, 1), scope="each"),
    ]
    answer = Without(fn, *LIBRARY)
    compare_on_ranks(
        _losses, num_ranks, answer, words, chunk, case=case, why=_loss_in_words, limits=limits, at=", rank {rank}: "
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

losses = Implement(
    "chunked_loss-2",
    "Three numbers per token",
    "Write `losses(x, weight, targets, first, chunk)`: the loss of every token, with one chunk's logits at a time.",
    cases=((1, 6, 4), (2, 12, 5), (2, 7, 1), (4, 9, 3), (4, 6, 4), (2, 8, 100)),
    judge=_judge_losses,
    right="the losses equal one process on 1 to 4 ranks, with one chunk's logits at a time and no message per chunk",
    minutes=20,
    points=4,
    hints=(
        "Make three tensors with a number per token, m, s and at, and fill them chunk by chunk. "
        "A rank without words has m = -inf and s = 0.",
        "Behind the last chunk: M = m.clone(), an all-reduce with 'max', then s * (m - M).exp().",
        "Stack s and at for one sum. The loss is M + log s - at, and 0 where the target is -100.",
    ),
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
