"""A tiny model with DeepSeek-V3's structure: dense layers, then layers of experts, over ep, edp, tp and cp.

Chapter: book/ep/v3-moe.  In: sizes, a `Topology`.  Out: this rank's shard of the model.
Attention is grouped-query, or with `latent` V3's own; `mtp` predicts a second token.  Softmax scores, `qk_norm`
and no biases make it a Qwen3-MoE.
Gradients of experts are summed over edp, the ranks with the same experts and other tokens; all others over dp, ep and
cp together.  Each rank divides its loss by the counts of the full step, so gradients are summed and never averaged.
Weights are drawn in full, by their names, and then sharded: every topology starts from the same numbers.
`dualpipe_lab.models.plain_v3_moe` is the same model in plain torch, with the same names.
Elsewhere: Megatron `GPTModel` with `MoELayer`; torchtitan's DeepSeek-V3; DeepSeek-V3's inference/model.py.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), sections 2.1.2 and 4.2.
"""

from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.ep.deepseek_moe import DeepSeekMoE, DeepSeekRouter, update_biases
from dualpipe_lab.ep.moe import ExpertParallel, reduce_gradients
from dualpipe_lab.ep.node_dispatch import NodeGroups
from dualpipe_lab.ep.router import Routing
from dualpipe_lab.ep.router_losses import sequence_loss
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.models.llama import grouped_attention
from dualpipe_lab.models.stage import Sharing, TransformerStage, check_topology, make_norm
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp.runtime.stage import WithLoss
from dualpipe_lab.topology import Topology
from dualpipe_lab.tp.gqa import GroupedQueryAttention
from dualpipe_lab.tp.latent_attention import LatentAttention
from dualpipe_lab.tp.mappings import TOKENS, gather_from_ranks, slice_to_ranks
from dualpipe_lab.tp.shard import TensorParallel
from dualpipe_lab.tp.swiglu import SwiGLU

Nodes: TypeAlias = NodeGroups | None


class V3Layer(nn.Module):
    """One transformer layer: attention, then a dense or mixture-of-experts feed-forward network."""

    def __init__(self, config: V3MoEConfig, sharing: Sharing, ep: ExpertParallel, nodes: Nodes, number: int) -> None:
        super().__init__()
        self.tp, mesh = sharing.tp, sharing.mesh
        self.cp = mesh.group("cp") if mesh.size("cp") > 1 else None
        self.has_balance, self.scoring = config.balance > 0, config.scoring
        self.attention_norm = make_norm(config.dense, self.tp, sharing.dtype)
        self.attention = _attention(config, sharing)
        self.mlp_norm = make_norm(config.dense, self.tp, sharing.dtype)
        if number < config.num_dense_layers:
            self.mlp = SwiGLU(config.hidden_size, config.ffn_size, tp=self.tp, dtype=sharing.dtype)
        else:
            self.mlp = _experts(config, sharing, ep, nodes)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        num_sequences: int | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `y_BSD` of `x_BSD`, and the balance loss per sequence; None in a dense layer, or without one.

        `padding_BS`: True where a position is padding, which no expert sees and nothing counts.
        """
        x = x + self.attention(self.attention_norm(x), positions)
        normal = self.mlp_norm(x)
        if not isinstance(self.mlp, DeepSeekMoE):
            return x + self.mlp(normal), None
        if self.tp.sequence_parallel:  # a router needs full sequences, so all ranks of tp route all tokens, as without
            normal = gather_from_ranks(normal, TOKENS, self.tp.group)
        y, routing = self.mlp.with_routing(normal, padding)
        if self.tp.sequence_parallel:
            y = slice_to_ranks(y, TOKENS, self.tp.group)
        return x + y, self.balance(routing, normal.shape[1], num_sequences, padding)

    def balance(
        self, routing: Routing, length: int, num_sequences: int | None = None, padding: Tensor | None = None
    ) -> Tensor | None:
        """Return the balance loss per sequence of a routing, for sequences of `length` here; None without one."""
        if not self.has_balance:
            return None
        return sequence_loss(
            routing.logits,
            routing.indices,
            length,
            num_sequences=num_sequences,
            group=self.cp,
            scoring=self.scoring,
            padding=padding,
        )


class V3Stage(TransformerStage):
    """Some layers of a V3-style model; the first stage takes ids_BS, the last one returns logits_BSV."""

    def __init__(
        self, config: V3MoEConfig, sharing: Sharing, layers: range, is_first: bool, is_last: bool, nodes: Nodes = None
    ) -> None:
        ep = expert_parallel(sharing.mesh)
        super().__init__(config.dense, sharing, layers, partial(V3Layer, config, sharing, ep, nodes), is_first, is_last)
        self.config, self.ep = config, ep

    def forward(self, x: Tensor, *, padding: Tensor | None = None) -> WithLoss:
        """Return x_BSD or logits_BSV of ids_BS or x_BSD, and the weighted balance loss, divided by `num_sequences`.

        `padding_BS`: as in `V3MoE.forward`, on every stage; `RankModel.extra_inputs` hands it to them.
        """
        y, balance = self.run_layers(x, self.num_sequences, padding)
        return WithLoss(y, self.config.balance * balance)

    def run_layers(
        self, x: Tensor, num_sequences: int | None = None, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of this stage, and the balance losses per sequence, summed over its layers."""
        positions, x = self.positions(x.device), self.enter(x)
        balance = x.new_zeros(())
        for layer in self.layers:
            x, loss = self.run(layer, x, positions, num_sequences, padding)
            balance = balance if loss is None else balance + loss
        return self.leave(x), balance


class V3MoE(V3Stage):
    """A V3-style model sharded over the ranks of a topology: the stage that has all layers.

    Args:
        config, seed, dtype, layout: as in `Llama`.
        topology: the ranks, or a `Mesh` that other parts use too.  Experts are sharded along `ep`, which is an axis or,
            with `edp=`, a slice of the data axes; all other layers are sharded along `tp` and replicated elsewhere.
        recompute: keep only the input of each layer, and rerun its forward in the backward.
        num_nodes: of the ranks of `ep`; with more than one, each token is sent to a node at most once.
        sequence_parallel: between the layers, each rank of tp holds its shard of the tokens; experts see all of them.

    Attributes:
        ep: the ranks over which the experts are sharded.
        data: the ranks with the same weights and other tokens.

    Raises:
        ValueError: the model cannot be sharded over the topology.
    """

    def __init__(
        self,
        config: V3MoEConfig,
        topology: Topology | Mesh,
        seed: int = 0,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        layout: SequenceLayout | None = None,
        num_nodes: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        mesh = topology if isinstance(topology, Mesh) else Mesh(topology)
        check_topology(config, mesh.topology, layout)
        tp = TensorParallel(mesh.group("tp"), sequence_parallel)
        sharing = Sharing(config.dense, mesh, tp, None, layout, recompute, dtype)
        nodes = None if num_nodes == 1 else NodeGroups.of(num_nodes, expert_parallel(mesh))
        super().__init__(config, sharing, range(config.num_layers), True, True, nodes)
        self.data = data_group(mesh)
        self.draw(seed)

    def forward(  # type: ignore[override]
        self, ids: Tensor, num_sequences: int | None = None, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `logits_BSV` of `ids_BS`, and the balance losses per sequence of this rank, summed over the layers.

        `ids`: the same on all ranks of a tp group; with a layout, this rank's shard of each sequence.
        `num_sequences`: of the step, over all ranks (default: those here).
        `padding_BS`: True where a position stands behind its document's end; such positions are not routed, and count
        in no load and no balance loss.  A position without a target may be a token, such as one of a prompt.
        """
        return self.run_layers(ids, num_sequences, padding)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        num_tokens: int | None = None,
        num_sequences: int | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Compute this rank's summand of the step's loss; the sum over microbatches and data ranks is the full loss.

        `ids_BS`, `num_sequences`, `padding_BS`: as in `forward`.  `targets_BS`: -100 is no target.
        `num_tokens`: valid targets of the step, over all ranks (default: those here).
        """
        logits, balance = self(ids, num_sequences, padding)
        return self.loss_of(logits, targets, num_tokens=num_tokens) + self.config.balance * balance

    def reduce_gradients(self) -> None:
        """Sum the gradients of a step over ranks with other data, those of experts over the ranks with the same."""
        reduce_gradients(self, self.ep, 1, self.data)

    def update_biases(self, speed: float) -> list[Tensor]:
        """Update the selection biases of all routers after a step; return each router's loads over all ranks."""
        loads: list[Tensor] = update_biases(self, speed, self.data)
        return loads

    def full_state_dict(self, of: str = "parameter") -> dict[str, Tensor]:
        """Gather every parameter, or with "grad" every gradient, in full; every rank of the world calls this."""
        return dict(self.gathered(of))


def _attention(config: V3MoEConfig, sharing: Sharing) -> GroupedQueryAttention | LatentAttention:
    if config.latent is None:
        return grouped_attention(config.dense, sharing.tp, sharing.replicas, sharing.attend, sharing.dtype)
    return LatentAttention(
        config.hidden_size,
        config.num_heads,
        config.latent,
        tp=sharing.tp,
        rope_base=config.rope_base,
        rope_scaling=config.rope_scaling,
        attend=sharing.attend,
        dtype=sharing.dtype,
    )


def _experts(config: V3MoEConfig, sharing: Sharing, ep: ExpertParallel, nodes: Nodes) -> DeepSeekMoE:
    groups = config.num_groups, config.num_groups_per_token
    sizes, dtype = (config.hidden_size, config.num_experts, config.num_experts_per_token), sharing.dtype
    router = DeepSeekRouter(
        *sizes,
        *groups,
        scale=config.scale,
        dtype=dtype,
        scoring=config.scoring,
        normalise=config.normalise,
        has_bias=config.selection_bias,
    )
    if router.bias is not None:
        router.bias = router.bias.to(torch.promote_types(router.bias.dtype, torch.float32))  # its steps are short
    tp = replace(sharing.tp, sequence_parallel=False)  # it computes on the router's tokens
    shared = (
        SwiGLU(config.hidden_size, config.shared_ffn_size, tp=tp, dtype=dtype) if config.num_shared_experts else None
    )
    return DeepSeekMoE(
        router, config.hidden_size, config.expert_ffn_size, ep=ep, shared=shared, dtype=dtype, nodes=nodes
    )


def data_group(mesh: Mesh) -> Group:
    """Return the ranks with the same weights and other tokens: those of dp, cp and of an axis ep."""
    return mesh.group(*(axis for axis in ("dp", "ep", "cp") if axis in mesh.topology.names))


def expert_parallel(mesh: Mesh) -> ExpertParallel:
    """Return the ranks over which the experts are sharded, and the ranks with replicas of the same experts."""
    copies = ("edp",) if mesh.topology.edp else [axis for axis in ("dp", "cp") if axis in mesh.topology.names]
    return ExpertParallel(mesh.group("ep"), mesh.group(*copies))
