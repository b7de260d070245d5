"""`estimate`: the seconds of a step, composed of the book's closed forms, always as a range.

Chapter: book/whole/plan-your-run.  In: a model, a plan, the shape of a step, hardware.  Out: seconds, by what they are.
  arithmetic   2 P per token forward, 4 P backward, 2 P again where a layer is recomputed, of the P parameters that a
               token uses; 2 (d_k + d_v) per head and pair that a causal mask shows; over peak * utilisation
  bubble       idle / busy ticks of the plan's own schedule with equal stages, times arithmetic, tp, cp and ep
  tp to dp     the calls that `Plan.traffic` counts, with rows for experts spread evenly; F&B pairs hide those of `ep`
The seconds are the sum of all parts, of the fullest rank of pp: nothing else hides.  There is no optimizer step, data
loading, checkpoint, slow rank or shared network; experts of a token that share a node are sent to it separately.
Elsewhere: calculon; SimuMax; Megatron `num_floating_point_operations`; torchtitan's `get_num_flop_per_token`: S^2.
Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TypeAlias

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig, sizes_of
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.gradient_traffic import gradients, mirrors
from dualpipe_lab.plan.hardware import H100, Hardware, Range, compute_seconds
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import contents, has_experts, has_mtp
from dualpipe_lab.plan.stage_traffic import StageTraffic
from dualpipe_lab.plan.traffic import check_traffic, pipeline
from dualpipe_lab.pp.simulator import simulate

POINT = 0.4  # the utilisation that published runs of dense models reach on H100
Unit: TypeAlias = tuple[float, Mapping[str, float]]  # FLOPs of a rank, seconds of calls by axis
PARTS = ("arithmetic", "bubble", "tp", "cp", "ep", "pp", "dp")


@dataclass(frozen=True)
class Estimate:
    """The seconds of a step; it prints as a few lines."""

    plan: Plan
    hardware: Hardware
    utilisation: tuple[float, float]  # least and most of the peak that arithmetic reaches
    seconds: Range  # with the most, and with the least of it
    parts: dict[str, float]  # of `point`, by what they are
    model_flops: int  # of the step, without what is computed again
    num_tokens: int  # of the step

    @property
    def point(self) -> float:
        """Seconds with a utilisation of 0.4, or the nearest of the range."""
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second of one GPU, at the point."""
        return self.num_tokens / self.point / self.plan.world_size

    @property
    def mfu(self) -> float:
        """The part of the peak that the model's own FLOPs are, at the point."""
        return self.model_flops / (self.point * self.plan.world_size * self.hardware.flops)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.parts.items() if seconds)
        rate = f"{self.tokens_per_second_per_gpu:.0f} tokens/s per GPU, MFU {self.mfu:.0%}"
        low, high = self.utilisation
        return f"{self.plan}\n{self.seconds} at a utilisation of {high:g} to {low:g}\n{parts} s; {rate}"


def estimate(
    model: ModelConfig,
    plan: Plan,
    sequence_length: int,
    global_batch: int,
    *,
    hardware: Hardware = H100,
    utilisation: tuple[float, float] | float = (0.35, 0.5),
) -> Estimate:
    """Return the seconds of a step.

    Args:
        model: a `LlamaConfig` or a `V3MoEConfig`.
        plan: that fits it.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step, over all data ranks and microbatches.
        hardware: GPUs and links; its nodes are those of a plan without `ranks_per_node`.
        utilisation: the part of the peak that arithmetic reaches, least and most, or one number.

    Raises:
        ValueError: as `Plan.check`, sequences that do not divide, or a utilisation outside of 0 to 1.

    >>> from dualpipe_lab.plan import model_of
    >>> found = estimate(model_of("llama3-8b"), Plan(dp=8, zero=3, precision="bfloat16"), 8192, 8)
    >>> print(found.seconds, f"{found.mfu:.2f}")
    0.98 to 1.34 s 0.36
    """
    low, high = (utilisation, utilisation) if isinstance(utilisation, int | float) else utilisation
    if not 0 < low <= high <= 1:
        raise ValueError(
            f"a utilisation is above 0 and at most 1, the least first, got {utilisation!r}; use (0.35, 0.5)"
        )
    plan.check(model, sequence_length)
    step = Step(model, plan, sequence_length, global_batch, hardware)
    rest = step.gradients()
    least, most, point = (step.parts(used) | rest for used in (high, low, min(max(POINT, low), high)))
    seconds = Range(*(sum(parts[name] for name in PARTS) for parts in (least, most)))
    flops = global_batch * model_flops(model, sequence_length, mtp=has_mtp(plan, model))
    parts = {name: point[name] for name in PARTS}
    return Estimate(plan, hardware, (low, high), seconds, parts, flops, global_batch * sequence_length)


class Step:
    """The parts of one step of a legal plan."""

    def __init__(
        self, model: ModelConfig, plan: Plan, sequence_length: int, global_batch: int, hardware: Hardware
    ) -> None:
        self.model, self.plan, self.hardware = model, plan, hardware
        self.shape, self.contents = (check_traffic(plan, global_batch), sequence_length), contents(plan, model)
        neutral = replace(plan, num_microbatches=1, schedule="gpipe", chunks=None, layers=None, zero=0, hybrid=False)
        self.units = _units(model, neutral, self.shape, hardware)
        self.fullest = max(range(plan.pp), key=lambda pp_rank: sum(self._rank(pp_rank, POINT).values()))

    def parts(self, utilisation: float) -> dict[str, float]:
        """Return the seconds of the fullest rank of pp, but for gradients and weights."""
        parts = self._rank(self.fullest, utilisation)
        bubble = 0.0 if self.plan.pp == 1 else _bubble(self.plan) * sum(parts.values())
        return parts | {"bubble": bubble, "pp": self._messages(self.fullest)}

    def _rank(self, pp_rank: int, utilisation: float) -> dict[str, float]:
        parts = dict.fromkeys(("arithmetic", "tp", "cp", "ep"), 0.0)
        for stage in self.plan.stages(pp_rank):
            flops, calls = 0.0, defaultdict[str, float](float)
            for name, count in self.contents[stage].items():
                unit_flops, unit_calls = self.units[name]
                flops += count * unit_flops
                for axis, seconds in unit_calls.items():
                    calls[axis] += count * seconds
            times = self._times(stage)
            arithmetic = compute_seconds(flops, self.hardware, utilisation)
            if self.plan.overlap:  # exchanges are hidden behind the arithmetic of their stage
                calls["ep"] = max(0.0, calls["ep"] - arithmetic)
            parts["arithmetic"] += times * arithmetic
            for axis, seconds in calls.items():
                parts[axis] += times * seconds
        return parts

    def _times(self, stage: int) -> float:
        return self.plan.num_microbatches / len(self.plan.holders(stage))  # a mirror takes half of them

    def _messages(self, pp_rank: int) -> float:
        rank = self._rank_at(pp_rank)
        calls = pipeline(StageTraffic(self.plan, self.model, rank, *self.shape))
        return self._seconds(calls.add(mirrors(self.plan, self.model, rank)))

    def gradients(self) -> dict[str, float]:
        """Return the seconds of the sums of gradients and the gathers of weights, of the fullest rank of pp."""
        return {"dp": self._seconds(gradients(self.plan, self.model, self._rank_at(self.fullest)))}

    def _rank_at(self, pp_rank: int) -> int:
        return self.plan.topology.rank_at(pp=pp_rank) if self.plan.pp > 1 else 0

    def _seconds(self, calls: Calls) -> float:
        return sum((each for *_, each in calls.seconds(self.hardware, nodes_of(self.plan, self.hardware))), 0.0)


def nodes_of(plan: Plan, hardware: Hardware) -> int:
    """Return the ranks of a node."""
    return plan.ranks_per_node or hardware.gpus_per_node


@lru_cache(maxsize=1024)
def _units(model: ModelConfig, plan: Plan, shape: tuple[int, int], hardware: Hardware) -> dict[str, Unit]:
    """Return FLOPs and seconds of calls of one rank and microbatch, for each kind of layer and end."""
    found: dict[str, Unit] = {}
    traffic = StageTraffic(plan, model, 0, *shape)
    for name, flops in pass_flops(model, plan, shape).items():
        calls = traffic.unit(name)
        if name in ("sparse", "second"):
            calls.add(traffic.rows([traffic.uniform(1)] * len(traffic.ep)))
        axes = defaultdict[str, float](float)
        for operation, ranks, seconds in calls.seconds(hardware, nodes_of(plan, hardware)):
            is_cp = plan.cp > 1 and ranks == traffic.cp
            axes["ep" if operation == "all_to_all_single" else "cp" if is_cp else "tp"] += seconds
        found[name] = flops, axes
    return found


def _bubble(plan: Plan) -> float:
    """Return idle over busy ticks of the plan's schedule, with equal stages and B twice as long as F.

    Beyond a few microbatches the idle ticks stay as they are, or grow as evenly as the busy ones (Easy DualPipe).
    """
    full, period, sizes = plan.num_microbatches, 2 * plan.pp, (plan.schedule, plan.pp)
    few = full if full <= 3 * period else period + full % period
    idle, busy = _ticks(*sizes, few, plan.chunks)
    if few < full:
        more, _ = _ticks(*sizes, few + period, plan.chunks)
        idle, busy = idle + (more - idle) * (full - few) / period, busy * full / few
    return idle / busy


@cache
def _ticks(schedule: str, pp: int, num_microbatches: int, chunks: int | None) -> tuple[float, float]:
    program = Plan(pp=pp, schedule=schedule, num_microbatches=num_microbatches, chunks=chunks).program
    assert program is not None
    timeline = simulate(program)
    idle = min(timeline.bubble_time(rank) for rank in range(pp))
    return float(idle), float(timeline.makespan - idle)


def model_flops(model: ModelConfig, sequence_length: int, causal: bool = True, mtp: bool = False) -> int:
    """Return the FLOPs of a sequence, forward and backward; without `causal` of all S^2 pairs, as some count them."""
    sizes, costs = sizes_of(model), model.layer_costs
    head, hidden = sizes.vocabulary_size * sizes.hidden_size, sizes.hidden_size
    extra = costs[-1] + 2 * hidden * hidden + head if mtp else 0
    pairs = causal_pairs(sequence_length) if causal else sequence_length**2
    scores = (len(costs) + mtp) * pairs * _score_flops(model)
    return 3 * (2 * sequence_length * (sum(costs) + head + extra) + scores)


def causal_pairs(length: int, num_ranks: int = 1, layout: str = "zigzag") -> int:
    """Return the pairs of a query and a key that the slowest rank of a ring computes for one sequence."""
    size = -(-length // num_ranks)
    triangle, others = size * (size + 1) // 2, num_ranks - 1
    return triangle + others * {"contiguous": size * size, "striped": triangle, "zigzag": size * size // 2}[layout]


def _score_flops(model: ModelConfig) -> int:
    latent = None if isinstance(model, LlamaConfig) else model.latent
    sizes = sizes_of(model)
    widths = 2 * sizes.size_of_head if latent is None else latent.key + latent.value
    return 2 * sizes.num_heads * widths


def pass_flops(model: ModelConfig, plan: Plan, shape: tuple[int, int]) -> dict[str, float]:
    """Return FLOPs of a rank for a microbatch by kind of layer and end; ranks of tp compute all rows of experts."""
    sizes, (num_rows, length), passes = sizes_of(model), shape, 4 if plan.recompute else 3
    tokens, hidden = 2 * num_rows * length / plan.cp, sizes.hidden_size
    scores = num_rows * causal_pairs(length, plan.cp, plan.layout) * _score_flops(model) / plan.tp
    head = 3 * tokens * hidden * sizes.vocabulary_size / plan.tp
    found = {"dense": passes * (tokens * model.layer_costs[0] / plan.tp + scores), "first": 0.0, "last": head}
    if isinstance(model, LlamaConfig) or not has_experts(model):
        return found
    routed = model.num_experts_per_token * model.expert_parameters
    shared = 3 * hidden * model.shared_ffn_size / plan.tp
    attention = (model.layer_costs[-1] - routed) / plan.tp - shared
    again = 3 if plan.overlap else passes  # overlapped experts are not run again
    found["sparse"] = passes * (tokens * attention + scores) + again * tokens * (routed + shared)
    found["second"] = found["sparse"] + head + passes * tokens * 2 * hidden * hidden / plan.tp
    return found
