"""`kept_counts`: the moments of a rank's list of actions at which its memory can be largest.

In: a plan, a rank of pp.  Out: actions, and what is kept then.
At an action a rank keeps the activations of every F that has not met its B, or its W where the backward is split, and
takes what the action itself works with, which depends on its stage and on whether it is a forward, a backward or a W.
So of all actions of one stage and kind only those matter at which no other keeps at least as much of every stage, and
something of the same stages: a framework may hold other tensors for a stage that keeps nothing.
They are few, and the same for all models and sizes of a microbatch: a search looks for them once per program.
"""

from functools import lru_cache
from typing import NamedTuple, TypeAlias

from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.pp.compact.arrays import IS_B, IS_F, IS_W
from dualpipe_lab.pp.program import Action, B, F

Kept: TypeAlias = tuple[tuple[int, int], ...]  # by stage, microbatches


class KeptAt(NamedTuple):
    """An action, and by stage the microbatches that are kept while it runs."""

    action: Action
    kept: Kept


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
    compact = PlanFields(pp=pp, num_microbatches=num_microbatches, schedule=schedule, chunks=chunks).compact
    assert compact is not None
    start, end = compact.offsets[pp_rank : pp_rank + 2].tolist()
    steps = compact.stage[start:end].tolist(), compact.kind[start:end].tolist()
    stages, base = sorted(set(steps[0])), num_microbatches + 1
    weight = {stage: base**place for place, stage in enumerate(stages)}
    kept = 0  # the counts of all stages as the digits of one number
    firsts: dict[tuple[int, int, int], int] = {}
    for index, (stage, kind) in enumerate(zip(*steps, strict=True), start):
        if kind == IS_F:
            kept += weight[stage]
        firsts.setdefault((stage, kind, kept), index)
        if kind in (IS_B, IS_W):
            kept -= weight[stage]
    moments: dict[tuple[int, ...], list[tuple[Kept, int]]] = {}
    for (stage, kind, counts), index in firsts.items():
        digits = ((one, counts // weight[one] % base) for one in stages)
        now = tuple((one, count) for one, count in digits if count)
        moments.setdefault((stage, kind, *(one for one, _ in now)), []).append((now, index))
    largest = sorted((index, now) for group in moments.values() for now, index in _largest(group))
    return tuple(KeptAt(compact.action(index), now) for index, now in largest)


def _largest(moments: list[tuple[Kept, int]]) -> list[tuple[Kept, int]]:
    """Return those of which no other keeps at least as much of every stage; all keep something of the same stages.

    One that keeps as much of every stage, and is another, keeps more in all, so it comes first.
    """
    found: list[tuple[Kept, int]] = []
    for now, index in sorted(moments, key=lambda moment: -sum(count for _, count in moment[0])):
        if not any(all(other[1] >= mine[1] for other, mine in zip(kept, now, strict=True)) for kept, _ in found):
            found.append((now, index))
    return found
