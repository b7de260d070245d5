"""Judging hooks that scatter gradients: shards against one process, and what is left of the whole gradients."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.differences import close
from dualpipe_course.exercise import Wrong
from dualpipe_course.trial import on_ranks
from dualpipe_lab.world.launcher import Results

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("head", "a", "b", "first", "bias")
BEFORE_FIRST = 3  # buckets that are full when the backward of the first layer begins
BUCKETS = (("head",), ("a",), ("b",), ("first", "bias"))  # a and b have one shape: mixed up, they still fit


def check_buckets(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless `fn(buckets, shards)` makes the hooks of ZeRO-2."""
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es)"
    results = on_ranks(_with_buckets, num_ranks, fn, num_microbatches, case=case)
    _check_shards(results, [", ".join(names) for names in BUCKETS], case)
    _check_left(results, case)
    for rank, (*_, early) in enumerate(results):
        if early != BEFORE_FIRST * num_microbatches:
            raise Wrong(
                f"{case}: when the backward of the first layer began, rank {rank} had sent "
                f"{early / num_microbatches:g} of the {BEFORE_FIRST} buckets that were full; a bucket that waits for "
                "the end of the backward keeps its whole gradient alive, as plain data parallelism does"
            )
    count = results.ledger.count("reduce_scatter_single", 0)
    if count != (expected := len(BUCKETS) * num_microbatches):
        raise Wrong(f"{case}: {count} reduce-scatters, expected {expected}: one for each bucket of each microbatch")


def check_scatter(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless `fn(parameter, shard)` adds each microbatch once."""
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es)"
    results = on_ranks(_with_scatter, num_ranks, fn, num_microbatches, case=case)
    _check_shards(results, list(NAMES), case)
    if num_microbatches > 1:  # with one, the same slip shows in the numbers of the next case, which say more
        _check_left(results, case)


def _check_shards(results: Results, names: list[str], case: str) -> None:
    for rank, (found, expected, slips, *_) in enumerate(results):
        for index, name in enumerate(names):
            if not close(found[index], expected[index]):
                known = next((text for text, values in slips.items() if close(found[index], values[index])), None)
                reason = known or "it differs from that of one process; did buckets change places?"
                raise Wrong(f"{case}: on rank {rank}, the shard of {name}: {reason}")


def _check_left(results: Results, case: str) -> None:
    for rank, (*_, left, _) in enumerate(results):
        if left:
            raise Wrong(
                f"{case}: rank {rank} still holds {left} bytes of whole gradients after the backward; drop .grad, and "
                "any buffer, as soon as they have left"
            )


def _make() -> dict[str, "Tensor"]:
    import torch

    generator = torch.Generator().manual_seed(11)
    shapes = {"head": (3, 5), "a": (5, 5), "b": (5, 5), "first": (5, 7), "bias": (5,)}  # 7 x 5 divides by no 2, 3 or 4
    return {
        name: torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def _backward(
    weights: dict[str, "Tensor"], rank: int, microbatch: int, before_first: Callable[[], None] = lambda: None
) -> None:
    """Odd ranks run the experts in the other order; `before_first` is called when the first layer is left alone."""
    import torch

    generator = torch.Generator().manual_seed(100 * rank + microbatch)
    x = torch.randn(4, 7, dtype=torch.float64, generator=generator)
    hidden = torch.tanh(x @ weights["first"].t() + weights["bias"])
    hidden.register_hook(lambda _: before_first())
    order = "ab" if rank % 2 == 0 else "ba"
    parts = {name: torch.tanh(hidden @ weights[name]) for name in order}
    ((parts["a"] - 2 * parts["b"]) @ weights["head"].t()).square().sum().backward()


def _expected(world_size: int, num_microbatches: int) -> list[dict[str, "Tensor"]]:
    """For each microbatch, the gradients summed over the ranks."""
    sums = []
    for microbatch in range(num_microbatches):
        weights = _make()
        for rank in range(world_size):
            _backward(weights, rank, microbatch)
        sums.append({name: weight.grad.clone() for name, weight in weights.items()})
    return sums


def _cut(grads: dict[str, "Tensor"], groups: Any, rank: int, world_size: int) -> list[list[float]]:
    """This rank's shard of each group of gradients, as numbers."""
    import torch

    found = []
    for names in groups:
        flat = torch.cat([grads[name].flatten() for name in names])
        size = -(-len(flat) // world_size)
        own = flat[rank * size : (rank + 1) * size].tolist()
        found.append(own + [0.0] * (size - len(own)))
    return found


def _answers(groups: Any, rank: int, world_size: int, num_microbatches: int) -> tuple[Any, Any]:
    """The right shards, and those of typical slips."""
    parts = _expected(world_size, num_microbatches)
    weighed = {
        "right": [1.0] * num_microbatches,
        "it is that of the last microbatch alone; add, do not copy": [0.0] * (num_microbatches - 1) + [1.0],
        "it is that of the first microbatch alone": [1.0] + [0.0] * (num_microbatches - 1),
        "microbatches count several times, early ones most; what .grad still holds is sent again": [
            float(num_microbatches - index) for index in range(num_microbatches)
        ],
        "it is divided by the ranks; the loss is divided already": [1.0 / world_size] * num_microbatches,
        "it is zero; did anything arrive?": [0.0] * num_microbatches,
    }
    made = {}
    for text, factors in weighed.items():
        total = {name: sum(f * part[name] for f, part in zip(factors, parts, strict=True)) for name in NAMES}
        made[text] = _cut(total, groups, rank, world_size)
    return made.pop("right"), made


def _with_buckets(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> tuple[Any, ...]:
    weights = _make()
    groups = [[weights[name] for name in names] for names in BUCKETS]
    shards = [group[0].new_zeros(-(-sum(p.numel() for p in group) // world_size)).detach() for group in groups]
    left, early = _run(weights, rank, num_microbatches, lambda: fn(groups, shards))
    return [shard.tolist() for shard in shards], *_answers(BUCKETS, rank, world_size, num_microbatches), left, early


def _with_scatter(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> tuple[Any, ...]:
    weights = _make()
    shards = {name: w.new_zeros(-(-w.numel() // world_size)).detach() for name, w in weights.items()}

    def after_each() -> None:
        for name, weight in weights.items():
            fn(weight, shards[name])

    left, _ = _run(weights, rank, num_microbatches, lambda: None, after_each)
    answers = _answers([[name] for name in NAMES], rank, world_size, num_microbatches)
    return [shards[name].tolist() for name in NAMES], *answers, left, 0


def _run(
    weights: dict[str, "Tensor"],
    rank: int,
    num_microbatches: int,
    attach: Callable[[], None],
    after_each: Callable[[], None] = lambda: None,
) -> tuple[int, int]:
    """All microbatches; returns bytes that live afterwards and did not before, and sends before the first layer's."""
    import gc

    from dualpipe_lab.dp.measure import live_bytes
    from dualpipe_lab.world.context import rank_context

    gc.freeze()
    before, early, ledger = live_bytes(), 0, rank_context().ledger

    def count() -> int:
        return sum(entry.count for entry in ledger.entries.values())

    attach()
    for microbatch in range(num_microbatches):
        sent, at_first = count(), list[int]()
        _backward(weights, rank, microbatch, lambda seen=at_first: seen.append(count()))  # type: ignore[misc]
        early += at_first[0] - sent
        after_each()
    return live_bytes() - before, early
