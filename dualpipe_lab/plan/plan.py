"""`Plan`: one object that says how a model is trained on its ranks.

Chapter: book/together/cuts.  In: sizes of the axes, settings.  Out: a grid, a program, checks, tables.
Pure data: no torch, no rank.
Elsewhere: Megatron's command line of parallel sizes; torchtitan's `ParallelDims` and its `[parallelism]` section.
"""

from dataclasses import dataclass

from dualpipe_lab.plan.fields import PlanFields


@dataclass(frozen=True)
class Plan(PlanFields):
    """How a model is trained: ranks along each axis, schedule, ZeRO stage, microbatches, precision.

    The fields are those of `PlanFields`.

    >>> plan = Plan(pp=2, dp=2, tp=2, num_microbatches=8, zero=1, sequence_parallel=True)
    >>> print(plan)
    pp 2 (1f1b, m 8) x dp 2 (ZeRO-1) x tp 2 (sequence parallel) = 8 ranks, float32
    >>> plan.world_size, plan.data_size, plan.num_stages
    (8, 2, 2)
    """
