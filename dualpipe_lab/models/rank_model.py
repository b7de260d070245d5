"""`build_stages`: the stages of a model that one rank holds, for any program; `RankModel`: the stages together.

Chapter: book/whole/cuts.  In: a config, a `Mesh`, a program.  Out: modules by stage, for `PipelineRuntime`.
  loss       each rank has its summand: the sum over its valid targets, divided by those of the step on all ranks.  The
             summands of microbatches and data ranks add up, so `runtime.step` takes weights of 1, and gradients are
             summed, never averaged
  mirrors    a stage on two ranks (DualPipe) starts with the same numbers on both, because they are drawn by name
  tied       the embedding's table stands on the first stage and on the last; `runtime.sum_tied(rank_model.tied)`
  extra      a V3-style model takes the masks of padding, and where it predicts a second token (`mtp`) the shifted
             tokens: `extra_inputs` for each step
Elsewhere: Megatron `get_model` and `setup_model_and_optimizer`; torchtitan `pipeline_llm`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.ep.deepseek_moe import update_biases
from dualpipe_lab.launch.context import device as rank_device
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.models.llama import LlamaStage
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.mtp import COPY, MTPStage
from dualpipe_lab.models.parameters import HEAD, TABLE
from dualpipe_lab.models.stage import Sharing, TransformerStage
from dualpipe_lab.models.stage_rules import ModelConfig, check_stages, sizes_of, stage_layers, stages_of
from dualpipe_lab.models.v3_moe import V3Stage, data_group
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime.stage import WithLoss
from dualpipe_lab.topology import Topology
from dualpipe_lab.tp.shard import TensorParallel

Extra: TypeAlias = dict[str, Tensor]


class RankModel(nn.Module):
    """The stages of a model that one rank holds; made by `build_stages`.

    Attributes:
        config: of the full model.
        mesh: the ranks.
        program: of the pipeline; None without one.
        data: the ranks with the same weights and other tokens; of an expert, the ranks of `ep` hold other weights.
        layers: of every stage of the model.
        stages: this rank's stages, by number.
        tied: by stage, the name of the table that first and last stage share, where the head uses it or a second token
            is predicted; None where they share none.
        mtp: whether the last stage predicts a second token.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        program: Program | None,
        layers: Sequence[range],
        stages: dict[int, TransformerStage],
        mtp: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.program, self.layers = config, mesh, program, tuple(layers)
        self.data, self.pp = data_group(mesh), mesh.group("pp")
        self.num_tokens: int | None = None
        self.num_sequences: int | None = None
        self.mtp = mtp
        is_tied = isinstance(config, LlamaConfig) and config.tied
        other = COPY if mtp else HEAD if is_tied else None
        self.tied = {0: TABLE, len(layers) - 1: other} if other and len(layers) > 1 else None
        self._stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})

    @property
    def stages(self) -> dict[int, TransformerStage]:
        """This rank's stages, by number."""
        return {int(number): stage for number, stage in self._stages.items()}

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits_BSV of ids_BS, where this rank holds the full model's only stage; else ValueError."""
        if len(self.layers) > 1:
            raise ValueError(f"the model has {len(self.layers)} stages; run them with PipelineRuntime")
        output = self.stages[0](ids)
        return self.logits_of(output.output if isinstance(output, WithLoss) else output)

    def logits_of(self, output: Tensor) -> Tensor:
        """Return the logits of the last stage's output, which has them already where the loss is not in chunks."""
        last = self.stages[len(self.layers) - 1]
        return output if last.loss_chunk is None else last.logits_of(output)

    def begin_step(self, num_tokens: int, num_sequences: int | None = None) -> None:
        """Set by what the losses of a step are divided; both counts are over all microbatches and ranks.

        `num_tokens`: valid targets.  `num_sequences`: needed for the balance loss per sequence.
        """
        self.num_tokens, self.num_sequences = num_tokens, num_sequences
        for stage in self.stages.values():
            stage.num_tokens, stage.num_sequences = num_tokens, num_sequences

    def extra_inputs(
        self, next_ids: Sequence[Tensor] = (), next_targets: Sequence[Tensor] = (), padding: Sequence[Tensor] = ()
    ) -> dict[int, list[Extra]]:
        """Return `extra` for `PipelineRuntime.step`, from the tensors of each microbatch; none where nothing is padded.

        `next_ids`, `next_targets`: `NextTokens`, where a second token is predicted.  `padding_BS`: as in
        `V3MoE.forward`, for every stage with experts; a Llama routes nothing and takes none.
        """
        masks: list[Extra] = [{"padding": mask} for mask in padding] if isinstance(self.config, V3MoEConfig) else []
        extra = dict.fromkeys(range(len(self.layers)), masks) if masks else {}
        pairs = zip(next_ids, next_targets, strict=True)
        if second := [{"next_ids": ids, "next_targets": targets} for ids, targets in pairs]:
            both = zip(masks or [{}] * len(second), second, strict=True)
            extra[len(self.layers) - 1] = [mask | shifted for mask, shifted in both]
        return extra

    def loss_fn(self, num_tokens: int | None = None, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of the last stage's output for `PipelineRuntime`, whose step then takes weights of 1.

        `num_tokens`: as in `begin_step` (default: those given there); `options`: as in `tp.cross_entropy`.
        """

        def loss(output: Tensor, targets: Tensor) -> Tensor:
            count = self.num_tokens if num_tokens is None else num_tokens
            return self.stages[len(self.layers) - 1].loss_of(output, targets, num_tokens=count, **options)

        return loss

    def boundary(self, num_rows: int, length: int) -> Tensor:
        """Return an example `x_BSD` of what stages exchange; `length`: tokens of a sequence on one rank of cp."""
        stage = next(iter(self.stages.values()))
        tokens = length // stage.tp.size if stage.tp.sequence_parallel else length
        return torch.empty(num_rows, tokens, self.config.hidden_size, dtype=stage.dtype, device=rank_device())

    def update_biases(self, speed: float) -> list[Tensor]:
        """Update the selection biases of all routers, and return the loads over all ranks of each router here.

        Every rank calls this after the last backward of a step; loads of mirrored stages are added first.
        """
        loads: list[Tensor] = update_biases(self.stages, speed, self.data, self.program, self.pp)
        return loads

    def full_state_dict(self, of: str = "parameter") -> dict[str, Tensor]:
        """Gather every parameter, or with "grad" every gradient, of the full model, by its name there.

        Every rank of the world calls this, after the gradients have been summed; copies of a stage count as equal.
        A parameter without a gradient is left out, and a tied table comes once, under the embedding's name.
        """
        found: dict[str, Tensor] = {}
        for stage in self.stages.values():
            found |= stage.gathered(of)
        if self.mesh.size("pp") == 1:
            return found
        every = comm.all_gather_object({name: tensor.cpu() for name, tensor in found.items()}, self.pp)
        merged = {name: tensor for part in reversed(every) for name, tensor in part.items()}  # the first holder's
        return {name: tensor.to(rank_device()) for name, tensor in merged.items()}


def build_stages(
    config: ModelConfig,
    mesh: Mesh | Topology,
    program: Program | None = None,
    *,
    layers: Sequence[int] | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    sequence_parallel: bool = False,
    layout: SequenceLayout | None = None,
    recompute: bool = False,
    mtp: float | None = None,
    loss_chunk: int | None = None,
) -> RankModel:
    """Build the stages that a program places on this rank; every rank of the world calls this.

    `config`, `program`, `layers`, `sequence_parallel` and `mtp` are as in `check_stages`, `loss_chunk` is as in
    `Llama`, all others are as in `V3MoE`.  Equal seeds give the weights of the same full model on every cut.

    Raises:
        ValueError: as `check_stages`; the layout is missing or for another number of ranks.
    """
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    tokens = None if layout is None else layout.size(0)
    rules = partial(check_stages, layers=layers, sequence_parallel=sequence_parallel, num_tokens=tokens)
    rules(config, mesh.topology, program, mtp=mtp)
    tp = TensorParallel(mesh.group("tp"), sequence_parallel)
    sharing = Sharing(
        sizes_of(config), mesh, tp, layout=layout, recompute=recompute, dtype=dtype, loss_chunk=loss_chunk
    )
    shares = stage_layers(config, 1 if program is None else program.num_stages, layers, mtp is not None)

    def make(number: int) -> TransformerStage:
        here, is_first, is_last = shares[number], number == 0, number == len(shares) - 1
        if isinstance(config, LlamaConfig):
            return LlamaStage(config, sharing, here, is_first, is_last)
        if is_last and mtp is not None:
            return MTPStage(config, sharing, here, is_first, mtp)
        return V3Stage(config, sharing, here, is_first, is_last)

    stages = {number: make(number) for number in stages_of(program, mesh.rank("pp"))}
    for stage in stages.values():
        stage.draw(seed)
    return RankModel(config, mesh, program, shares, stages, mtp is not None)
