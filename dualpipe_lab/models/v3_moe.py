"""A tiny model with DeepSeek-V3's structure: dense layers, then layers of experts, over ep, edp, tp and cp.

Chapter: book/ep/v3-moe.  In: sizes, a `Topology`.  Out: this rank's shard of the model.
  x <- x + attention(norm(x));  x <- x + mlp(norm(x));  logits = head(norm(x))
  mlp   the first layers: SwiGLU; all others: a router, its experts, a shared SwiGLU
Unlike V3, attention is grouped-query instead of latent, and only the next token is predicted.
  parameter             sharded along    gradients summed over
  experts               ep               edp: the ranks with the same experts and other tokens
  everything else       tp               dp, ep and cp together
Each rank divides its loss by the counts of the full step, so that gradients are summed and never averaged.
Weights are drawn in full, by their names, and then sharded: every topology starts from the same numbers.
`dualpipe_lab.models.plain_v3_moe` is the same model in plain torch, with the same names.
Elsewhere: Megatron `GPTModel` with `MoELayer`; torchtitan's DeepSeek-V3; DeepSeek-V3's inference/model.py.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), sections 2.1.2 and 4.2.
"""

from functools import partial

import torch
from torch import Tensor, nn

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import positions as positions_of
from dualpipe_lab.dp.grad_norm import global_norm
from dualpipe_lab.ep.deepseek_moe import DeepSeekMoE, DeepSeekRouter, update_biases
from dualpipe_lab.ep.moe import ExpertParallel, expert_parameters, reduce_gradients
from dualpipe_lab.ep.node_dispatch import NodeGroups
from dualpipe_lab.ep.router_losses import sequence_loss
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.pp.runtime.recompute import recompute
from dualpipe_lab.topology import Topology
from dualpipe_lab.tp.attention import causal_attention
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.gqa import Attend, GroupedQueryAttention, kv_replicas
from dualpipe_lab.tp.grads import norm_axes
from dualpipe_lab.tp.lm_head import LMHead
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import full_tensor, initialize_parameters, shards_of
from dualpipe_lab.tp.swiglu import SwiGLU
from dualpipe_lab.world import context
from dualpipe_lab.world.mesh import Mesh


class V3Layer(nn.Module):
    """One transformer layer: attention, then a dense or mixture-of-experts feed-forward network."""

    def __init__(
        self,
        config: V3MoEConfig,
        tp: TensorParallel,
        ep: ExpertParallel | None,
        nodes: NodeGroups | None,
        replicas: Group | None,
        attend: Attend,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, (config.num_heads, config.num_kv_heads, config.head_size)
        self.attention_norm = RMSNorm(hidden, config.eps, tp, dtype=dtype)
        self.attention = GroupedQueryAttention(hidden, *heads, tp, replicas, config.rope_base, False, attend, dtype)
        self.mlp_norm = RMSNorm(hidden, config.eps, tp, dtype=dtype)
        self.mlp = SwiGLU(hidden, config.ffn_size, tp, dtype) if ep is None else _experts(config, tp, ep, nodes, dtype)

    def forward(
        self, x: Tensor, positions: Tensor | None = None, num_sequences: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return `y_BSD` of `x_BSD`, and the balance loss per sequence; None in a dense layer."""
        x = x + self.attention(self.attention_norm(x), positions)
        normal = self.mlp_norm(x)
        if not isinstance(self.mlp, DeepSeekMoE):
            return x + self.mlp(normal), None
        y, routing = self.mlp.with_routing(normal)
        return x + y, sequence_loss(routing.logits, routing.indices, x.shape[1], num_sequences)


class V3MoE(nn.Module):
    """A V3-style model sharded over the ranks of a topology.

    Args:
        config: sizes of the full model.
        topology: the ranks, or a `Mesh` that other parts use too.  Experts are sharded along `ep`, which is an axis or,
            with `edp=`, a slice of the data axes; all other layers are sharded along `tp` and replicated elsewhere.
        seed: of the weights.
        recompute: keep only the input of each layer, and rerun its forward in the backward.
        attend: the attention function of queries, keys and values (default: as in `Llama`).
        dtype: of the weights.
        layout: which positions of a sequence each rank of `cp` holds; needed where it has more than one.
        num_nodes: of the ranks of `ep`; with more than one, each token is sent to a node at most once.
        device: as in `Llama`.

    Attributes:
        ep: the ranks over which the experts are sharded.
        data: the ranks with the same weights and other tokens.

    Raises:
        ValueError: as `check_topology`.
    """

    def __init__(
        self,
        config: V3MoEConfig,
        topology: Topology | Mesh,
        seed: int = 0,
        recompute: bool = False,
        attend: Attend | None = None,
        dtype: torch.dtype | None = None,
        layout: SequenceLayout | None = None,
        num_nodes: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mesh = topology if isinstance(topology, Mesh) else Mesh(topology)
        check_topology(config, mesh.topology, layout)
        self.config, self.mesh, self.layout, self.recompute = config, mesh, layout, recompute
        self.tp, self.ep, self.data = TensorParallel(mesh.group("tp")), _expert_parallel(mesh), _data_group(mesh)
        attend = attend or (
            causal_attention if layout is None else partial(ring_attention, layout=layout, group=mesh.group("cp"))
        )
        replicas = kv_replicas(config.num_kv_heads, self.tp)
        nodes = None if num_nodes == 1 else NodeGroups.of(num_nodes, self.ep)
        self.embedding = VocabParallelEmbedding(config.vocabulary_size, config.hidden_size, self.tp, dtype=dtype)
        experts = [None if index < config.num_dense_layers else self.ep for index in range(config.num_layers)]
        self.layers = nn.ModuleList(V3Layer(config, self.tp, ep, nodes, replicas, attend, dtype) for ep in experts)
        self.norm = RMSNorm(config.hidden_size, config.eps, self.tp, dtype=dtype)
        self.head = LMHead(config.hidden_size, config.vocabulary_size, self.tp, dtype=dtype)
        initialize_parameters(self, seed)
        self.to(context.device() if device is None else device)

    def forward(self, ids: Tensor, num_sequences: int | None = None) -> tuple[Tensor, Tensor]:
        """Return `logits_BSV` of `ids_BS`, and the balance losses per sequence of this rank, summed over the layers.

        Args:
            ids: the same on all ranks of a tp group; with a layout, this rank's shard of each sequence.
            num_sequences: of the step, over all ranks (default: those here).
        """
        positions = None if self.layout is None else positions_of(self.layout, self.mesh.rank("cp"), ids.device)
        x = self.embedding(ids)
        balance = x.new_zeros(())
        for layer in self.layers:
            again = self.recompute and torch.is_grad_enabled()
            inputs = x, positions, num_sequences
            x, loss = recompute(layer, *inputs) if again else layer(*inputs)
            balance = balance if loss is None else balance + loss
        return self.head(self.norm(x)), balance

    def loss(
        self, ids: Tensor, targets: Tensor, num_tokens: int | None = None, num_sequences: int | None = None
    ) -> Tensor:
        """Compute this rank's summand of the step's loss; the sum over microbatches and data ranks is the full loss.

        Args:
            ids: `ids_BS`, as in `forward`.
            targets: `targets_BS`; -100 is no target.
            num_tokens: valid targets of the step, over all ranks (default: those here).
            num_sequences: of the step, over all ranks (default: those here).
        """
        logits, balance = self(ids, num_sequences)
        return self.head.loss_of(logits, targets, num_tokens=num_tokens) + self.config.balance * balance

    def reduce_gradients(self) -> None:
        """Sum the gradients over ranks with other data, and those of experts over their replicas.

        Every rank calls this after the last backward of a step.
        """
        reduce_gradients(self, self.ep, 1, self.data)

    def gradient_norm(self) -> float:
        """Return the gradient norm of the full model, the same on every rank; call `reduce_gradients` first."""
        axes = norm_axes(self) | dict.fromkeys(expert_parameters(self), ("ep",))
        gradients = [(p.grad, where) for p, where in axes.items() if p.grad is not None and where is not None]
        return global_norm(gradients, {"tp": self.tp.group, "ep": self.ep.group})

    def update_biases(self, speed: float) -> list[Tensor]:
        """Update the selection biases of all routers, and return each router's loads over all ranks.

        Every rank calls this after the last backward of a step.
        """
        loads: list[Tensor] = update_biases(self, speed, self.data)
        return loads

    def full_state_dict(self, of: str = "parameter") -> dict[str, Tensor]:
        """Gather every parameter, or with "grad" every gradient, in full; every rank of the world calls this."""
        shards, found = shards_of(self), {}
        for name, parameter in self.named_parameters():
            tensor = parameter if of == "parameter" else parameter.grad
            if tensor is not None:
                group = self.ep.group if ".experts." in name else self.tp.group
                found[name] = full_tensor(tensor, shards.get(name), group)
        return found


def check_topology(config: V3MoEConfig, topology: Topology, layout: SequenceLayout | None = None) -> None:
    """Refuse a topology over which this model cannot be sharded; needs no rank.

    Raises:
        ValueError: an axis `pp`, a size that does not divide where it must, a layout that is missing along cp or for
            another number of ranks, a loss per sequence along cp, or `edp=` that leaves out an axis of data.
    """
    if topology.size("pp") > 1:
        raise ValueError(f"a V3MoE is sharded along ep, tp and cp and replicated along dp, got pp in {topology} ranks")
    cp_size = topology.size("cp")
    if cp_size != (1 if layout is None else layout.num_ranks):
        raise ValueError(f"{topology} ranks share a sequence along cp {cp_size}, got layout={layout}")
    if cp_size > 1 and config.balance:
        raise ValueError(f"a loss per sequence needs whole sequences, got {topology} ranks; use balance=0")
    left_out = [axis for axis in ("dp", "cp") if topology.size(axis) > 1 and axis not in topology.experts_over]
    if topology.edp and left_out:
        raise ValueError(f"edp counts all replicas, got {topology} ranks with experts_over={topology.experts_over}")
    config.check(topology.size("tp"), topology.size("ep"))


def _experts(
    config: V3MoEConfig, tp: TensorParallel, ep: ExpertParallel, nodes: NodeGroups | None, dtype: torch.dtype | None
) -> DeepSeekMoE:
    groups = config.num_groups, config.num_groups_per_token
    sizes = config.hidden_size, config.num_experts, config.num_experts_per_token
    router = DeepSeekRouter(*sizes, *groups, config.scale, dtype)
    shared = SwiGLU(config.hidden_size, config.shared_ffn_size, tp, dtype) if config.num_shared_experts else None
    return DeepSeekMoE(router, config.hidden_size, config.expert_ffn_size, ep, shared, dtype, nodes)


def _data_group(mesh: Mesh) -> Group:
    return mesh.group(*(axis for axis in ("dp", "ep", "cp") if axis in mesh.topology.names))


def _expert_parallel(mesh: Mesh) -> ExpertParallel:
    """The ranks over which the experts are sharded, and the ranks with replicas of the same experts."""
    if mesh.topology.edp:
        return ExpertParallel(mesh.group("ep"), mesh.group("edp"))
    return ExpertParallel(mesh.group("ep"), mesh.group(*(a for a in ("dp", "cp") if a in mesh.topology.names)))
