"""`least_seconds`: what no order of a pipeline's actions can be faster than, from its stages alone.

In: the times of stages, a plan.  Out: seconds.
A rank's first action waits for the forwards of all stages before the nearest of its own.  Behind its last backward the
gradients pass all those stages again; a W may run meanwhile, and where the backward is not split nothing does.
  fused    start + work + tail of the rank whose sum is largest
  split    start + work, or start + work without W + tail: the larger one
  pairs    where they hide exchanges of experts: a rank's exchanges, or all of the above without them
Which stages a rank holds, and of how many microbatches, is read from a small program of the same schedule.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.stage_times import Seconds
from dualpipe_lab.pp.program import F, W


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
        compact = plan.compact
    except ValueError:
        return None
    if compact is None:
        return Shape((((0, 1.0),),), is_split=False)
    forwards = (sorted((stage, count) for stage, kind, count in row if kind == F) for row in compact.counts)
    shares = tuple(tuple((stage, count / (2 * pp)) for stage, count in row) for row in forwards)
    return Shape(shares, any(kind == W for row in compact.counts for _, kind, _ in row), compact.has_pairs)


def has_pairs(schedule: str, pp: int) -> bool:
    """Return whether a schedule has overlapped pairs."""
    shape = shape_of(schedule, pp)
    return shape is not None and shape.has_pairs


def least_seconds(plan: PlanFields, stages: Sequence[Mapping[str, Seconds]]) -> float:
    """Return seconds that a pipeline takes at least; 0 where its schedule is not known before it is built.

    Args:
        plan: whose pipeline it is.
        stages: by stage, the seconds of F, I and W by what they are spent on.
    """
    shape = shape_of(plan.schedule, plan.pp, plan.chunks)
    if shape is None:
        return 0.0
    table = [{kind: sum(spent.values()) for kind, spent in stage.items()} for stage in stages]
    if not plan.overlap:
        return max(_of_rank(share, table, plan.num_microbatches, shape.is_split) for share in shape.shares)
    exchanges = [{kind: spent.get("ep", 0.0) for kind, spent in stage.items()} for stage in stages]
    others = [{kind: one[kind] - hidden[kind] for kind in one} for one, hidden in zip(table, exchanges, strict=True)]
    least = max(_of_rank(share, others, plan.num_microbatches, shape.is_split) for share in shape.shares)
    return max(least, max(_work(share, exchanges, plan.num_microbatches) for share in shape.shares))


def _work(share: tuple[tuple[int, float], ...], table: list[dict[str, float]], num_microbatches: int) -> float:
    """Return the seconds of all actions of a rank."""
    return num_microbatches * sum(part * sum(table[stage].values()) for stage, part in share)


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
