"""Exercises of "Cross-entropy": bytes of a loss, loss and gradient of one's own columns.

Chapter: book/tp/cross-entropy.  Losses are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, Unchanged, in_words
from dualpipe_course.declared import Implement, Predict

if TYPE_CHECKING:
    from torch import Tensor


IGNORE_INDEX, TOKENS = -100, 6
LIBRARY = tuple(  # switched off while an answer runs
    f"dualpipe_lab.tp.{name}"
    for name in ("cross_entropy", "cross_entropy:CrossEntropy.forward", "chunked_cross_entropy", "lm_head")
)
BATCHES = ("equal logits", "random logits", "logits of +-8192", "targets of -100", "no target but -100")


def _three_sums(num_ranks: int, vocabulary: int) -> list[Limit]:
    allowed = 2 * (num_ranks - 1) * 3 * TOKENS * 8 * len(BATCHES)
    words = (
        f"the ranks sent {{found:,}} bytes in {len(BATCHES)} calls; all-reduces of three numbers per token send "
        "{most:,}. Logits stay where they are, and the backward needs no message."
    )
    return [Limit("bytes", allowed, words, least=allowed / 3)]


def _loss_in_words(off: Off) -> str:
    if off.found is not None and any(value != value for value in off.found.flat):
        return f"{off.name} is not a number"
    return in_words(off)


def _batch(case: str, vocabulary: int) -> "tuple[Tensor, Tensor]":
    """Logits of all entries and targets, of one of `BATCHES`."""
    import torch

    generator = torch.Generator().manual_seed(vocabulary)
    targets = torch.arange(TOKENS) % vocabulary
    y = torch.zeros(TOKENS, vocabulary, dtype=torch.float64)
    if case != BATCHES[0]:
        y = 3 * torch.randn(TOKENS, vocabulary, generator=generator, dtype=torch.float64)
    if case == BATCHES[2]:
        y[0, -1], y[1, 0], y[2, :], y[3, vocabulary // 2] = 8192, 8192, -8192, -8192
    if case == BATCHES[3]:
        targets[::2] = IGNORE_INDEX
    if case == BATCHES[4]:
        targets[:] = IGNORE_INDEX
    return y, targets


def _run(rank: int, world_size: int, fn: Callable[..., Any], vocabulary: int) -> Found:
    """All batches in one launch."""
    import torch

    from dualpipe_lab.tp.shard import TensorParallel

    own = slice(*TensorParallel().span(vocabulary))
    found: dict[str, Numbers | None] = {}
    expected: dict[str, Numbers | None] = {}
    for case in BATCHES:
        y, targets = _batch(case, vocabulary)
        given = y[:, own].clone(), targets.clone()
        unchanged = Unchanged(y=given[0], targets=given[1])
        returned = fn(*given, own.start)
        unchanged.check()
        assert isinstance(returned, tuple), "return two things: the mean loss and the gradient"
        loss, gradient = (torch.as_tensor(value) for value in returned)
        names = f"the loss for {case}", f"the gradient for {case}"
        found |= zip(names, (Numbers.of(loss.flatten()), Numbers.of(gradient)), strict=True)
        expected |= zip(names, map(Numbers.of, _on_one_process(y, targets, own)), strict=True)
    return Found(found, expected)


def _on_one_process(y: "Tensor", targets: "Tensor", own: slice) -> "tuple[Tensor, Tensor]":
    """The mean, and the gradient of this rank's logits."""
    from torch.nn.functional import cross_entropy

    whole = y.clone().requires_grad_()
    mean = cross_entropy(whole, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    mean = mean / max(int((targets != IGNORE_INDEX).sum()), 1)
    mean.backward()
    return mean.detach().flatten(), whole.grad[:, own]


_SLIPS = (
    {
        43_008: "each byte passes a rank twice, as a partial sum and finished",
        98_304: "of both ways, 7/8 leave the rank",
        57_344: "that is two numbers per token; the maximum is the third",
        114_688: "three numbers per token are enough without smoothing",
    },
    {
        983_040_000: "a rank's own eighth does not travel to it",
        1_720_320_000: "a gather passes each byte once, and a logit in bf16 has 2 bytes",
        430_080_000: "count bytes: a logit in bf16 has 2 of them",
    },
    {
        86_016: "smoothing needs a fourth number, the sum of all shifted logits",
        172_032: "one number more, not three",
    },
)


numbers = Predict(
    "cross_entropy-1",
    "The bytes of a loss",
    ("bytes of the loss", "bytes of a gather", "bytes with smoothing"),
    lambda tokens, words, t: (
        24 * tokens * (t - 1) // t,
        2 * tokens * words * (t - 1) // t,
        32 * tokens * (t - 1) // t,
    ),
    "{tokens:,} tokens, a vocabulary of {words:,} entries cut over {t} ranks",
    minutes=12,
    points=1,
    hints=(
        "Three numbers per token: the maximum, the sum of exponentials, the target's logit. Four bytes each.",
        "An all-reduce sends 2 (t - 1) / t of its tensor from each rank, a gather (t - 1) / t of the whole result.",
        "Label smoothing spreads a part of the target over all entries: it needs the sum of all shifted logits too.",
    ),
    slips=_SLIPS,
    tokens=(4096, 1024, 2048, 8192),
    words=(120_000, 64_000, 96_000, 128_000),
    t=(8, 4, 16),
    called={"t": "ranks", "words": "vocabulary"},
)

loss_and_gradient = Implement(
    "cross_entropy-2",
    "Loss and gradient of one's own columns",
    "Write `loss_and_gradient(y, targets, first)`: the mean loss and the gradient of this rank's logits.",
    cases=((1, 4), (2, 16), (2, 7), (4, 8), (3, 4)),
    run=_run,
    limits=_three_sums,
    why=_loss_in_words,
    named="{1} entries on {0} rank(s)",
    without=LIBRARY,
    right="loss and gradient equal one process on 25 batches, a rank without columns included; 3 numbers per token",
    minutes=25,
    points=4,
    hints=(
        "M = y.amax(1) and an all-reduce with 'max'. A rank without columns contributes -inf: build M with new_full.",
        "Clamp the column of targets that are not here, look up, and multiply by the mask; -100 is no rank's target.",
        "The gradient is softmax minus one-hot, zero where the target is -100, over max(n, 1) valid targets. "
        "All ranks have all targets, so n needs no message.",
    ),
)
