"""`least_seconds`: what no order of a pipeline's actions can be faster than, from its stages alone.

In: the times of stages, a plan.  Out: seconds.
A rank's first action waits for the forwards of all stages before the nearest of its own.  Behind its last backward the
gradients pass all those stages again; a W may run meanwhile, and where the backward is not split nothing does.
  fused    start + work + tail of the rank whose sum is largest
  split    start + work, or start + work without W + tail: the larger one
Which stages a rank holds, and of how many microbatches, is read from a small program of the same schedule.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.stage_times import StageTimes
from dualpipe_lab.pp.program import F, Overlap, W


class Shape(NamedTuple):
    """What a schedule gives to the ranks of pp.

    Attributes:
        shares: by rank, its stages and the part of the microbatches that it has of each.
        is_split: whether a W may run apart from its I.
        has_pairs: whether it has overlapped pairs.
    """

    shares: tuple[tuple[tuple[int, float], ...], ...]
    is_split: bool
    has_pairs: bool = False


@lru_cache(maxsize=1024)
def shape_of(schedule: str, pp: int, chunks: int | None = None) -> Shape | None:
    """Return what a schedule gives to the ranks; None where it has no program of 2 pp microbatches.

    >>> shape_of("dualpipe", 4).shares[0]
    ((0, 0.5), (3, 0.5))
    """
    plan = PlanFields(pp=pp, schedule=schedule, num_microbatches=2 * pp, chunks=chunks)
    try:
        program = plan.program
    except ValueError:
        return None
    if program is None:
        return Shape((((0, 1.0),),), is_split=False)
    shares = []
    for rank in range(pp):
        counts = Counter(action.stage for action in program.actions(rank) if action.kind == F)
        shares.append(tuple((stage, count / (2 * pp)) for stage, count in sorted(counts.items())))
    is_split = any(action.kind == W for rank in range(pp) for action in program.actions(rank))
    return Shape(tuple(shares), is_split, any(isinstance(step, Overlap) for steps in program.ranks for step in steps))


def has_pairs(schedule: str, pp: int) -> bool:
    """Return whether a schedule has overlapped pairs."""
    shape = shape_of(schedule, pp)
    return shape is not None and shape.has_pairs


def least_seconds(times: StageTimes) -> float:
    """Return seconds that a pipeline takes at least; 0 where its schedule is not known before it is built."""
    plan = times.plan
    shape = shape_of(plan.schedule, plan.pp, plan.chunks)
    if shape is None:
        return 0.0
    num_stages = 1 + max(stage for share in shape.shares for stage, _ in share)
    table = [_of(times, stage) for stage in range(num_stages)]
    return max(_of_rank(share, table, plan.num_microbatches, shape.is_split) for share in shape.shares)


def _of(times: StageTimes, stage: int) -> dict[str, float]:
    """Return the seconds of a stage's actions; overlapped pairs may hide the exchanges of experts."""
    hides = times.plan.overlap
    return {
        kind: sum(seconds for name, seconds in spent.items() if not (hides and name == "ep"))
        for kind, spent in times.of(stage).items()
    }


def _of_rank(
    share: tuple[tuple[int, float], ...], table: list[dict[str, float]], num_microbatches: int, is_split: bool
) -> float:
    nearest = min(stage for stage, _ in share)
    start = sum(one["F"] for one in table[:nearest])
    tail = sum(one["I"] + (0.0 if is_split else one["W"]) for one in table[:nearest])
    work = {
        kind: num_microbatches * sum(part * table[stage][kind] for stage, part in share) for kind in ("F", "I", "W")
    }
    through = start + work["F"] + work["I"] + tail
    return max(start + sum(work.values()), through) if is_split else through + work["W"]
