"""Judging dealt-out optimizers: their weights against one process, the bytes that each rank really holds, and messages.

Bytes are those of live tensors, by storage: a view of a large tensor counts as the large tensor, wherever it is kept.
"""

from collections.abc import Callable, Sequence
from itertools import product
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.differences import apart
from dualpipe_course.exercise import Wrong
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = tuple(f"dualpipe_lab.dp.{name}" for name in ("adam", "grad_norm", "zero1", "zero2", "zero3", "ddp"))
BETAS, EPS, LR, TOLERANCE = (0.9, 0.999), 1e-8, 0.01, 1e-12
RATES = (LR, LR, LR / 2, LR / 2)  # of each step
NUM_STEPS, NUM_TENSORS = len(RATES), 2  # two tensors with a state each, stepped in turn
SPARE = 64  # bytes: a step number, a norm


class Trained(NamedTuple):
    """What one rank has: the weights of both tensors after each step, and more.

    `held` are bytes beside the weights, `has_changed` says whether a gradient is no longer what it was.
    """

    after: list[list[list[float]]]
    held: int
    has_changed: bool


def check_step(fn: Callable[..., Any], num_ranks: int, numel: int) -> None:
    """Raise `Wrong` unless `fn(weights, grad, decay, state, lr)` is AdamW with its state dealt out."""
    case = f"{num_ranks} rank(s), {numel} weights"
    results = on_ranks(_by_function, num_ranks, Without(fn, *LIBRARY), numel, case=case)
    _check_trained(results, num_ranks, numel, case, True)
    sent = results.ledger.sent()
    if sent > num_ranks * (num_ranks - 1) * NUM_STEPS * NUM_TENSORS * shard_bytes(numel, num_ranks):
        raise Wrong(
            f"{case}: the ranks sent {sent:,} bytes in {NUM_STEPS} steps of two tensors; gathering the shards of the "
            "weights, once a step, is enough: the gradient is summed already, and the moments stay where they are"
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
    for step in (0, -1):
        for which, rank in product(range(NUM_TENSORS), range(num_ranks)):
            _check_weights(results[rank].after[step][which], step, which, rank, num_ranks, case, decays)
    allowed = 2 * NUM_TENSORS * shard_bytes(numel, num_ranks) + SPARE
    for rank, found in enumerate(results):
        if found.held > allowed:
            raise Wrong(
                f"{case}: the weights are right, but rank {rank} holds {found.held:,} bytes beside two such tensors; "
                f"two moments of its shards are {allowed - SPARE:,}. A rank keeps state for the weights it updates and "
                "no others"
            )
        if found.has_changed:
            raise Wrong(f"{case}: rank {rank}: grad has changed; others may need it still, so leave it as it is")


def _check_weights(
    found: list[float], step: int, which: int, rank: int, num_ranks: int, case: str, decays: bool
) -> None:
    """Raise `Wrong` unless one tensor on one rank is what one process makes of it, after the first or last step."""
    start = _start(len(found), which)
    rates = RATES if decays else [LR / (1 + which)] * NUM_STEPS
    expected, frozen = (_reference(start, which, lrs, decays)[step] for lrs in (rates, [LR] * NUM_STEPS))
    if problem := _difference(found, expected, start, rank, num_ranks):
        of = ", the second of two tensors that have a state each and take turns" * which
        when = f"{NUM_STEPS} steps" if step else "1 step"
        same = all(abs(a - b) <= TOLERANCE for a, b in zip(found, frozen, strict=True))
        slip = "; that is with the lr of the first step, and lr has halved since" * same
        raise Wrong(f"{case}{of}: rank {rank}, after {when}: {problem}{slip}")


def _difference(ours: list[float], theirs: list[float], start: list[float], rank: int, num_ranks: int) -> str | None:
    if len(ours) != len(theirs):
        return f"there are {len(ours)} weights, expected {len(theirs)}"
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not abs(a - b) <= TOLERANCE]
    if not wrong:
        return None
    place, size = wrong[0], -(-len(theirs) // num_ranks)
    if all(ours[i] == start[i] for i in wrong) and all(i // size != rank for i in wrong):
        return f"weight {place}, of rank {place // size}'s shard, has not moved; gather the shards after the update"
    return f"weight {place} {apart(ours[place], theirs[place], TOLERANCE)}"


def _start(numel: int, which: int) -> list[float]:
    return [1.0 + 0.25 * place - 3 * which for place in range(numel)]


def _gradient(step: int, place: int, which: int) -> float:
    return (1 + 4 * which) * (-1.0 if step * place % 2 else 1.0) * (0.5 + place) / (1 + step)


def _decay(place: int) -> float:
    return 0.0 if place % 3 == 2 else 0.1


def _reference(start: list[float], which: int, rates: Sequence[float], decays: bool) -> tuple[list[float], list[float]]:
    """The weights after the first and the last step, in plain Python."""
    numel = len(start)
    after: list[list[float]] = []
    w, mu, nu = list(start), [0.0] * numel, [0.0] * numel
    for t, lr in enumerate(rates, 1):
        for i in range(numel):
            g = _gradient(t, i, which)
            mu[i] = BETAS[0] * mu[i] + (1 - BETAS[0]) * g
            nu[i] = BETAS[1] * nu[i] + (1 - BETAS[1]) * g * g
            mu_hat, nu_hat = mu[i] / (1 - BETAS[0] ** t), nu[i] / (1 - BETAS[1] ** t)
            w[i] *= 1 - lr * (_decay(i) if decays else 0.0)
            w[i] -= lr * mu_hat / (sqrt(nu_hat) + EPS)
        after.append(list(w))
    return after[0], after[-1]


def _tensor(values: Sequence[float]) -> "Tensor":
    import torch

    return torch.tensor(values, dtype=torch.float64)


def _train(numel: int, pair: "list[Tensor]", step: Callable[[int, "Tensor", float], None], before: int) -> Trained:
    """Take some steps, and weigh what is alive beside what the harness itself holds."""
    from dualpipe_lab.dp.measure import live_bytes

    found, has_changed = [], False
    for t, lr in enumerate(RATES, 1):
        for which in range(NUM_TENSORS):
            values = [_gradient(t, i, which) for i in range(numel)]
            grad = _tensor(values)
            step(which, grad, lr)
            has_changed |= grad.tolist() != values
        found.append([weights.tolist() for weights in pair])
    del grad
    return Trained(found, live_bytes() - before, has_changed)


def _weigh_empty() -> int:
    """Bytes that are alive already; what lives before this call is left out of all readings, which are quick then."""
    import gc

    from dualpipe_lab.dp.measure import live_bytes

    gc.freeze()
    return live_bytes()


def _by_function(rank: int, world_size: int, fn: Callable[..., Any], numel: int) -> Trained:
    pair, decay = [_tensor(_start(numel, which)) for which in range(2)], _tensor([_decay(i) for i in range(numel)])
    before, states = _weigh_empty(), [dict[str, Any]() for _ in pair]
    return _train(numel, pair, lambda which, grad, lr: fn(pair[which], grad, decay, states[which], lr), before)


def _by_class(rank: int, world_size: int, cls: Callable[..., Any], numel: int) -> Trained:
    pair = [_tensor(_start(numel, which)) for which in range(NUM_TENSORS)]
    before = _weigh_empty()
    optimizers = [cls(weights, LR / (1 + which)) for which, weights in enumerate(pair)]
    return _train(numel, pair, lambda which, grad, lr: optimizers[which].step(grad), before)
