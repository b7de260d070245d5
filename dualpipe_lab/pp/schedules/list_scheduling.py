"""List scheduling on a V of stages: at every tick, a rule picks the next action of each rank.

Chapter: book/pp/v-shapes.  In: numbers of ranks and of microbatches, a rule.  Out: one list of actions per rank.
F, I and W take one tick each and messages none.  Only the order of the actions is kept: in a run with other costs, a
rank starts each action as soon as it can.
Rank r has the stages r and 2P-1-r.  Time O(actions), plus one call of the rule per rank and tick.
Elsewhere: list scheduling; the "squeezing" of Qi et al. 2024.
Source: Qi et al. 2024 (arXiv 2405.15362), section 3, for the schedules that use it.
"""

from collections.abc import Callable
from typing import TypeAlias

from dualpipe_lab.pp.program import Action, F, I, W

Pick: TypeAlias = tuple[str, int]  # (kind, stage); the microbatch is the stage's next one


class ScheduleState:
    """Per kind and stage, the number of microbatches that have started and of those whose input is available.

    >>> state = ScheduleState(num_ranks=1, num_microbatches=2)
    >>> str(state.start("F", 0)), state.can("F", 1), state.held(0)
    ('0F0', True, 1)
    """

    def __init__(self, num_ranks: int, num_microbatches: int) -> None:
        self.num_stages = 2 * num_ranks
        self.started = {kind: [0] * self.num_stages for kind in (F, I, W)}
        self.could = {kind: [0] * self.num_stages for kind in (F, I, W)}
        self.could[F][0] = num_microbatches

    def can(self, kind: str, stage: int) -> bool:
        """Whether the stage has an input for its next action of this kind."""
        return self.started[kind][stage] < self.could[kind][stage]

    def held(self, stage: int) -> int:
        """Return the number of microbatches that the stage holds, from F to W."""
        return self.started[F][stage] - self.started[W][stage]

    def stages(self, rank: int) -> tuple[int, int]:
        """Return the two stages of a rank, the later stage first."""
        return self.num_stages - 1 - rank, rank

    def weight_gradient(self, rank: int) -> Pick | None:
        """Return a W that the rank can run, of its later stage first; None if there is none."""
        return next(((W, stage) for stage in self.stages(rank) if self.can(W, stage)), None)

    def start(self, kind: str, stage: int) -> Action:
        """Start the stage's next action of this kind, and make its result available to the next stage."""
        microbatch = self.started[kind][stage]
        self.started[kind][stage] += 1
        if kind == F:
            last = stage == self.num_stages - 1
            self.could[I if last else F][stage if last else stage + 1] += 1
        elif kind == I:
            self.could[W][stage] += 1
            if stage:
                self.could[I][stage - 1] += 1
        return Action(stage, kind, microbatch)


def tick_by_tick(
    num_ranks: int, num_microbatches: int, rule: Callable[[ScheduleState, int], Pick | None], interval: int = 0
) -> list[list[Action]]:
    """Return one row of actions per rank: at every tick, `rule` picks an action for each rank, or None to wait.

    `interval`: ticks between the entries of two microbatches into stage 0; 0 if all may enter at once.  The rule must
    not let all ranks wait forever.
    """
    state = ScheduleState(num_ranks, num_microbatches)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    left, tick = 6 * num_ranks * num_microbatches, 0
    while left:
        if interval:
            state.could[F][0] = min(num_microbatches, 1 + tick // interval)
        picks = [rule(state, rank) for rank in range(num_ranks)]  # all rules see the same state
        for row, pick in zip(rows, picks, strict=True):
            if pick:
                row.append(state.start(*pick))
                left -= 1
        tick += 1
    return rows
