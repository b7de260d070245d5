"""Judging dealt-out optimizers: their weights against one process, the bytes that each rank really holds, and messages.

Bytes are those of live tensors, by storage: a view of a large tensor counts as the large tensor, wherever it is kept.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_lab.checks.exercise import Wrong
from dualpipe_lab.checks.switched_off import Without
from dualpipe_lab.checks.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = tuple(f"dualpipe_lab.dp.{name}" for name in ("adam", "grad_norm", "zero1", "zero2", "zero3", "ddp"))
BETAS, EPS, LR, TOLERANCE = (0.9, 0.999), 1e-8, 0.01, 1e-12
NUM_STEPS = 4
SPARE = 64  # bytes: a step number, a norm


class Trained(NamedTuple):
    """What one rank has after some steps: the weights after the first step and the last, and bytes held beside them."""

    first: list[float]
    last: list[float]
    held: int


def check_step(fn: Callable[..., Any], num_ranks: int, numel: int) -> None:
    """Raise `Wrong` unless `fn(weights, grad, decay, state, lr)` is AdamW with its state dealt out."""
    case = f"{num_ranks} rank(s), {numel} weights"
    results = on_ranks(_by_function, num_ranks, Without(fn, *LIBRARY), numel, case=case)
    _check_trained(results, num_ranks, numel, case, True)
    sent = results.ledger.sent()
    if sent > num_ranks * (num_ranks - 1) * NUM_STEPS * shard_bytes(numel, num_ranks):
        raise Wrong(
            f"{case}: the ranks sent {sent:,} bytes in {NUM_STEPS} steps; gathering the shards of the weights, once a "
            "step, is all that is needed: the gradient is summed already, and the moments stay where they are"
        )


def check_class(cls: Callable[..., Any], num_ranks: int, numel: int) -> None:
    """Raise `Wrong` unless `cls(weights, lr)` with `step(grad)` is Adam with its state dealt out."""
    case = f"{num_ranks} rank(s), {numel} weights"
    results = on_ranks(_by_class, num_ranks, Without(cls, *LIBRARY), numel, case=case)
    _check_trained(results, num_ranks, numel, case, False)


def shard_bytes(numel: int, num_ranks: int) -> int:
    """Bytes of a padded shard in float64.

    >>> shard_bytes(7, 3)
    24
    """
    return 8 * -(-numel // num_ranks)


def _check_trained(results: Sequence[Trained], num_ranks: int, numel: int, case: str, decays: bool) -> None:
    weights = _start(numel)
    expected = _reference(weights, numel, decays)
    for rank, found in enumerate(results):
        for when, ours, theirs in (
            ("1 step", found.first, expected[0]),
            (f"{NUM_STEPS} steps", found.last, expected[1]),
        ):
            if problem := _difference(ours, theirs, weights, rank, num_ranks):
                raise Wrong(f"{case}: rank {rank}, after {when}: {problem}")
    allowed = 2 * shard_bytes(numel, num_ranks) + SPARE
    for rank, found in enumerate(results):
        if found.held > allowed:
            raise Wrong(
                f"{case}: the weights are right, but rank {rank} holds {found.held:,} bytes beside them; two moments "
                f"of its shard are {allowed - SPARE:,}. A rank keeps state for the weights it updates and no others"
            )


def _difference(ours: list[float], theirs: list[float], start: list[float], rank: int, num_ranks: int) -> str | None:
    if len(ours) != len(theirs):
        return f"there are {len(ours)} weights, expected {len(theirs)}"
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not abs(a - b) <= TOLERANCE]
    if not wrong:
        return None
    place, size = wrong[0], -(-len(theirs) // num_ranks)
    if all(ours[i] == start[i] for i in wrong) and all(i // size != rank for i in wrong):
        return f"weight {place}, of rank {place // size}'s shard, has not moved; gather the shards after the update"
    return f"weight {place} is {ours[place]:.12g}, expected {theirs[place]:.12g}"


def _start(numel: int) -> list[float]:
    return [1.0 + 0.25 * place for place in range(numel)]


def _gradient(step: int, place: int) -> float:
    return (-1.0 if step * place % 2 else 1.0) * (0.5 + place) / (1 + step)


def _decay(place: int) -> float:
    return 0.0 if place % 3 == 2 else 0.1


def _reference(start: list[float], numel: int, decays: bool) -> tuple[list[float], list[float]]:
    """The weights after the first and the last step, in plain Python."""
    after: list[list[float]] = []
    w, mu, nu = list(start), [0.0] * numel, [0.0] * numel
    for t in range(1, NUM_STEPS + 1):
        for i in range(numel):
            g = _gradient(t, i)
            mu[i] = BETAS[0] * mu[i] + (1 - BETAS[0]) * g
            nu[i] = BETAS[1] * nu[i] + (1 - BETAS[1]) * g * g
            mu_hat, nu_hat = mu[i] / (1 - BETAS[0] ** t), nu[i] / (1 - BETAS[1] ** t)
            w[i] *= 1 - LR * (_decay(i) if decays else 0.0)
            w[i] -= LR * mu_hat / (sqrt(nu_hat) + EPS)
        after.append(list(w))
    return after[0], after[-1]


def _tensor(values: Sequence[float]) -> "Tensor":
    import torch

    return torch.tensor(values, dtype=torch.float64)


def _train(numel: int, weights: "Tensor", step: Callable[["Tensor"], None], before: int) -> Trained:
    """Take some steps, and weigh what is alive beside what the harness itself holds."""
    from dualpipe_lab.dp.measure import live_bytes

    found = []
    for t in range(1, NUM_STEPS + 1):
        step(_tensor([_gradient(t, i) for i in range(numel)]))
        found.append(weights.tolist())
    return Trained(found[0], found[-1], live_bytes() - before)


def _weigh_empty() -> int:
    """Bytes that are alive already; what lives before this call is left out of all readings, which are quick then."""
    import gc

    from dualpipe_lab.dp.measure import live_bytes

    gc.freeze()
    return live_bytes()


def _by_function(rank: int, world_size: int, fn: Callable[..., Any], numel: int) -> Trained:
    weights, decay = _tensor(_start(numel)), _tensor([_decay(i) for i in range(numel)])
    before, state = _weigh_empty(), dict[str, Any]()
    return _train(numel, weights, lambda grad: fn(weights, grad, decay, state, LR), before)


def _by_class(rank: int, world_size: int, cls: Callable[..., Any], numel: int) -> Trained:
    weights = _tensor(_start(numel))
    before = _weigh_empty()
    return _train(numel, weights, cls(weights, LR).step, before)
