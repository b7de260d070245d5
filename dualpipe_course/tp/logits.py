"""Judging losses over a cut vocabulary: logits that go wrong, one process as judge, and the bytes that were sent."""

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.differences import apart, close, difference
from dualpipe_course.exercise import Wrong
from dualpipe_course.kept import Kept
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_lab.world.launcher import Results

if TYPE_CHECKING:
    from torch import Tensor

IGNORED, TOKENS = -100, 6
LIBRARY = tuple(  # switched off while an answer runs
    f"dualpipe_lab.tp.{name}" for name in ("cross_entropy", "cross_entropy:CrossEntropy.forward", "lm_head")
)
CASES = ("equal logits", "random logits", "logits of +-8192", "targets of -100", "no target but -100")


class Found(NamedTuple):
    """What one rank found in one case, what one process finds, and what its own maximum alone would give."""

    losses: list[float]
    gradient: list[list[float]]
    expected: list[float]
    expected_gradient: list[list[float]]
    own_maximum: list[float]


def batch(case: str, vocabulary: int) -> "tuple[Tensor, Tensor]":
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
        targets[::2] = IGNORED
    if case == CASES[4]:
        targets[:] = IGNORED
    return y, targets


def run(fn: Callable[..., Any], num_ranks: int, vocabulary: int, cases: tuple[str, ...], means: bool) -> Results:
    """Launch the answer over the cases; `means` tells what it returns: mean and gradient, or the loss of each token."""
    name = named(num_ranks, vocabulary)
    return on_ranks(_run, num_ranks, Without(fn, *LIBRARY), vocabulary, cases, means, case=name)


def check_losses(results: Results, vocabulary: int, cases: tuple[str, ...]) -> None:
    """Raise `Wrong` unless every rank found the losses and the gradients of one process."""
    for rank, by_case in enumerate(results):
        for case, found in zip(cases, by_case, strict=True):
            where = f"{named(len(results), vocabulary)}, {case}, rank {rank}: "
            if (problem := _why_losses(found)) is not None:
                raise Wrong(where + problem)
            if (problem := _why_gradient(found, len(results))) is not None:
                raise Wrong(where + problem)


def check_bytes(results: Results, vocabulary: int, num_calls: int, why: str) -> None:
    """Raise `Wrong` unless the ranks sent at most three float64 numbers per token through all-reduces."""
    num_ranks, sent = len(results), results.ledger.sent()
    allowed = 2 * (num_ranks - 1) * 3 * TOKENS * 8 * num_calls
    if sent > allowed or 3 * sent < allowed:
        raise Wrong(
            f"{named(num_ranks, vocabulary)}: the ranks sent {sent:,} bytes in {num_calls} call(s); all-reduces of "
            f"three numbers per token send {allowed:,}. {why}"
        )


def named(num_ranks: int, vocabulary: int) -> str:
    """A case in words."""
    return f"{vocabulary} entries on {num_ranks} rank(s)"


def _why_losses(found: Found) -> str | None:
    if len(found.losses) != len(found.expected):
        return f"{len(found.losses)} losses, expected {len(found.expected)}"
    for place, (ours, theirs) in enumerate(zip(found.losses, found.expected, strict=True)):
        if close([ours], [theirs]):
            continue
        what = f"the loss of token {place}" if len(found.expected) > 1 else "the loss"
        if ours != ours:
            return f"{what} is not a number, expected {theirs:.6g}"
        if found.own_maximum and abs(ours - found.own_maximum[place]) <= 1e-9:
            return (
                f"{what} {apart(ours, theirs)}: exponentials to which ranks subtracted different maxima were added up"
            )
        return f"{what} {apart(ours, theirs)}"
    return None


def _why_gradient(found: Found, num_ranks: int) -> str | None:
    ours, theirs = found.gradient, found.expected_gradient
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        return f"the gradient has {len(ours)} rows of {len(ours[0]) if ours else 0} columns, expected this rank's"
    off = difference(list(chain.from_iterable(ours)), list(chain.from_iterable(theirs)))
    if off is None:
        return None
    if off.ratio is not None:
        known = ", the number of ranks" if num_ranks > 1 and abs(off.ratio - num_ranks) < 1e-9 else ""
        return f"the gradient is {off.ratio:.4g} times that of one process{known}"
    return f"the numbers of the gradient of the logits {off}"


def _run(
    rank: int, world_size: int, fn: Callable[..., Any], vocabulary: int, cases: tuple[str, ...], means: bool
) -> list[Found]:
    import torch
    from torch.nn.functional import cross_entropy

    from dualpipe_lab.tp.config import TensorParallel

    start, stop = TensorParallel().span(vocabulary)
    results = []
    for case in cases:
        y, targets = batch(case, vocabulary)
        given = y[:, start:stop].clone(), targets.clone()
        kept = Kept(y=given[0], targets=given[1])
        returned = fn(*given, start)
        kept.check()
        whole = y.clone().requires_grad_()
        reduction = "sum" if means else "none"
        losses = cross_entropy(whole, targets, ignore_index=IGNORED, reduction=reduction)
        if not means:
            own = _own_maximum(y, targets, world_size)
            results.append(Found(_numbers(returned), [], losses.tolist(), [], own))
            continue
        losses = losses / max(int((targets != IGNORED).sum()), 1)
        losses.backward()
        assert isinstance(returned, tuple), "return two things: the mean loss and the gradient"
        gradient = torch.as_tensor(returned[1]).tolist()
        results.append(
            Found(_numbers(returned[0]), gradient, [float(losses.detach())], whole.grad[:, start:stop].tolist(), [])
        )
    return results


def _own_maximum(y: "Tensor", targets: "Tensor", num_ranks: int) -> list[float]:
    """The losses that come out if every rank subtracts the maximum of its own columns."""
    import torch

    parts = y.split(-(-y.shape[1] // num_ranks), dim=1)
    shifted = torch.cat([part - part.amax(1, keepdim=True) for part in parts], dim=1)
    losses = shifted.exp().sum(1).log() - shifted.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    found: list[float] = losses.tolist()
    return found


def _numbers(value: Any) -> list[float]:
    import torch

    return [float(number) for number in torch.as_tensor(value).detach().flatten()]
