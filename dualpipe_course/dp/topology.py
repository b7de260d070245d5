"""Exercises of "Topology": a rank's neighbours, groups of several axes.

Chapter: book/dp/topology.  Groups are compared with `Topology`.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, TypeAlias

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.plain import plain
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended, smallest_failing
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

Axes: TypeAlias = list[tuple[str, int]]


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
