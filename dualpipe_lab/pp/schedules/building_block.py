"""The building block: the ticks at which one microbatch passes each stage of a V, repeated every six ticks.

Chapter: book/pp/v-shapes.  In: the ticks at which each stage starts F and I.  Out: one list of actions per rank.
A rank of a V works six ticks per microbatch: F, I and W on either stage.  If the ticks at which a rank starts its four
F and I differ modulo six, microbatch after microbatch fits without a collision, and W takes the two ticks left over.
  lifespan           the ticks from a stage's F to its W; a stage holds lifespan / 6 microbatches, rounded up
  squeezed           work starts in the order of the block's ticks, but as soon as it can, not at these ticks
Elsewhere: `stable_pattern` in sail-sg's zero-bubble-pipeline-parallelism.
Source: Qi et al. 2024 (arXiv 2405.15362), sections 2 and 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dualpipe_lab.pp.program import Action, F, I
from dualpipe_lab.pp.schedules.list_scheduling import Pick, ScheduleState, tick_by_tick

INTERVAL = 6  # F, I and W on two stages, one tick each


@dataclass(frozen=True)
class BuildingBlock:
    """The tick at which the first microbatch starts F, and I, on each stage.

    >>> block = BuildingBlock(forwards=[0, 1], inputs=[3, 2])
    >>> print([" ".join(map(str, row)) for row in block.squeeze(2, limits=[1, 1])])
    ['0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1']
    """

    forwards: Sequence[int]
    inputs: Sequence[int]

    @property
    def num_ranks(self) -> int:
        """The number of ranks: two stages each."""
        return len(self.forwards) // 2

    def squeeze(self, num_microbatches: int, limits: Sequence[int]) -> list[list[Action]]:
        """Return the order of the work if a stage holds at most its limit of microbatches, from F to W."""
        return tick_by_tick(self.num_ranks, num_microbatches, lambda now, rank: self._pick(now, rank, limits))

    def repeat(self, num_microbatches: int) -> list[list[Action]]:
        """Return the order of the work if a microbatch enters every six ticks."""
        free = [num_microbatches] * len(self.forwards)
        return tick_by_tick(self.num_ranks, num_microbatches, lambda now, rank: self._pick(now, rank, free), INTERVAL)

    def _pick(self, now: ScheduleState, rank: int, limits: Sequence[int]) -> Pick | None:
        """Return the earliest F or I of the block that can start; W if there is none."""
        wishes: list[tuple[int, Pick]] = []
        for stage in now.stages(rank):
            if now.can(F, stage) and now.held(stage) < limits[stage]:
                wishes.append((self.forwards[stage] + INTERVAL * now.started[F][stage], (F, stage)))
            if now.can(I, stage):
                wishes.append((self.inputs[stage] + INTERVAL * now.started[I][stage], (I, stage)))
        return min(wishes)[1] if wishes else now.weight_gradient(rank)
