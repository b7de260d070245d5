"""A tiny Llama: its layers are sharded along tp by `dualpipe_lab.tp`, its sequences along cp.

Chapter: book/tp/block.  In: sizes, a `Topology`.  Out: this rank's shard of the model.
  x <- x + attention(norm(x));  x <- x + swiglu(norm(x));  logits = head(norm(x))
  messages per layer and microbatch   two sums forward, two backward, of T h numbers: `dualpipe_lab.tp.closed_forms`
Weights are drawn in full, by their names, and then sharded: every topology starts from the same numbers.  They are
replicated along dp and cp, so gradients are summed over `mesh.group("dp", "cp")`.  Along cp only attention
communicates, by `dualpipe_lab.cp.ring_attention`.  `dualpipe_lab.models.plain_llama` is the same model in plain torch,
with the same names.
Elsewhere: Megatron `GPTModel`; torchtitan's Llama with its parallelize plan.
Source: Touvron et al. 2023 (arXiv 2302.13971), section 2.2.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import positions as positions_of
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.topology import Topology
from dualpipe_lab.tp.attention import causal_attention
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.embedding import VocabParallelEmbedding
from dualpipe_lab.tp.gqa import Attend, GroupedQueryAttention, kv_replicas
from dualpipe_lab.tp.lm_head import LMHead
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import initialize_parameters
from dualpipe_lab.tp.swiglu import SwiGLU
from dualpipe_lab.world import context
from dualpipe_lab.world.mesh import Mesh


class LlamaLayer(nn.Module):
    """One transformer layer: attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(
        self, config: LlamaConfig, tp: TensorParallel, replicas: Group | None, attend: Attend, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.attention_norm = _norm(config, tp, dtype)
        self.attention = GroupedQueryAttention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            tp,
            replicas,
            config.rope_base,
            config.qk_norm,
            attend,
            dtype,
        )
        self.mlp_norm = _norm(config, tp, dtype)
        self.mlp = SwiGLU(config.hidden_size, config.ffn_size, tp, dtype)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x_BSD of x_BSD; S: all tokens, or under sequence parallelism the rank's."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """A Llama sharded over the ranks of a topology.

    Args:
        config: sizes of the full model.
        topology: the ranks, or a `Mesh` that other parts use too; layers are sharded along `tp` and replicated along
            `dp` and `cp`.
        sequence_parallel, regather, overlap, coalesce: as in `TensorParallel`.
        seed: of the weights.
        attend: the attention function of queries, keys and values (default: `causal_attention`, or along cp
            `ring_attention`).
        dtype: of the weights.
        layout: which positions of a sequence each rank of `cp` holds; needed where it has more than one.
        device: of the weights (default: that of the rank).  They are drawn on the CPU, so they are equal everywhere.

    Raises:
        ValueError: another axis has more than one rank, a size does not divide where it must, or the layout is missing
            or for another number of ranks.
    """

    def __init__(
        self,
        config: LlamaConfig,
        topology: Topology | Mesh,
        sequence_parallel: bool = False,
        regather: bool = True,
        overlap: bool = True,
        coalesce: bool = False,
        seed: int = 0,
        attend: Attend | None = None,
        dtype: torch.dtype | None = None,
        layout: SequenceLayout | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        mesh = topology if isinstance(topology, Mesh) else Mesh(topology)
        check_topology(config, mesh.topology, layout)
        self.config, self.mesh, self.layout = config, mesh, layout
        attend = attend or _attention(mesh, layout)
        self.tp = tp = TensorParallel(mesh.group("tp"), sequence_parallel, regather, overlap, coalesce)
        replicas = kv_replicas(config.num_kv_heads, tp)
        self.embedding = VocabParallelEmbedding(config.vocabulary_size, config.hidden_size, tp, dtype=dtype)
        layers = (LlamaLayer(config, tp, replicas, attend, dtype) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = _norm(config, tp, dtype)
        tied = self.embedding if config.tied else None
        self.head = LMHead(config.hidden_size, config.vocabulary_size, tp, tied, dtype)
        initialize_parameters(self, seed)
        self.to(context.device() if device is None else device)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits_BSV; V: this rank's shard of the vocabulary.

        Args:
            ids: `ids_BS`, the same on all ranks of a tp group; with a layout, this rank's shard of each sequence.
            positions: of the tokens, `positions_S` (default: 0, 1, 2 ..., or those of the layout).

        Raises:
            ValueError: an unknown token; under sequence parallelism a length that does not divide among the ranks.
        """
        if self.tp.sequence_parallel:
            self.config.check(self.tp.size, ids.shape[1])
        if positions is None and self.layout is not None:
            positions = positions_of(self.layout, self.mesh.rank("cp"), ids.device)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, ids: Tensor, targets: Tensor, positions: Tensor | None = None, **options: Any) -> Tensor:
        """Compute the loss of targets_BS, the same on all ranks of a tp group; `options` as in `cross_entropy`."""
        return self.head.loss_of(self(ids, positions), targets, **options)


def check_topology(config: LlamaConfig, topology: Topology, layout: SequenceLayout | None = None) -> None:
    """Refuse a topology over which this model cannot be sharded; needs no rank.

    Raises:
        ValueError: an axis besides tp, cp and dp, a size that does not divide where it must, or a layout that is
            missing along cp or made for another number of ranks.
    """
    others = [f"{name} {topology.size(name)}" for name in ("pp", "ep") if topology.size(name) > 1]
    if others:
        rule = "a Llama is sharded along tp and cp and replicated along dp"
        raise ValueError(f"{rule}, got {', '.join(others)} in {topology} ranks")
    cp_size = topology.size("cp")
    if cp_size != (1 if layout is None else layout.num_ranks):
        raise ValueError(
            f"{topology} ranks share a sequence along cp {cp_size}, got layout={layout}; "
            f"make_layout(name, length, num_ranks={cp_size})"
        )
    config.check(topology.size("tp"))


def _attention(mesh: Mesh, layout: SequenceLayout | None) -> Attend:
    return causal_attention if layout is None else partial(ring_attention, layout=layout, group=mesh.group("cp"))


def _norm(config: LlamaConfig, tp: TensorParallel, dtype: torch.dtype | None) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.eps, tp, "tokens" if tp.sequence_parallel else "none", dtype)
