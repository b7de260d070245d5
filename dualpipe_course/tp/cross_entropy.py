"""Exercises of "Cross-entropy": bytes of a loss, loss and gradient, a maximum of one's own.

Chapter: book/tp/cross-entropy.  Losses are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import (
    Found,
    Limit,
    Numbers,
    Off,
    Unchanged,
    check_found,
    check_limit,
    in_words,
)
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.differences import apart
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor


IGNORE_INDEX, TOKENS = -100, 6
LIBRARY = tuple(  # switched off while an answer runs
    f"dualpipe_lab.tp.{name}"
    for name in ("cross_entropy", "cross_entropy:CrossEntropy.forward", "chunked_cross_entropy", "lm_head")
)
CASES = ("equal logits", "random logits", "logits of +-8192", "targets of -100", "no target but -100")
_MAXIMA = "exponentials to which ranks subtracted different maxima were added up"


def _check_cases(
    fn: Callable[..., Any], num_ranks: int, vocabulary: int, cases: Sequence[str], means: bool, because: str
) -> None:
    """Raise `Wrong` unless the answer is right in every case, for three numbers per token that are all-reduced.

    `means` tells what it returns: mean and gradient, or the loss of each token.
    """
    where = f"{vocabulary} entries on {num_ranks} rank(s)"
    results = on_ranks(_run, num_ranks, Without(fn, *LIBRARY), vocabulary, cases, means, case=where)
    for place, case in enumerate(cases):
        check_found([found[place] for found in results], f"{where}, {case}", why=_loss_in_words, at=", rank {rank}: ")
    allowed = 2 * (num_ranks - 1) * 3 * TOKENS * 8 * len(cases)
    words = (
        f"the ranks sent {{found:,}} bytes in {len(cases)} call(s); all-reduces of three numbers per token send "
        f"{{most:,}}. {because}"
    )
    check_limit(results, Limit("bytes", allowed, words, least=allowed / 3), where)


def _loss_in_words(off: Off) -> str:
    assert off.found is not None, "return numbers"
    if off.name == "gradient":
        return f"the {in_words(off)}"
    if off.has_other_shape:
        return f"{len(off.found.flat)} losses, expected {len(off.expected.flat)}"
    ours, theirs = off.found.flat[off.place], off.expected.flat[off.place]
    what = f"the loss of token {off.place}" if len(off.expected.flat) > 1 else "the loss"
    if ours != ours:
        return f"{what} is not a number, expected {theirs:.6g}"
    return f"{what} {apart(ours, theirs)}" + f": {off.slip}" * bool(off.slip)


def _batch(case: str, vocabulary: int) -> "tuple[Tensor, Tensor]":
    """Logits of all entries and targets, of one of `CASES`."""
    import torch

    generator = torch.Generator().manual_seed(vocabulary)
    targets = torch.arange(TOKENS) % vocabulary
    y = torch.zeros(TOKENS, vocabulary, dtype=torch.float64)
    if case != CASES[0]:
        y = 3 * torch.randn(TOKENS, vocabulary, generator=generator, dtype=torch.float64)
    if case == CASES[2]:
        y[0, -1], y[1, 0], y[2, :], y[3, vocabulary // 2] = 8192, 8192, -8192, -8192
    if case == CASES[3]:
        targets[::2] = IGNORE_INDEX
    if case == CASES[4]:
        targets[:] = IGNORE_INDEX
    return y, targets


def _run(
    rank: int, world_size: int, fn: Callable[..., Any], vocabulary: int, cases: Sequence[str], means: bool
) -> list[Found]:
    from dualpipe_lab.tp.shard import TensorParallel

    own, results = slice(*TensorParallel().span(vocabulary)), []
    for case in cases:
        y, targets = _batch(case, vocabulary)
        given = y[:, own].clone(), targets.clone()
        unchanged = Unchanged(y=given[0], targets=given[1])
        returned = fn(*given, own.start)
        unchanged.check()
        if means:
            assert isinstance(returned, tuple), "return two things: the mean loss and the gradient"
            results.append(_beside(returned[0], returned[1], y, targets, own))
        else:
            results.append(_losses_beside(returned, y, targets, world_size))
    return results


def _beside(loss: Any, gradient: Any, y: "Tensor", targets: "Tensor", own: slice) -> Found:
    """A mean and the gradient of this rank's logits, beside one process."""
    import torch
    from torch.nn.functional import cross_entropy

    whole = y.clone().requires_grad_()
    expected = cross_entropy(whole, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    expected = expected / max(int((targets != IGNORE_INDEX).sum()), 1)
    expected.backward()
    return Found(
        {"loss": Numbers.of(torch.as_tensor(loss).flatten()), "gradient": Numbers.of(torch.as_tensor(gradient))},
        {"loss": Numbers.of(expected.flatten()), "gradient": Numbers.of(whole.grad[:, own])},
    )


def _losses_beside(losses: Any, y: "Tensor", targets: "Tensor", num_ranks: int) -> Found:
    """The loss of each token, beside one process, and those of ranks that subtract the maximum of their own columns."""
    import torch
    from torch.nn.functional import cross_entropy

    parts = y.split(-(-y.shape[1] // num_ranks), dim=1)
    shifted = torch.cat([part - part.amax(1, keepdim=True) for part in parts], dim=1)
    slip = shifted.exp().sum(1).log() - shifted.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return Found(
        {"losses": Numbers.of(torch.as_tensor(losses).flatten())},
        {"losses": Numbers.of(cross_entropy(y, targets, ignore_index=IGNORE_INDEX, reduction="none"))},
        {"losses": {_MAXIMA: Numbers.of(slip)}},
    )


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


def _judge_loss_and_gradient(fn: Callable[..., Any], num_ranks: int, vocabulary: int) -> None:
    why = "Logits stay where they are, and the backward needs no message."
    _check_cases(fn, num_ranks, vocabulary, CASES, means=True, because=why)


def _judge_losses(fn: Callable[..., Any], num_ranks: int, vocabulary: int) -> None:
    why = "One maximum per token is all that is missing."
    _check_cases(fn, num_ranks, vocabulary, CASES[:3], means=False, because=why)


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
    judge=_judge_loss_and_gradient,
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

losses = Repair(
    "cross_entropy-3",
    "A maximum of one's own",
    "Repair `losses(y, targets, first)`, which gives too small a loss as soon as the ranks' maxima differ.",
    cases=((1, 4), (2, 16), (3, 7), (4, 8)),
    judge=_judge_losses,
    right="the losses equal one process for any logits, +-8192 included",
    minutes=5,
    points=2,
    hints=(
        "Put equal logits in: the result is right. What is different about ranks whose logits are not equal?",
        "Sums of exponentials may be added if the same number was subtracted from all logits of a token.",
        "One more all-reduce, of the maximum, before anything is subtracted. It is needed for the target as well.",
    ),
)
