"""`step_time`: the seconds of a training step, by simulation of every rank's own list of actions.

In: a model, a plan, a cluster, the shape of a step, rules.  Out: a `StepTime`.
  pipeline    the program, simulated in whole nanoseconds with the seconds of `StageTimes`
  gradients   sums over the ranks with copies, and gathers of weights: `dualpipe_lab.plan.gradient_times`
  update      30 bytes for each element of a rank's shard: masters, moments, gradients read, all but gradients written
  step        the last rank's end of all that, and the sum of the norm
Seconds are assumed, however exact the simulation is: they are as good as efficiencies and overlaps.  One measured step
calibrates them: `StepTime.calibrated`.
Elsewhere: SimuMax `PerfLLM.analysis_cost`; calculon `Llm.run`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from dualpipe_lab.plan.call_times import Group
from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.estimate import checked
from dualpipe_lab.plan.gradient_times import GradientTimes, Pass
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.products import model_flops
from dualpipe_lab.plan.stage_times import Seconds, StageKind, StageTimes
from dualpipe_lab.plan.states import AnyModel, config_of
from dualpipe_lab.plan.time_rules import LAB_TIME, TimeRules
from dualpipe_lab.plan.traffic import check_traffic
from dualpipe_lab.pp.compact.simulator import CompactResult, compact_simulate
from dualpipe_lab.pp.compact.stages import Count
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Overlap
from dualpipe_lab.timeline import Time

_NANO = 10**9
Trust = Literal["assumed", "fitted"]


@dataclass(frozen=True)
class StepTime:
    """The seconds of one step.

    Attributes:
        plan: what is run.
        pipeline: seconds until the last action ends.
        busy: by rank of pp, the seconds of its actions.
        gradients: by rank of pp, the seconds of its sums and gathers behind its last action.
        update: by rank of pp, the seconds of the optimizer.
        norm: of the sum of the norm.
        seconds: of the step.
        spent: by rank of pp, the seconds of its actions by what they are spent on.
        tokens: of the step.
        flops: of the model in the step, with the pairs that a causal mask shows; without what is computed again.
        full_flops: the same with all pairs.
        peak: FLOP/s of all ranks together.
        trust: assumed, or fitted to one measured step.
        least, most: the interval of a fitted one, in seconds; the same as `seconds` for an assumed one.
    """

    plan: Plan
    pipeline: float
    busy: tuple[float, ...]
    gradients: tuple[float, ...]
    update: tuple[float, ...]
    norm: float
    seconds: float
    spent: tuple[Mapping[str, float], ...]
    tokens: int
    flops: int
    full_flops: int
    peak: float
    trust: Trust = "assumed"
    least: float = 0.0
    most: float = 0.0

    @property
    def bubble(self) -> float:
        """The part of the pipeline in which its busiest rank waits."""
        return 1 - max(self.busy) / self.pipeline

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs, with causal pairs, of those that the peak allows."""
        return self.flops / self.seconds / self.peak

    @property
    def full_mfu(self) -> float:
        """Model FLOPs with all pairs, as papers and frameworks that do not halve print it."""
        return self.full_flops / self.seconds / self.peak

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of the step by what the busiest rank of pp spends them on; of ep, what pairs do not hide."""
        rank = max(range(len(self.busy)), key=self.busy.__getitem__)
        spent = dict(self.spent[rank])
        if self.plan.overlap:
            spent["ep"] = spent.get("ep", 0.0) - (sum(spent.values()) - self.busy[rank])
        behind = {"gradients": self.gradients[rank] + self.norm, "the optimizer": self.update[rank]}
        return {**spent, "waiting in the pipeline": self.pipeline - self.busy[rank], **behind}

    def hours(self, num_tokens: float) -> float:
        """Return the hours for so many tokens.

        Raises:
            ValueError: no tokens.
        """
        if not num_tokens > 0:
            raise ValueError(f"a run has a number of tokens above 0, got {num_tokens!r}; such as 15e12")
        return num_tokens / self.tokens_per_second / 3600

    def cost(self, num_tokens: float, price_per_hour: float) -> float:
        """Return the price of so many tokens, where one rank's hour has this price."""
        if not price_per_hour >= 0:
            raise ValueError(f"the price of an hour is a number from 0, got {price_per_hour!r}; such as 2.0")
        return self.hours(num_tokens) * price_per_hour * self.plan.world_size

    def calibrated(self, factor: float, spread: float = 0.08) -> "StepTime":
        """Return the same step with all seconds times a factor: measured over estimated, of one other step.

        Args:
            factor: above 0.
            spread: half of the interval, relative; 8% is what estimates of one machine may miss.
        """
        if not factor > 0 or not 0 <= spread < 1:
            raise ValueError(f"a factor is above 0 and a spread from 0 to 1, got {factor!r} and {spread!r}")
        seconds = self.seconds * factor
        return replace(
            self,
            pipeline=self.pipeline * factor,
            busy=tuple(part * factor for part in self.busy),
            gradients=tuple(part * factor for part in self.gradients),
            update=tuple(part * factor for part in self.update),
            norm=self.norm * factor,
            seconds=seconds,
            spent=tuple({name: part * factor for name, part in parts.items()} for parts in self.spent),
            trust="fitted",
            least=seconds * (1 - spread),
            most=seconds * (1 + spread),
        )

    def __str__(self) -> str:
        parts = f"pipeline {self.pipeline:.3f}, bubble {self.bubble:.1%}, MFU {self.mfu:.1%}"
        interval = f", {self.least:.3f} to {self.most:.3f}" if self.trust == "fitted" else ""
        return f"{self.seconds:.3f} s ({self.trust}{interval}); {parts}; {self.tokens_per_second:.0f} tokens/s"


def step_time(
    model: AnyModel,
    plan: Plan,
    cluster: Cluster,
    sequence_length: int,
    global_batch: int,
    rules: TimeRules = LAB_TIME,
) -> StepTime:
    """Return the seconds of a step.

    Args:
        model: a Llama, a GPT, or a model with experts, whose routing is balanced.
        plan: for as many ranks as the cluster has.
        cluster: accelerators and links.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step.
        rules: what the framework hides (default: this library, which hides nothing).

    Raises:
        ValueError: as `Plan.check`, sequences that do not divide, or no peak for the plan's precision.

    >>> from dualpipe_lab.models import LlamaConfig
    >>> llama3_8b = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
    >>> plan = Plan(pp=2, dp=2, tp=2, num_microbatches=8, precision="bfloat16", zero=1)
    >>> found = step_time(llama3_8b, plan, Cluster.of("h100", 8), sequence_length=8192, global_batch=16)
    >>> 0.3 < found.mfu < 0.9, found.tokens
    (True, 131072)
    """
    plan = checked(plan, config_of(model), cluster, sequence_length)
    return StepTimer(model, plan, cluster, sequence_length, global_batch, rules).result


class StepTimer:
    """What `step_time` computes, part by part; it takes the plan as legal.

    Args:
        model, plan, cluster, sequence_length, global_batch, rules: as for `step_time`.
    """

    def __init__(
        self,
        model: AnyModel,
        plan: Plan,
        cluster: Cluster,
        sequence_length: int,
        global_batch: int,
        rules: TimeRules = LAB_TIME,
    ) -> None:
        self.plan, self.cluster, self.rules = plan, cluster, rules
        self.num_rows = check_traffic(plan, global_batch)
        self.global_batch, self.sequence_length = global_batch, sequence_length
        self.times = StageTimes(model, plan, cluster, rules, self.num_rows, sequence_length)
        self.model = model
        self.sums = GradientTimes(self.times)

    @cached_property
    def stages(self) -> list[dict[str, Seconds]]:
        """The seconds of F, I and W of every stage, with what ZeRO-2 and 3 do not hide; equal stages share them."""
        known: dict[StageKind, dict[str, Seconds]] = {}
        for stage in range(self.plan.num_stages):
            kind = self.times.kind(stage)
            if kind not in known:
                known[kind] = self.times.of(stage)
                if self.plan.zero > 1:
                    self.sums.add_zero(stage, known[kind])
        return [known[self.times.kind(stage)] for stage in range(self.plan.num_stages)]

    @cached_property
    def cost(self) -> Cost:
        """The costs of the program, in whole nanoseconds."""
        table = {kind: [_nano(sum(one[kind].values())) for one in self.stages] for kind in "FIW"}
        latency, transfer = 0, 0
        if self.plan.pp > 1:
            seconds, wait = self.times.links.message(self.times.along("pp"), self.times.boundary_bytes)
            latency, transfer = _nano(wait), _nano(seconds)
        pair = self._pair if self.plan.overlap else None
        return Cost(table["F"], table["I"], table["W"], overlap=pair, latency=latency, transfer=transfer)

    @cached_property
    def simulated(self) -> CompactResult | None:
        """The simulated pipeline, in nanoseconds; None without pp."""
        compact = self.plan.compact
        return None if compact is None else compact_simulate(compact, self.cost, by_stages=True)

    @cached_property
    def result(self) -> StepTime:
        """The step."""
        ends, busy = self._pipeline
        gradients = tuple(self.sums.exposed(rank, self._passes(rank), ends[rank]) for rank in range(self.plan.pp))
        update = tuple(self.sums.update(rank) for rank in range(self.plan.pp))
        norm = self._norm()
        last = max(end + sums for end, sums in zip(ends, gradients, strict=True))
        flops = [model_flops(self.model, self.sequence_length, causal, self._has_second) for causal in (True, False)]
        seconds = last + norm + max(update)
        return StepTime(
            self.plan, max(ends), tuple(busy), gradients, update, norm, seconds,
            tuple(self._spent(pp_rank) for pp_rank in range(self.plan.pp)),
            self.global_batch * self.sequence_length,
            self.global_batch * flops[0], self.global_batch * flops[1],
            self.times.machine.peak * self.plan.world_size, "assumed", seconds, seconds,
        )  # fmt: skip

    @property
    def _has_second(self) -> bool:
        return self.plan.multi_token is not None

    @cached_property
    def _pipeline(self) -> tuple[list[float], list[float]]:
        """Return when every rank of pp ends, and how long it is busy."""
        if self.simulated is None:
            table = self.cost.per_stage(1)
            total = self.plan.num_microbatches * (int(table["F"][0]) + int(table["B"][0])) / _NANO
            return [total], [total]
        return _seconds(self.simulated.ends), _seconds(self.simulated.busy)

    def _spent(self, pp_rank: int) -> dict[str, float]:
        """Return the seconds of a rank's actions by what they are spent on; of pairs, what they would be apart."""
        found: Seconds = {}
        for stage, kind, count in self._counts(pp_rank):
            for name, seconds in self._of(stage, kind):
                found[name] = found.get(name, 0.0) + seconds * count
        return found

    def _of(self, stage: int, kind: str) -> Iterator[tuple[str, float]]:
        """Yield what the seconds of an action are spent on."""
        for one in ("I", "W") if kind == "B" else (kind,):
            yield from self.stages[stage][one].items()

    def _counts(self, pp_rank: int) -> Sequence[Count]:
        compact = self.plan.compact
        if compact is None:
            return [Count(0, kind, self.plan.num_microbatches) for kind in "FB"]
        return compact.counts[pp_rank]

    def _pair(self, pair: Overlap) -> int:
        """Return the nanoseconds of a forward and a backward at once: exchanges of experts run behind the rest."""
        exchanges = others = 0.0
        for action in pair:
            for name, seconds in self._of(action.stage, action.kind):
                exchanges, others = exchanges + seconds * (name == "ep"), others + seconds * (name != "ep")
        return _nano(max(exchanges, others) * (self.rules.pair_factor if exchanges else 1.0))

    def _passes(self, pp_rank: int) -> dict[int, tuple[Pass, Pass]]:
        """Return the first forward and the last backward of every stage of a rank."""
        if self.simulated is None:
            end, seconds = self._pipeline[0][0], self.stages[0]
            forward = sum(seconds["F"].values())
            backward = sum(seconds["I"].values()) + sum(seconds["W"].values())
            return {0: (Pass(0.0, forward), Pass(end - backward, end))}
        return {
            stage: (Pass(*_seconds(first)), Pass(*_seconds(last)))
            for stage, (first, last) in self.simulated.passes[pp_rank].items()
        }

    def _norm(self) -> float:
        world = Group("world", self.plan.world_size, self.times.node_size)
        return self.times.links.collective(world, 16.0, 2)


def _seconds(times: Iterable[Time]) -> list[float]:
    return [int(time) / _NANO for time in times]


def _nano(seconds: float) -> int:
    return round(seconds * _NANO)
