"""`model_states`: the bytes of parameters, gradients, master weights and moments that a rank holds between steps.

Chapter: book/dp/zero-3.  In: a model, a plan, a place along pp and tp.  Out: exact bytes.
             parameters   gradients    master and moments
  ZeRO-0     n            n            n
  ZeRO-1     n            n            n / N
  ZeRO-2     n            n / N        n / N
  ZeRO-3     n / N        n / N        n / N
with n elements in flat buffers, each padded to a multiple of the N ranks that hold copies of its parameters: those of
an expert are fewer.  A rank that holds two stages counts both, and a table that two stages share counts on both.
Elsewhere: Megatron `theoretical_memory_usage.py` (the first stage alone); DeepSpeed's estimators.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), sections 3.1 and 5.
"""

from typing import NamedTuple

from dualpipe_lab.dp.layout import Layout
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gradient_traffic import Part, buckets_of, copies_of, parts_at


class NumberBytes(NamedTuple):
    """Bytes per element of parameters, gradients, master weights (0 for none) and both moments together.

    >>> NumberBytes.of("bfloat16")
    NumberBytes(parameter=2, gradient=4, master=4, moments=8)
    """

    parameter: int
    gradient: int
    master: int
    moments: int

    @classmethod
    def of(cls, precision: str) -> "NumberBytes":
        """Return those of a plan's precision: bfloat16 has fp32 gradients and master weights."""
        return {"bfloat16": cls(2, 4, 4, 8), "float32": cls(4, 4, 0, 8), "float64": cls(8, 8, 0, 16)}[precision]


class ModelStates(NamedTuple):
    """Bytes that one rank holds between steps, in flat buffers with their padding.

    Attributes:
        num_parameters: elements of the model on the rank, without padding and before ZeRO shards them.
        parameters, gradients, masters, moments: bytes.
    """

    num_parameters: int
    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.parameters + self.gradients + self.masters + self.moments


def model_states(model: ModelConfig, plan: PlanFields, pp_rank: int = 0, tp_rank: int = 0) -> ModelStates:
    """Return the states of the ranks at a place along pp and tp: they are equal along all other axes.

    >>> from dualpipe_lab.models import LlamaConfig
    >>> from dualpipe_lab.plan import Plan
    >>> plan = Plan(dp=2, zero=1, precision="bfloat16")
    >>> model_states(LlamaConfig(), plan).total / LlamaConfig().num_parameters()
    12.0
    """
    parts = parts_at(plan, model, pp_rank, tp_rank)
    return states_of(plan, sum(part.numel for part in parts), flat_layouts(plan, parts))


def states_of(plan: PlanFields, num_parameters: int, layouts: list[Layout]) -> ModelStates:
    """Return the states of a rank with these flat buffers."""
    numbers = NumberBytes.of(plan.precision)
    full, shard = (sum(getattr(one, name) for one in layouts) for name in ("padded_numel", "shard_numel"))
    if not plan.zero:
        shard = full
    return ModelStates(
        num_parameters,
        (shard if plan.zero == 3 else full) * numbers.parameter,
        (shard if plan.zero > 1 else full) * numbers.gradient,
        shard * numbers.master,
        shard * numbers.moments,
    )


def buffer_bytes(plan: PlanFields, layouts: list[Layout]) -> int:
    """Return the bytes of ZeRO's two largest buckets of gradients, or units of weights and gradients."""
    if plan.zero < 2:
        return 0
    numbers = NumberBytes.of(plan.precision)
    largest = sum(sorted(layout.padded_numel for layout in layouts)[-2:])
    return largest * (numbers.gradient + numbers.parameter * (plan.zero == 3))


def flat_layouts(plan: PlanFields, parts: list[Part]) -> list[Layout]:
    """Return the flat buffers of some parameters of a rank: buckets, or under ZeRO-3 units."""
    dense, experts = shard_counts(plan)
    found = []
    for bucket in buckets_of(plan, parts):
        found.append(Layout([part.numel for part in bucket], experts if "ep" in bucket[0].kind else dense))
    return found


def shard_counts(plan: PlanFields) -> tuple[int, int]:
    """Return the number of ranks that ZeRO spreads dense weights over, and experts; under hybrid ZeRO within a node.

    >>> from dualpipe_lab.plan import Plan
    >>> shard_counts(Plan(dp=8, ep=4, experts_in_data=True))
    (8, 2)
    """
    if not plan.hybrid:
        return plan.num_copies, plan.num_copies // plan.ep
    dense, experts = (len(copies_of(plan, 0, axes)[0]) for axes in (plan.copy_axes, plan.expert_copy_axes))
    return dense, experts
