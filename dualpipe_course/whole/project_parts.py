"""What the project "Assemble a trainer from the parts" gives: sizes, plans, and a rank's parts before they are joined.

Chapter: book/whole/project.  In: a config, a plan.  Out: `Parts` of one rank; nothing in it sums, clips or saves.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan import Plan
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from dualpipe_lab.launch.mesh import Mesh
    from dualpipe_lab.train.sampler import Batch

LENGTH, BATCH = 16, 8  # tokens of a sequence, sequences of a step
_SIZES: dict[str, Any] = {"hidden_size": 16, "ffn_size": 32, "num_heads": 4, "num_kv_heads": 2}

PLACED = LlamaConfig(**_SIZES, num_layers=6, tied=True)  # milestone 1
DENSE = LlamaConfig(**_SIZES, tied=True)  # milestone 2
DENSE_PLAN = Plan(pp=2, dp=2, tp=2, num_microbatches=2, precision="float64")
COST = Cost(F=[2, 2, 2, 3], I=[2, 2, 2, 3], W=[2, 2, 2, 3])  # milestone 4: the last stage has the head
RANKS, MICROBATCHES, TICKS, LIVE = 4, 8, 78, 3  # and its budgets
SAVED = LlamaConfig(**_SIZES)  # milestone 5
SAVED_ON = Plan(dp=2, tp=2, num_microbatches=2, precision="float64")
RESUMED_ON = Plan(pp=2, num_microbatches=4, precision="float64")
SPARSE = V3MoEConfig(
    hidden_size=16, ffn_size=32, num_layers=2, num_heads=2, num_kv_heads=2, expert_ffn_size=8, balance=0.0
)  # milestone 6
SPARSE_PLAN = Plan(pp=2, dp=2, ep=2, num_microbatches=2, precision="float64")
LOG_BYTES = 256  # of a step, for the loss in the log


class Weight(NamedTuple):
    """A parameter of this rank, and which part of the full tensor it is: None for all of it."""

    parameter: "nn.Parameter"
    shard: Any


@dataclass
class Parts:
    """What a rank of a plan holds.

    Attributes:
        plan: how the model is shared.
        mesh: `mesh.group("dp")` is this rank's process group along an axis, or along several.
        model: this rank's stages.
        runtime: `runtime.step(inputs, targets, weights=[...])` runs the microbatches forward and backward; gradients
            are added to those that are there.
        adam: AdamW over this rank's parameters.
    """

    plan: Plan
    mesh: "Mesh"
    model: Any
    runtime: Any
    adam: "torch.optim.Optimizer"

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """This rank's parameters by their names in the full model; a tied table has one name on both of its stages.

        A shard has `axis`, `start`, `stop`, `size` (of the full tensor along `axis`), and `mesh_axis`, "tp" or "ep".
        """
        from dualpipe_lab.dp import param_specs

        declared = param_specs(self.model, self.plan.program, self.mesh.rank("pp"))
        return {a.name: Weight(parameter, a.shard if a.axes else None) for parameter, a in declared.items()}

    def batch(self, step: int) -> "Batch":
        """This rank's share of a step, for the harness and milestone 6: `inputs`, `targets`, `num_tokens`."""
        from dualpipe_lab.data import frozen_corpus
        from dualpipe_lab.train.sampler import Sampler

        here = self.mesh.coordinates
        data_rank = here.get("dp", 0) * self.plan.ep + here.get("ep", 0)
        sampler = Sampler(frozen_corpus(), LENGTH, BATCH)
        return sampler.batch(step, self.plan.num_microbatches, data_rank, self.plan.data_size)


def assemble(config: LlamaConfig | V3MoEConfig, plan: Plan, lr: float = 1e-2) -> Parts:
    """Make this rank's parts; every rank of the plan calls it."""
    import torch

    from dualpipe_lab.launch.mesh import Mesh
    from dualpipe_lab.models import build_stages
    from dualpipe_lab.pp.runtime import PipelineRuntime

    mesh = Mesh(plan.topology)
    program = plan.program or schedules.build("1f1b", 1, plan.num_microbatches)
    model = build_stages(config, mesh, plan.program, layers=plan.layers, dtype=torch.float64)
    runtime = PipelineRuntime(program, model.stages, model.loss_fn(), group=mesh.group("pp"))
    adam = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False, fused=False)
    return Parts(plan, mesh, model, runtime, adam)


def run_microbatches(parts: Parts, batch: "Batch") -> "Tensor":
    """Run a batch forward and backward; return this rank's summand of the loss, the same on ranks of one tp group."""
    import torch

    parts.model.begin_step(batch.num_tokens, batch.num_sequences)
    result = parts.runtime.step(batch.inputs, batch.targets, weights=[1.0] * len(batch.inputs))
    return sum((loss.detach() for loss in result.losses.values()), torch.zeros((), dtype=torch.float64))
