"""`kept_counts`: the moments of a rank's list of actions at which its memory can be largest.

In: a plan, a rank of pp.  Out: actions, and what is kept then.
At an action a rank keeps the activations of every F that has not met its B, or its W where the backward is split, and
takes what the action itself works with, which depends on its stage and on whether it is a forward, a backward or a W.
So of all actions of one stage and kind only those matter at which no other keeps at least as much of every stage, and
something of the same stages: a framework may hold other tensors for a stage that keeps nothing.
They are few, and the same for all models and sizes of a microbatch: a search looks for them once per program.
"""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.pp.program import Action, B, F, W


class KeptAt(NamedTuple):
    """An action, and by stage the microbatches that are kept while it runs."""

    action: Action
    kept: tuple[tuple[int, int], ...]


def kept_counts(plan: PlanFields, pp_rank: int) -> tuple[KeptAt, ...]:
    """Return the moments of a rank that can be its peak, in their order.

    Without pp one microbatch follows the other, and all peaks are those of the first.

    >>> found = kept_counts(PlanFields(pp=4, num_microbatches=8), 1)
    >>> [(str(moment.action), moment.kept) for moment in found]
    [('1F2', ((1, 3),)), ('1B0', ((1, 3),))]
    """
    if plan.pp == 1:
        return KeptAt(Action(0, F, 0), ((0, 1),)), KeptAt(Action(0, B, 0), ((0, 1),))
    return _of_program(plan.schedule, plan.pp, plan.num_microbatches, plan.chunks, pp_rank)


@lru_cache(maxsize=4096)
def _of_program(schedule: str, pp: int, num_microbatches: int, chunks: int | None, pp_rank: int) -> tuple[KeptAt, ...]:
    plan = PlanFields(pp=pp, num_microbatches=num_microbatches, schedule=schedule, chunks=chunks)
    assert plan.program is not None
    kept: Counter[int] = Counter()
    found: dict[tuple[int, str], dict[tuple[tuple[int, int], ...], KeptAt]] = {}
    for action in plan.program.actions(pp_rank):
        if action.kind == F:
            kept[action.stage] += 1
        now = tuple(sorted((+kept).items()))
        moments = found.setdefault((action.stage, action.kind), {})
        moments.setdefault(now, KeptAt(action, now))
        if action.kind in (B, W):
            kept[action.stage] -= 1
    largest = [moment for moments in found.values() for moment in _largest(list(moments.values()))]
    order = {action: place for place, action in enumerate(plan.program.actions(pp_rank))}
    return tuple(sorted(largest, key=lambda moment: order[moment.action]))


def _largest(moments: list[KeptAt]) -> list[KeptAt]:
    """Return those of which no other keeps at least as much of every stage."""
    counts = [dict(moment.kept) for moment in moments]
    return [
        moment
        for moment, mine in zip(moments, counts, strict=True)
        if not any(
            other is not mine
            and other.keys() == mine.keys()
            and all(other[stage] >= count for stage, count in mine.items())
            for other in counts
        )
    ]
