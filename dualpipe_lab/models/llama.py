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

from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage import Sharing, TransformerStage, check_topology, make_norm
from dualpipe_lab.topology import Topology
from dualpipe_lab.tp.gqa import Attend, GroupedQueryAttention
from dualpipe_lab.tp.shard import TensorParallel
from dualpipe_lab.tp.swiglu import SwiGLU


class LlamaLayer(nn.Module):
    """One transformer layer: attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(
        self, config: LlamaConfig, tp: TensorParallel, replicas: Group | None, attend: Attend, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, tp, dtype)
        self.attention = grouped_attention(config, tp, replicas, attend, dtype)
        self.mlp_norm = make_norm(config, tp, dtype)
        self.mlp = SwiGLU(config.hidden_size, config.ffn_size, tp=tp, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return x_BSD of x_BSD; S: all tokens, or under sequence parallelism the rank's."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class LlamaStage(TransformerStage):
    """Some layers of a Llama; the first stage takes ids_BS, the last one returns logits_BSV."""

    def __init__(
        self, config: LlamaConfig, sharing: Sharing, layers: range, is_first: bool = True, is_last: bool = True
    ) -> None:
        how = sharing.tp, sharing.replicas, sharing.attend, sharing.dtype
        super().__init__(config, sharing, layers, lambda number: LlamaLayer(config, *how), is_first, is_last)
        self.config = config

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the output of this stage, x_BSD or logits_BSV, of ids_BS or x_BSD.

        `x`: the same on all ranks of a tp group, but for x_BSD under sequence parallelism; with a layout, this rank's
        shard of each sequence.  `positions_S`: of the tokens (default: 0, 1, 2 ..., or those of the layout).
        """
        positions = self.positions(x.device) if positions is None else positions
        x = self.enter(x)
        for layer in self.layers:
            x = self.run(layer, x, positions)
        return self.leave(x)


class Llama(LlamaStage):
    """A Llama sharded over the ranks of a topology: the stage that has all layers.

    Args:
        config: sizes of the full model.
        topology: the ranks, or a `Mesh` that other parts use too; layers are sharded along `tp` and replicated along
            `dp` and `cp`.
        sequence_parallel, regather, overlap, coalesce: as in `TensorParallel`.
        seed: of the weights.
        attend: the attention function of queries, keys and values (default: `causal_attention`, or along cp
            `LatentRing`, ring attention).
        dtype: of the weights.
        layout: which positions of a sequence each rank of `cp` holds; needed where it has more than one.
        loss_chunk: tokens whose logits exist at the same time in the loss (default: all).  The model then returns the
            head's input instead of logits; `logits_of` computes them.

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
        loss_chunk: int | None = None,
    ) -> None:
        mesh = topology if isinstance(topology, Mesh) else Mesh(topology)
        check_topology(config, mesh.topology, layout)
        tp = TensorParallel(mesh.group("tp"), sequence_parallel, regather, overlap, coalesce)
        sharing = Sharing(config, mesh, tp, attend, layout, dtype=dtype, loss_chunk=loss_chunk)
        super().__init__(config, sharing, range(config.num_layers))
        self.draw(seed)

    def loss(self, ids: Tensor, targets: Tensor, positions: Tensor | None = None, **options: Any) -> Tensor:
        """Compute the loss of targets_BS, the same on all ranks of a tp group; `options` as in `cross_entropy`."""
        return self.loss_of(self(ids, positions), targets, **options)


def grouped_attention(
    config: LlamaConfig, tp: TensorParallel, replicas: Group | None, attend: Attend, dtype: torch.dtype | None
) -> GroupedQueryAttention:
    """Make the attention of a layer with a Llama's sizes."""
    sizes = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size
    return GroupedQueryAttention(
        *sizes,
        tp=tp,
        replicas=replicas,
        rope_base=config.rope_base,
        qk_norm=config.qk_norm,
        attend=attend,
        dtype=dtype,
        rope_scaling=config.rope_scaling,
        eps=config.eps,
    )
