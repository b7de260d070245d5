"""The same Llama in plain torch, for one process, and sharded over ranks by torch's own tensor parallelism.

Chapter: book/tp/block.  In: the config of `Llama`, or a state dict with the same names.  Out: a reference.
Autograd derives every backward here; `torch.distributed.tensor.parallel` sends the messages.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.nn import functional

from dualpipe_lab.dp.data_parallel import IGNORE_INDEX
from dualpipe_lab.launch import context
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.tp.rope import rope_cos_sin


class PlainAttention(nn.Module):
    """Grouped-query attention by torch's `scaled_dot_product_attention`."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.config = config
        inner, outer = config.num_heads * config.size_of_head, config.num_kv_heads * config.size_of_head
        self.q = nn.Linear(config.hidden_size, inner, False, dtype=dtype)
        self.k, self.v = (nn.Linear(config.hidden_size, outer, False, dtype=dtype) for _ in range(2))
        self.o = nn.Linear(inner, config.hidden_size, False, dtype=dtype)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.size_of_head, config.eps, dtype=dtype)
            self.k_norm = nn.RMSNorm(config.size_of_head, config.eps, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return y_BSD of x_BSD and positions_S."""
        parts = (layer(x).unflatten(-1, (-1, self.config.size_of_head)) for layer in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        angles = rope_cos_sin(
            positions, self.config.size_of_head, self.config.rope_base, x.dtype, self.config.rope_scaling
        )
        mixed = functional.scaled_dot_product_attention(
            plain_rope(q, *angles), plain_rope(k, *angles), v, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class PlainMlp(nn.Module):
    """A SwiGLU feed-forward network whose backward is autograd's."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.ffn_size, False, dtype=dtype)
        self.up = nn.Linear(config.hidden_size, config.ffn_size, False, dtype=dtype)
        self.down = nn.Linear(config.ffn_size, config.hidden_size, False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return `y_..D` of `x_..D`."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class PlainLlamaLayer(nn.Module):
    """One transformer layer: attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.eps, dtype=dtype)
        self.attention = PlainAttention(config, dtype)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.eps, dtype=dtype)
        self.mlp = PlainMlp(config, dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x_BSD of x_BSD and positions_S."""
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class PlainLlama(nn.Module):
    """The full Llama in one process, in plain torch; its parameters have the names of `Llama`'s.

    Args:
        config: sizes.
        dtype: of the weights.
        device: of the weights (default: that of the rank).  They are drawn on the CPU, so they are equal everywhere.
    """

    def __init__(
        self, config: LlamaConfig, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        config.check()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(PlainLlamaLayer(config, dtype) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.eps, dtype=dtype)
        self.head = nn.Linear(config.hidden_size, config.vocabulary_size, False, dtype=dtype)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.to(context.device() if device is None else device)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits_BSV of ids_BS."""
        positions = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, ids: Tensor, targets: Tensor, positions: Tensor | None = None, **options: Any) -> Tensor:
        """Compute the mean loss of targets_BS; `options` are those of torch's `cross_entropy`."""
        logits = self(ids, positions).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, **options)


def plain_rope(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate feature pairs by rotary angles, as `tp.apply_rope` does; the backward is autograd's."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def parallelize(model: PlainLlama, mesh: DeviceMesh, sequence_parallel: bool = False) -> PlainLlama:
    """Shard a plain model over a mesh by torch's tensor parallelism; compute its loss under torch's `loss_parallel`."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as peer

    outside = Shard(1) if sequence_parallel else Replicate()
    inside = Replicate()
    layer = {
        name: peer.ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    }
    layer |= {name: peer.RowwiseParallel(output_layouts=outside) for name in ("attention.o", "mlp.down")}
    ends = {
        "embedding": peer.RowwiseParallel(input_layouts=inside, output_layouts=outside),
        "head": peer.ColwiseParallel(input_layouts=outside, use_local_output=False),
    }
    if sequence_parallel:
        entry = {"input_layouts": (outside, None), "desired_input_layouts": (inside, None)}
        layer |= {"attention_norm": peer.SequenceParallel(), "mlp_norm": peer.SequenceParallel()}
        layer["attention"] = peer.PrepareModuleInput(**entry)
        layer["mlp"] = peer.PrepareModuleInput(input_layouts=outside, desired_input_layouts=inside)
        ends["norm"] = peer.SequenceParallel()
    for block in model.layers:
        peer.parallelize_module(block, mesh, layer)
    peer.parallelize_module(model, mesh, ends)
    return model
