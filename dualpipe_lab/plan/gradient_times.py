"""`GradientTimes`: the seconds of sums of gradients, of gathers of weights and of the optimizer, on a rank of pp.

In: the times of stages, when passes start and end.  Out: seconds.
  ZeRO-0    an all-reduce of the gradients            ZeRO-1    a reduce-scatter, and a gather of the weights
  ZeRO-2    a reduce-scatter in every backward, and a gather of the weights behind the step
  ZeRO-3    a reduce-scatter in every backward, and a gather before every pass
  hidden    on a stream of their own, the sums of a stage run from the first layer of its last backward on, and gathers
            until the last layer of its first forward; each sum and gather inside of the list of actions hides behind
            the pass that it belongs to
  mirrors   the two copies of a stage exchange their gradients
Elsewhere: Megatron's `DistributedOptimizer` and `DistributedDataParallel`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from dualpipe_lab.plan.call_times import Group
from dualpipe_lab.plan.gradient_traffic import Part
from dualpipe_lab.plan.kept_experts import held_model
from dualpipe_lab.plan.stage_times import Seconds, StageTimes
from dualpipe_lab.plan.states import NumberBytes, parts_of_place

_UPDATE_BYTES = 30  # per element: 16 read, 12 and the weight written


class Pass(NamedTuple):
    """When a pass of a stage starts and ends, in seconds.

    >>> Pass(2.0, 6.0).first_unit(4), Pass(2.0, 6.0).last_unit(4)
    (3.0, 5.0)
    """

    start: float
    end: float

    def first_unit(self, num_units: int) -> float:
        """Return when the first of so many equal parts ends."""
        return self.start + (self.end - self.start) / num_units

    def last_unit(self, num_units: int) -> float:
        """Return when the last of them starts."""
        return self.end - (self.end - self.start) / num_units


class GradientTimes:
    """Sums, gathers and the optimizer of a plan.

    Args:
        times: of its stages.

    Raises:
        ValueError: experts that the ranks of tp share out, and that do not divide among them.
    """

    def __init__(self, times: StageTimes) -> None:
        self.times, self.plan = times, times.plan
        self.numbers = NumberBytes.of(times.plan.precision)
        self.held = held_model(times.model, times.plan, "spread" if times.rules.splits_routing else "copied")
        self._placed = replace(times.plan, layers=tuple(map(len, times.layers)))  # narrower experts would move layers
        self._known: dict[int, list[Part]] = {}

    @cached_property
    def copies(self) -> tuple[Group, Group]:
        """The ranks with copies of dense parameters, and of experts."""
        plan, along = self.plan, self.times.along
        dense = along("copies", plan.copy_axes or ("none",))
        if plan.expert_copy_axes == ("edp",):
            return dense, along("edp")
        return dense, along("copies", plan.expert_copy_axes or ("none",))

    def exposed(self, pp_rank: int, passes: Mapping[int, tuple[Pass, Pass]], end: float) -> float:
        """Return the seconds by which sums and gathers make a rank's step longer.

        Args:
            pp_rank: of the rank.
            passes: by stage, its first forward and its last backward.
            end: of the rank's last action.
        """
        parts = self._parts(pp_rank)
        by_stage = {stage: [part for part in parts if part.stage == stage] for stage in passes}
        sums, gathers = dict.fromkeys(passes, 0.0), dict.fromkeys(passes, 0.0)
        if self.plan.zero < 2:
            sums = {stage: self.sum(by_stage[stage]) for stage in passes}
        if self.plan.zero in (1, 2):
            gathers = {stage: self.gather(by_stage[stage]) for stage in passes}
        mirrors = self._mirrors(pp_rank, parts)
        if not self.times.rules.hides_gradients:
            return mirrors + sum(sums.values()) + sum(gathers.values())
        return mirrors + self._late_gathers(gathers, passes) + self._late_sums(sums, passes, end)

    def _late_gathers(self, gathers: Mapping[int, float], passes: Mapping[int, tuple[Pass, Pass]]) -> float:
        now = late = 0.0
        for stage in sorted(gathers, key=lambda one: passes[one][0].start):
            now += gathers[stage]
            late = max(late, now - passes[stage][0].last_unit(self._num_units(stage)))
        return late

    def _late_sums(self, sums: Mapping[int, float], passes: Mapping[int, tuple[Pass, Pass]], end: float) -> float:
        now = 0.0
        for stage in sorted(sums, key=lambda one: passes[one][1].end):
            last, units = passes[stage][1], self._num_units(stage)
            now = max(now, last.first_unit(units)) + sums[stage]
            now = max(now, last.end + sums[stage] / units)  # of the last layer, whose gradients come at the end
        return max(0.0, now - end)

    def sum(self, parts: list[Part]) -> float:
        """Return the seconds in which the gradients of some parameters are summed, once."""
        return sum((self._sum(group, numel) for group, numel in self._numels(parts) if numel), 0.0)

    def gather(self, parts: list[Part]) -> float:
        """Return the seconds in which the weights of some parameters are gathered, once."""
        found = 0.0
        for group, numel in self._numels(parts):
            found += self.times.links.collective(self._shards(group), numel * self.numbers.parameter)
        return found

    def add_zero(self, stage: int, seconds: dict[str, Seconds]) -> None:
        """Add to F and I of a stage what its computation does not hide of the calls of ZeRO-2 and 3."""
        parts = [part for part in self._parts(self.plan.holders(stage)[0]) if part.stage == stage]
        gather = self.gather(parts) if self.plan.zero == 3 else 0.0
        backward = sum(seconds["I"].values()) + sum(seconds["W"].values())
        seconds["F"]["zero"] = max(0.0, gather - sum(seconds["F"].values()))
        seconds["I"]["zero"] = max(0.0, gather + self.sum(parts) - backward)

    def update(self, pp_rank: int) -> float:
        """Return the seconds of the optimizer."""
        numels = self._numels(self._parts(pp_rank))
        total = sum(numel // (self._shards(group).size if self.plan.zero else 1) for group, numel in numels)
        return self.times.machine.unit.memory_seconds(total * _UPDATE_BYTES)

    def _sum(self, group: Group, numel: int) -> float:
        """Sum over the copies: within nodes and then across them, where the plan is hybrid."""
        num_bytes, links, shards = numel * self.numbers.gradient, self.times.links, self._shards(group)
        found = links.collective(shards, num_bytes, 2 if self.plan.zero == 0 else 1)
        if shards.size < group.size:
            others = Group("nodes", group.size // shards.size, 1)
            found += links.collective(others, num_bytes / shards.size, 2)
        return found

    def _shards(self, group: Group) -> Group:
        """Return the ranks over which ZeRO shards what a group has copies of."""
        if not self.plan.hybrid or not group.crosses:
            return group
        return Group(group.axis, group.per_node, group.per_node)

    def _numels(self, parts: list[Part]) -> list[tuple[Group, int]]:
        """Return, for dense parameters and for experts, the ranks with copies and the elements."""
        is_expert = [("ep" in part.kind, part.numel) for part in parts]
        return [
            (group, sum(numel for expert, numel in is_expert if expert == kind))
            for kind, group in zip((False, True), self.copies, strict=True)
        ]

    def _mirrors(self, pp_rank: int, parts: list[Part]) -> float:
        copied = [part for part in parts if any(holder != pp_rank for holder in self.plan.holders(part.stage))]
        num_bytes = sum(part.numel for part in copied) * self.numbers.gradient
        if not num_bytes:
            return 0.0
        shards = self.plan.num_copies if self.plan.zero > 1 else 1
        return sum(self.times.links.message(self.times.along("pp"), num_bytes / shards))

    def _num_units(self, stage: int) -> int:
        """The layers of a stage, with its ends: their weights are gathered, and their gradients summed, apart."""
        return len(self.times.layers[stage]) + (stage == 0) + (stage == self.plan.num_stages - 1)

    def _parts(self, pp_rank: int) -> list[Part]:
        if pp_rank not in self._known:
            self._known[pp_rank] = parts_of_place(self.held, self._placed, pp_rank, 0)
        return self._known[pp_rank]
