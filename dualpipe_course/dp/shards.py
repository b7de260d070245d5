"""Judging what ranks do with shards: a momentum step and a norm, beside the same on whole tensors."""

from collections.abc import Callable
from typing import Any

from dualpipe_course.differences import apart, close
from dualpipe_course.exercise import Wrong
from dualpipe_course.trial import on_ranks

RATES, MOMENTUM = (0.5, 0.5, 0.25), 0.75  # powers of two and their sums: no rounding in the reference
STEPS, TENSORS = len(RATES), 2  # two tensors with a state each, stepped in turn
NUMBER = 8  # bytes of a float64


def check_momentum(fn: Callable[..., Any], num_ranks: int, numel: int) -> None:
    """Raise `Wrong` unless three steps give the weights of one process, with a shard of state and little traffic."""
    case, shard = f"{numel} weights on {num_ranks} rank(s)", -(-numel // num_ranks)
    results = on_ranks(_momentum, num_ranks, fn, numel, case=case)
    for rank, (tensors, held) in enumerate(results):
        for which, (found, expected, slips) in enumerate(tensors):
            if (problem := _wrong_weight(found, expected, slips, shard)) is not None:
                of = ", second of two tensors that have a state each and take turns" * which
                raise Wrong(f"{case}{of}: after {STEPS} steps on rank {rank}, {problem}")
        if held > TENSORS * shard * NUMBER:
            raise Wrong(
                f"{case}: for two such tensors rank {rank} holds {held} bytes between steps that were not there "
                f"before; two shards of {shard} numbers are {TENSORS * shard * NUMBER}. A slice of a larger tensor "
                "keeps all of it alive"
            )
        sent, bound = results.ledger.sent(rank=rank), TENSORS * STEPS * 2 * (num_ranks - 1) * shard * NUMBER
        if sent > bound:
            raise Wrong(
                f"{case}: rank {rank} sent {sent} bytes in {STEPS} steps of two tensors; a reduce-scatter and an "
                f"all-gather of the padded buffers send {bound}"
            )


def check_norm(fn: Callable[..., Any], num_ranks: int, numel: int) -> None:
    """Raise `Wrong` unless every rank gets the norm of the whole gradient, for one number of each other rank."""
    case = f"{numel} numbers on {num_ranks} rank(s)"
    results = on_ranks(_norm, num_ranks, fn, numel, case=case)
    square = sum(_element(index) ** 2 for index in range(numel))
    for rank, found in enumerate(results):
        if not isinstance(found, float) or not abs(found**2 - square) <= 1e-9 * square:
            both = apart(found if isinstance(found, float) else 0.0, square**0.5, 1e-9 * square**0.5)
            text = f"{both.found}{both.why}" if isinstance(found, float) else f"a {found}, not a number"
            raise Wrong(
                f"{case}: rank {rank} returned {text}; the whole gradient {[_element(i) for i in range(numel)][:5]} "
                f"has {both.expected}. Which numbers does each rank square?"
            )
        if (sent := results.ledger.sent(rank=rank)) > 2 * NUMBER:
            raise Wrong(f"{case}: rank {rank} sent {sent} bytes; one sum of squares per rank is enough")


def _element(index: int) -> int:
    return index % 5 + 1


def _momentum(rank: int, world_size: int, fn: Callable[..., Any], numel: int) -> tuple[Any, ...]:
    """One rank: for both tensors weights, what they should be and what slips make of them; bytes that stay."""
    import gc

    import torch

    from dualpipe_lab.dp.measure import live_bytes

    tensors, summands, judged = [], [], []
    for which in range(TENSORS):
        generator = torch.Generator().manual_seed(5 + which)
        weights = torch.randn(numel, dtype=torch.float64, generator=generator)
        grads = torch.randn(STEPS, world_size, numel, dtype=torch.float64, generator=generator)
        judged.append(_expected(weights, grads, rank))
        tensors.append(weights)
        summands.append(grads[:, rank].clone())
    del grads
    states: list[dict[str, torch.Tensor]] = [{} for _ in tensors]
    gc.freeze()
    before = live_bytes()
    for step, lr in enumerate(RATES):
        for weights, summand, state in zip(tensors, summands, states, strict=True):
            fn(weights, summand[step], state, lr, MOMENTUM)
    held = live_bytes() - before
    return [(weights.tolist(), *words) for weights, words in zip(tensors, judged, strict=True)], held


def _expected(weights: Any, grads: Any, rank: int) -> tuple[list[float], dict[str, list[float]]]:
    sums = grads.sum(1)
    slips = {
        "the mean of the ranks' gradients was used, not their sum": _train(weights, grads.mean(1), MOMENTUM),
        "every rank used its own gradient, nothing was summed": _train(weights, grads[:, rank], MOMENTUM),
        "there is no momentum": _train(weights, sums, 0.0),
        "the weights are those of the start": weights,
        "lr is inside of the velocity, and lr has halved since": _train(weights, sums, MOMENTUM, is_inside=True),
    }
    return _train(weights, sums, MOMENTUM).tolist(), {text: values.tolist() for text, values in slips.items()}


def _train(weights: Any, grads: Any, momentum: float, is_inside: bool = False) -> Any:
    weights, velocity = weights.clone(), weights * 0
    for lr, grad in zip(RATES, grads, strict=True):
        velocity = momentum * velocity + grad * (lr if is_inside else 1)
        weights = weights - velocity * (1 if is_inside else lr)
    return weights


def _wrong_weight(found: list[float], expected: list[float], slips: dict[str, list[float]], shard: int) -> str | None:
    if close(found, expected):
        return None
    known = next((text for text, values in slips.items() if close(found, values)), None)
    if known is not None:
        return known
    index = next(index for index, value in enumerate(found) if not close([value], [expected[index]]))
    owner = f"it lies in rank {index // shard}'s shard"
    both = apart(found[index], expected[index])
    return f"weight {index} is {both.found}, that of one process {both.expected}{both.why}; {owner}"


def _norm(rank: int, world_size: int, fn: Callable[..., Any], numel: int) -> Any:
    import torch

    size = -(-numel // world_size)
    flat = torch.tensor([float(_element(index)) for index in range(numel)], dtype=torch.float64)
    unfinished = torch.tensor([not rank * size <= index < (rank + 1) * size for index in range(numel)])
    flat[unfinished] /= rank + 2  # the others' shards hold some summands only
    found = fn(flat)
    return float(found) if type(found) in (int, float) else type(found).__name__
