"""Exercises of "Topology": a rank's neighbours, groups of several axes, a grid for slow links, a sum along an axis.

Chapter: book/dp/topology.  Groups are compared with `Topology`, sums on real ranks with powers of two.
The puzzle asks what crosses the nodes in a step, in activations of one microbatch, for L layers of 12 activations' size
and m = 64 / N microbatches on 64 ranks:
  tp   a ring, 8 (L/p) m (t-1)/t from each rank to the next     four all-reduces per layer and microbatch
  dp   a ring, 2 (N-1)/N * 12 L/(p t)                           the gradients once per step
  pp   a line, 2 m between neighbours                           an activation one way, its gradient the other
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import prod
from typing import Any, TypeAlias

from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.plain import plain
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import (
    call_each,
    ended,
    on_ranks,
    partial_score,
    smallest_failing,
)
from dualpipe_course.wrong import Wrong
from dualpipe_lab.topology import Topology
from dualpipe_lab.topology.grid import Groups

LIBRARY = ("dualpipe_lab.topology.grid",)
NUMBERS = ("coordinate along dp", "next rank along dp", "next rank along pp", "number of model groups")
_SLIPS: tuple[dict[int, str], ...] = (
    {0: "this reads the list from the left; the LAST axis is contiguous in rank", 2: "this is its coordinate along tp"},
    {19: "this is its neighbour along tp, one rank on", 20: "the last axis is contiguous, not the first"},
    {19: "the last axis is contiguous, not the first", 30: "the world ends at 23; after the last comes the first"},
    {8: "this is how many ranks a model group has", 12: "pp is a part of the model too, as tp is"},
)

BUDGET, START = 1_664, 57_344  # of the puzzle: the least that its limits allow, and what its first answer sends
Axes: TypeAlias = list[tuple[str, int]]

RANKS, NODE, LAYERS, MICROBATCHES, LAYER = 64, 8, 16, 64, 12  # LAYER: a layer's weights, in activations
HELD, BUBBLE = 12, Fraction(1, 5)  # the limits: weights per rank, in activations; idle time over all time


def _cases() -> Iterator[tuple[Axes, tuple[str, ...]]]:
    """Small and symmetrical grids first, then odd ones; `along` in the order of the axes and against it."""
    yield [("dp", 2)], ("dp",)
    for axes in (
        [("pp", 2), ("tp", 2)],
        [("pp", 2), ("tp", 3)],
        [("dp", 1), ("tp", 2)],
        [("pp", 2), ("dp", 2), ("tp", 2)],
        [("tp", 3), ("pp", 2), ("dp", 4)],
        [("dp", 2), ("pp", 3), ("cp", 1), ("tp", 2)],
    ):
        names = [name for name, _ in axes]
        yield from ((list(axes), (name,)) for name in names)
        yield list(axes), (names[-1], names[0])
        yield list(axes), (names[0], names[1])
        yield list(axes), tuple(names)


def _smaller(case: tuple[Axes, tuple[str, ...]]) -> Iterator[tuple[Axes, tuple[str, ...]]]:
    axes, along = case
    for place, (name, size) in enumerate(axes):
        if size > 1:
            yield [*axes[:place], (name, size - 1), *axes[place + 1 :]], along
        if name not in along:
            yield axes[:place] + axes[place + 1 :], along
    if len(along) > 1:
        yield from ((axes, along[:place] + along[place + 1 :]) for place in range(len(along)))


def _expected(axes: Axes, along: tuple[str, ...]) -> Groups:
    return tuple(sorted(Topology(axes).groups(*along)))


def _fault(case: tuple[Axes, tuple[str, ...]], outcome: tuple[bool, Any], expected: Groups) -> str | None:
    axes, along = case
    words = f"{' x '.join(f'{name} {size}' for name, size in axes)}, along {' and '.join(along)}"
    fine, value = outcome[0], plain(outcome[1])
    if not fine:
        return ended(words, value)
    if not isinstance(value, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in value):
        return f"{words}: expected a list of groups, got {type(value).__name__}"
    if any(type(rank) is not int for group in value for rank in group):
        return f"{words}: a group is a tuple of whole numbers"
    found = [tuple(group) for group in value]
    world = list(range(prod(size for _, size in axes)))
    if sorted(rank for group in found for rank in group) != world:
        return f"{words}: each of the {len(world)} ranks belongs to exactly one group, got {found}"
    if tuple(found) == expected:
        return None
    if sorted(map(sorted, found)) == sorted(map(list, expected)):
        return f"{words}: the right groups; list each in the order of its ranks, and the groups by their first rank"
    rank = next(rank for rank in world if _own(found, rank) != _own(expected, rank))
    return f"{words}: rank {rank} is in {_own(found, rank)}, expected {_own(expected, rank)}; see the strides"


def _own(groups: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    return next(group for group in groups if rank in group)


def _check_sums(fn: Callable[..., Any], axes: Axes) -> None:
    grid = Topology(axes)
    for axis, _ in axes:
        case = f"{' x '.join(f'{name} {size}' for name, size in axes)}, along {axis}"
        results = on_ranks(_sum_along, grid.world_size, Without(fn, *LIBRARY), axes, axis, case=case)
        for rank, found in enumerate(results):
            own = grid.at(rank).ranks(axis)
            if found != sum(2**member for member in own):
                members = [member for member in range(grid.world_size) if found >> member & 1]
                raise Wrong(f"{case}: rank {rank} has the sum over ranks {members}, expected ranks {list(own)}")
            if results.ledger.count("all_reduce", rank) != 1 or results.ledger.peers(rank) != set(own) - {rank}:
                raise Wrong(
                    f"{case}: rank {rank} communicated with ranks {sorted(results.ledger.peers(rank))} in "
                    f"{results.ledger.count(rank=rank)} call(s); "
                    f"expected one all-reduce with {sorted(set(own) - {rank})}"
                )


def _sum_along(rank: int, world_size: int, fn: Callable[..., Any], axes: Axes, axis: str) -> int:
    import torch

    x = torch.tensor([2**rank])
    fn(x, axes, axis)
    return int(x)


def _parse(answer: object) -> Axes:
    """Return an answer as axes of 64 ranks; raise `Wrong` for anything else."""
    found = plain(answer)
    given: list[Any] = found if isinstance(found, list) else [found]
    if not all(isinstance(axis, (list, tuple)) and len(axis) == 2 and type(axis[1]) is int for axis in given):
        raise Wrong('this check takes a list of axes, outermost first, such as [("tp", 8), ("pp", 2), ("dp", 4)]')
    axes = [(str(name), size) for name, size in given]
    if not {name for name, _ in axes} <= {"tp", "pp", "dp"}:
        raise Wrong("use the axes tp, pp and dp")
    try:
        Topology(axes, world_size=RANKS)
    except ValueError as error:
        raise Wrong(str(error)) from None
    return axes


def _check_limits(axes: Axes) -> None:
    """Raise `Wrong` for a grid whose weights do not fit, or whose pipelines are idle for too long."""
    t, p, n = _sizes(axes)
    held = Fraction(LAYERS * LAYER, t * p)
    if held > HELD:
        raise Wrong(f"a rank would hold weights of {float(held):g} S, it has room for {HELD} S: tp * pp is 16 or more")
    num_microbatches = Fraction(MICROBATCHES, n)
    bubble = (p - 1) / (num_microbatches + p - 1)
    if bubble > BUBBLE:
        raise Wrong(
            f"{p} stages and {num_microbatches} microbatches: bubble fraction {float(bubble):.3f}, "
            f"the limit is {float(BUBBLE):g}"
        )


def _sizes(axes: Axes) -> tuple[int, int, int]:
    sizes = dict(axes)
    return sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("dp", 1)


def _crossing_bytes(axes: Axes) -> dict[str, Fraction]:
    """What crosses the nodes in a step, by axis, in activations of one microbatch."""
    grid = Topology(axes, world_size=RANKS)
    t, p, n = _sizes(axes)
    num_microbatches = Fraction(MICROBATCHES, n)
    hop = {
        "tp": 8 * Fraction(LAYERS, p) * num_microbatches * Fraction(t - 1, t),
        "dp": 2 * Fraction(n - 1, n) * Fraction(LAYER * LAYERS, p * t),
        "pp": 2 * num_microbatches,  # an activation one way, its gradient the other
    }
    found = {}
    for axis in grid.names:
        pairs = [pair for group in grid.groups(axis) for pair in _hops(group, is_ring=axis != "pp")]
        found[axis] = sum(a // NODE != b // NODE for a, b in pairs) * hop[axis]
    return found


def _hops(group: Sequence[int], is_ring: bool) -> list[tuple[int, int]]:
    following = [*group[1:], group[0]] if is_ring else group[1:]
    return list(zip(group, following, strict=False))


def _judge_groups(fn: Callable[..., Any]) -> str:
    cases = list(_cases())
    outcomes = call_each(Without(fn, *LIBRARY), cases)
    wrong = [
        case
        for case, outcome in zip(cases, outcomes, strict=True)
        if _fault(case, outcome, _expected(*case)) is not None
    ]
    if not wrong:
        return f"right on {len(cases)} grids and choices of axes, sizes of 1 and whole worlds included"

    def fails(case: tuple[Axes, tuple[str, ...]]) -> bool:
        return _fault(case, call_each(Without(fn, *LIBRARY), [case])[0], _expected(*case)) is not None

    case = smallest_failing(wrong[0], fails, _smaller)
    raise Wrong(str(_fault(case, call_each(Without(fn, *LIBRARY), [case])[0], _expected(*case))))


def _judge_slow_cables(answer: object) -> str:
    axes = _parse(answer)
    _check_limits(axes)
    crossing = _crossing_bytes(axes)
    total = sum(crossing.values())
    if total > BUDGET:
        parts = ", ".join(f"{axis} {float(sent):,g} S" for axis, sent in crossing.items())
        raise Wrong(
            f"legal, but {float(total):,g} S cross the nodes ({parts}); {BUDGET:,} S are possible",
            score=partial_score(total, START, BUDGET),
        )
    return f"{int(total):,} S cross the nodes, the least that these limits allow"


numbers = Predict(
    "topology-1",
    "Four numbers",
    NUMBERS,
    lambda rank: (rank // 4 % 3, rank // 12 * 12 + (rank + 4) % 12, (rank + 12) % 24, 3),
    "has rank {rank}?",
    "after rank {rank} along dp?",
    "after rank {rank} along pp?",
    minutes=5,
    points=1,
    hints=(
        "Strides from the right: tp 1, dp 4, pp 12.",
        "Divide 18 by 12, the rest by 4: the quotients are the coordinates along pp and dp, the last rest is tp's.",
        "One more along dp adds 4 to the rank. One more along pp adds 12, and past the end it starts at 0 again.",
    ),
    slips=_SLIPS,
    rank=(18, *range(24)),
)

groups = Implement(
    "topology-2",
    "Groups of several axes",
    "Return the groups that run along one or several axes of any grid.",
    judge=_judge_groups,
    minutes=15,
    points=3,
    hints=(
        "First write the stride of every axis: the product of the sizes to its right.",
        "The ranks of the group of rank 0 are the sums of one multiple of each stride along the axes; "
        "itertools.product runs through the multiples.",
        "Every other group is that one moved. By what? By the same sums along the axes that are NOT in `along`.",
    ),
)

slow_cables = Puzzle(
    "topology-3",
    "Sixty-four ranks and slow cables",
    "Arrange 64 ranks on nodes of 8 so that a step sends at most 1,664 activations between the nodes.",
    judge=_judge_slow_cables,
    minutes=30,
    points=3,
    hints=(
        "First the sizes: tp * pp is 16 or more, and the bubble limits pp. "
        "How many microbatches has a pipeline if dp is 4?",
        "Then the order. Which axis has the most bytes per rank? It belongs inside a node.",
        "With all sizes 4 a node holds one tp group and half of another axis. Try both axes there.",
    ),
)

sum_along = Repair(
    "topology-4",
    "The sum of the wrong ranks",
    "Repair `sum_along(x, axes, axis)`: the sum over this rank's group along an axis, in place.",
    cases=(([("dp", 2)],), ([("pp", 2), ("dp", 2)],), ([("pp", 2), ("tp", 3)],), ([("pp", 2), ("dp", 1), ("tp", 3)],)),
    judge=_check_sums,
    right="every axis of 4 grids sums over its own ranks, with one all-reduce of the group",
    minutes=12,
    points=2,
    hints=(
        "Try pp 2, tp 3 on paper: which ranks should rank 0 meet along tp, and which does the function name?",
        "How far apart are neighbours along an axis? Count the ranks to the RIGHT of it.",
        "Making a group is a collective of the world: every rank makes the groups of all, and keeps its own.",
    ),
)
