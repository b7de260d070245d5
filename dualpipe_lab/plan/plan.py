"""`Plan`: one object that says how a model is trained on its ranks.

Chapter: book/whole/cuts.  In: sizes of the axes, settings.  Out: a grid, a program, checks, tables.
Pure data: no torch, no rank.
Elsewhere: Megatron `parallel_state.initialize_model_parallel` and its command line of parallel sizes; torchtitan's
`ParallelDims` and its `[parallelism]` section.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualpipe_lab.plan.fields import PlanFields

if TYPE_CHECKING:  # each method reads what it needs, so that a plan is there in milliseconds
    from dualpipe_lab.models.stage_rules import ModelConfig
    from dualpipe_lab.plan.sums import SumsTable
    from dualpipe_lab.plan.traffic import Routing, StepTraffic


@dataclass(frozen=True)
class Plan(PlanFields):
    """How a model is trained: ranks along each axis, schedule, ZeRO stage, microbatches, precision.

    Attributes:
        pp, dp, cp, tp, ep: ranks along each axis.
        num_microbatches: of each data rank and step.
        schedule: a name of `schedules.names()`; without pp the microbatches run one after another.
        chunks: stages per rank, for schedules that let one choose.
        zero: 0 to 3, the stage of ZeRO over the ranks of dp, cp and ep together.
        hybrid: ZeRO shards within a node and replicates across nodes; needs `ranks_per_node`.
        experts_in_data: the ranks of ep are a slice of those of dp and cp, not an axis of their own.
        sequence_parallel: between the layers, each rank of tp holds its shard of the tokens.
        layout: which positions of a sequence each rank of cp holds.
        recompute: keep only the input of each layer, and rerun its forward in the backward.
        loss_chunk: tokens whose logits exist at the same time in the loss (default: all of a microbatch).
        mtp: lambda, the weight of a second token's loss; None for a model that predicts the next one alone.
        precision: of weights and gradients; bfloat16 has fp32 master weights.
        overlap: run the experts of a forward and of a backward as overlapped pairs.
        layers: the number of layers of each stage (default: `pp.partition`).
        order: the axes, outermost first; the last one is contiguous in rank.
        ranks_per_node: consecutive ranks that share a machine.

    Raises:
        ValueError: a value that has no meaning for any model.

    >>> plan = Plan(pp=2, dp=2, tp=2, num_microbatches=8, zero=1, sequence_parallel=True)
    >>> print(plan)
    pp 2 (1f1b, m 8) x dp 2 (ZeRO-1) x tp 2 (sequence parallel) = 8 ranks, float32
    >>> plan.world_size, plan.data_size, plan.num_stages
    (8, 2, 2)
    """

    def check(self, config: "ModelConfig", sequence_length: int | None = None, num_ranks: int | None = None) -> None:
        """Refuse a plan under which a model cannot be trained; needs no rank.

        Args:
            config: sizes of the full model, a `LlamaConfig` or a `V3MoEConfig`.
            sequence_length: of the data; None leaves out what depends on it.
            num_ranks: of the world, if it is known.

        Raises:
            ValueError: the rule, the values, and the nearest legal plan.

        >>> from dualpipe_lab.models import LlamaConfig
        >>> try:
        ...     Plan(tp=3).check(LlamaConfig(num_heads=4))
        ... except ValueError as error:
        ...     print(str(error).split("; ")[1])
        the nearest plan of 3 ranks that fits is dp 3 = 3 ranks, float32
        """
        from dualpipe_lab.plan.rules import first_problem

        problem, wanted = first_problem(self, config, sequence_length), num_ranks or self.world_size
        if wanted != self.world_size:
            problem = f"{self} is a plan for {self.world_size} ranks, the world has {wanted}"
        if problem is None:
            return
        nearest = self.nearest(config, sequence_length, wanted)
        remedy = f"the nearest plan of {wanted} ranks that fits is {nearest}"
        raise ValueError(f"{problem}; {remedy if nearest else f'no plan of {wanted} ranks fits this model'}")

    def nearest(
        self,
        config: "ModelConfig",
        sequence_length: int | None = None,
        num_ranks: int | None = None,
        global_batch: int | None = None,
    ) -> "Plan | None":
        """Return the plan that fits a model with the fewest and smallest changes; None if there is none.

        `num_ranks`: of the plan that is returned (default: as many as this one has).  `global_batch`: sequences of a
        step, which must divide among data ranks and microbatches (default: any).  The others are those of `check`.

        >>> from dualpipe_lab.models import LlamaConfig
        >>> print(Plan(pp=4, schedule="dualpipe", num_microbatches=6).nearest(LlamaConfig(num_layers=4)))
        pp 4 (dualpipe, m 8) = 4 ranks, float32
        """
        from dualpipe_lab.plan.rules import nearest_plan

        return nearest_plan(self, config, sequence_length, num_ranks, global_batch)

    @classmethod
    def all(
        cls,
        config: "ModelConfig",
        num_ranks: int,
        sequence_length: int | None = None,
        zeros: Sequence[int] = (0, 1, 2, 3),
        schedule_names: Sequence[str] | None = None,
        **settings: Any,
    ) -> Iterator["Plan"]:
        """Yield every plan of so many ranks that fits a model, in a fixed order.

        `zeros`: the stages of ZeRO to list.  `schedule_names`: for pp above 1 (default: every synchronous schedule).
        `settings`: the other fields of all plans.  `config` and `sequence_length` are those of `check`.

        >>> from dualpipe_lab.models import LlamaConfig
        >>> for plan in Plan.all(LlamaConfig(), 2, zeros=[0], schedule_names=["gpipe"]):
        ...     print(plan)
        tp 2 = 2 ranks, float32
        cp 2 (zigzag) = 2 ranks, float32
        dp 2 = 2 ranks, float32
        pp 2 (gpipe, m 1) = 2 ranks, float32
        """
        from dualpipe_lab.plan.rules import legal_plans

        return legal_plans(cls(**settings), config, num_ranks, sequence_length, zeros, schedule_names)

    def stage_layers(self, config: "ModelConfig") -> tuple[range, ...]:
        """Return the layers of every stage.

        >>> from dualpipe_lab.models import LlamaConfig
        >>> Plan(pp=2, layers=(1, 4)).stage_layers(LlamaConfig(num_layers=5))
        (range(0, 1), range(1, 5))
        """
        from dualpipe_lab.plan.rules import layers_of

        return layers_of(self, config)

    def sums(self, config: "ModelConfig") -> "SumsTable":
        """Return who sums what with whom, for every kind of parameter of a model; ValueError as `check`.

        >>> from dualpipe_lab.models import LlamaConfig
        >>> table = Plan(dp=2, tp=2, zero=1).sums(LlamaConfig())
        >>> print(table.of("norms").sums[0], table.of("norms").norm, sep="; ")
        dp: ranks 0 2 in the backwards: norms; tp rank 0, each its shard
        """
        from dualpipe_lab.plan.sums import sums_of

        self.check(config)
        return sums_of(self, config)

    def traffic(
        self,
        config: "ModelConfig",
        batch_size: int,
        sequence_length: int,
        routing: "Routing | None" = None,
        clips: bool = True,
    ) -> "StepTraffic":
        """Return the messages and bytes of one training step, for every rank and operation.

        It is a step after the first, which also makes groups and exchanges what stays the same.

        Args:
            config: of the full model.
            batch_size: sequences of the step, over all data ranks and microbatches.
            sequence_length: tokens of each.
            routing: by rank and layer, how many of the rank's tokens of the step chose each expert (`router.load`);
                None for choices that are spread evenly, which the result then says.
            clips: whether the step clips the gradient by its norm.

        Raises:
            ValueError: as `check`, or sequences that do not divide.

        >>> from dualpipe_lab.models import LlamaConfig
        >>> step = Plan(dp=2, zero=1).traffic(LlamaConfig(), batch_size=4, sequence_length=16)
        >>> step.sent(rank=0, part="gradients") == LlamaConfig().num_parameters() * 4
        True
        """
        from dualpipe_lab.plan.traffic import check_traffic, traffic_of

        self.check(config, sequence_length)
        num_rows = check_traffic(self, batch_size)
        return traffic_of(self, config, num_rows, sequence_length, routing, clips)
