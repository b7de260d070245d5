"""What each rank of a compact program has to do on each of its stages: how often, and between which of its steps.

In: the arrays of a `CompactProgram`.  Out: counts by rank; `Passes`, one for each stage of each rank.
"""

from typing import TYPE_CHECKING, NamedTuple

from dualpipe_lab.pp.compact.arrays import IS_F, Ints
from dualpipe_lab.pp.program import WORK_KINDS

if TYPE_CHECKING:
    from dualpipe_lab.pp.compact.action_arrays import ActionArrays


class Count(NamedTuple):
    """How many actions of one kind a rank has on one stage."""

    stage: int
    kind: str
    num_actions: int


class Passes(NamedTuple):
    """The first forward and the last backward (B, I or W) of each stage of each rank, in the order of the forwards.

    Attributes:
        rank, stage: of each.
        first, last: the action that begins the step: of a pair, its forward.
    """

    rank: Ints
    stage: Ints
    first: Ints
    last: Ints


def count_actions(compact: "ActionArrays") -> tuple[tuple[Count, ...], ...]:
    """Return what each rank does, in the order in which it first does it."""
    import numpy as np

    num_stages, num_kinds = compact.num_stages, len(WORK_KINDS)
    key = (compact.rank.astype(np.int64) * num_stages + compact.stage) * num_kinds + compact.kind
    found, first, count = np.unique(key, return_index=True, return_counts=True)
    order = np.argsort(first)
    rows: list[list[Count]] = [[] for _ in range(compact.num_ranks)]
    for one, times in zip(found[order].tolist(), count[order].tolist(), strict=True):
        rest, kind = divmod(one, num_kinds)
        rank, stage = divmod(rest, num_stages)
        rows[rank].append(Count(stage, WORK_KINDS[kind], times))
    return tuple(map(tuple, rows))


def find_passes(compact: "ActionArrays") -> Passes:
    """Return the first and the last steps of a complete program."""
    import numpy as np

    key = compact.rank.astype(np.int64) * compact.num_stages + compact.stage
    forward, backward = np.flatnonzero(compact.kind == IS_F)[::-1], np.flatnonzero(compact.kind != IS_F)
    place = np.full((2, compact.num_ranks * compact.num_stages), -1, np.int32)
    place[0, key[forward]], place[1, key[backward]] = forward, backward  # of equal keys the one that is written last
    there = np.flatnonzero(place[0] >= 0)
    there = there[np.argsort(place[0, there])]
    first, last = place[:, there]
    return Passes(*np.divmod(there, compact.num_stages), first, last - compact.second[last])
