"""`GroupedQueryAttention`: heads are sharded over the ranks; a group's query heads stay with their KV head.

Chapter: book/tp/gqa.  In: `x_..SD`.  Out: `y_..SD`.
The messages of T * h * bytes each are the sum of y forward, and one sum of dx for q, k and v backward.
Elsewhere: Megatron `SelfAttention`; torch's plan {q, k, v: Colwise, o: Rowwise}, for t <= KV heads, and
`scaled_dot_product_attention(is_causal=True, enable_gqa=True)`.
Source: Ainslie et al. 2023 (arXiv 2305.13245), section 2; Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.comm.groups import Group, group_of, members
from dualpipe_lab.tp.closed_forms import check_heads
from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear, adapted, fused_column_linear
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.rope import apply_rope, rope_cos_sin
from dualpipe_lab.tp.rope_scaling import Scaling
from dualpipe_lab.tp.shard import Shard, TensorParallel, ranks_of


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention: o_BHSV of q_BHSK, k_BGSK and v_BGSV; G KV heads divide H query heads."""
    out: Tensor = CausalAttention.apply(q, k, v)
    return out


class CausalAttention(torch.autograd.Function):
    """Softmax attention; the query heads of a group are stacked, so that each KV head needs one matrix product.

    s = q k^T / sqrt(K),  p = softmax of s over the earlier tokens and the token itself,  o = p v;  dv = p^T do,
    dp = do v^T,  ds = p (dp - sum over keys of dp p),  dq = ds k / sqrt(K),  dk = ds^T q / sqrt(K).  Query head i uses
    KV head i // (H / G), so dk and dv are sums over the query heads of the group.  The backward recomputes p.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        grouped = _grouped(q, k)
        return (_weights(grouped, k) @ v).view(*q.shape[:-1], v.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        grouped, grad = _grouped(q, k), _grouped(grad, k)
        p = _weights(grouped, k)
        dv = p.transpose(-1, -2) @ grad
        dp = grad @ v.transpose(-1, -2)
        ds = p.mul_(dp - (dp * p).sum(-1, keepdim=True)).mul_(scale)
        return (ds @ k).view(q.shape), ds.transpose(-1, -2) @ grouped, dv


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Return q_BHSK as _BGRK: for every KV head, the tokens of its query heads stacked."""
    return q.reshape(*k.shape[:2], -1, q.shape[-1])


def _weights(grouped: Tensor, k: Tensor) -> Tensor:
    """Return p_BGRS, the softmax weight of each key for each query."""
    num_tokens = k.shape[2]
    scores = (grouped @ k.transpose(-1, -2)).mul_(k.shape[-1] ** -0.5)
    later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=k.device).triu(1)
    scores.view(*scores.shape[:2], -1, num_tokens, num_tokens).masked_fill_(later, -torch.inf)
    return torch.softmax(scores, -1)


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class GroupedQueryAttention(nn.Module):
    """Attention with fewer key and value heads than query heads, rotary positions, and no biases.

    Args:
        hidden_size: of the full layer.
        num_heads, num_kv_heads: of the full layer.
        head_size: of one head (default: hidden_size / num_heads).
        tp: the ranks (default: the world).
        replicas: the ranks that hold the same KV heads (default: a new group, made by `kv_replicas`).
        rope_base: of the rotary angles.
        qk_norm: normalise each head's queries and keys, with weights that all heads share.
        attend: the attention function of q_BHSK, k_BGSK, v_BGSK (default: `causal_attention`).
        dtype: of the weights.
        rope_scaling: of the rotary angles, for long sequences.
        eps: of the norms of queries and keys.

    Raises:
        ValueError: heads that do not divide as they must; the message says which.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int | None = None,
        *,
        tp: TensorParallel | None = None,
        replicas: Group | None = None,
        rope_base: float = 10_000.0,
        qk_norm: bool = False,
        attend: Attend = causal_attention,
        dtype: torch.dtype | None = None,
        rope_scaling: Scaling | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.tp = tp = ranks_of(tp)
        check_heads(hidden_size, num_heads, num_kv_heads, tp.size, head_size)
        self.head_size = head_size or hidden_size // num_heads
        self.rope_base, self.rope_scaling, self.attend = rope_base, rope_scaling, attend
        self.replicas = replicas or kv_replicas(num_kv_heads, tp)
        kv_size = num_kv_heads * self.head_size
        num_shards = min(tp.size, num_kv_heads)
        index, width = tp.rank * num_shards // tp.size, kv_size // num_shards
        is_replica = tp.rank * num_shards % tp.size >= num_shards
        shard = Shard(0, index * width, (index + 1) * width, kv_size, is_replica)
        self.q = ColumnParallelLinear(hidden_size, num_heads * self.head_size, bias=False, tp=tp, dtype=dtype)
        self.k = ColumnParallelLinear(hidden_size, kv_size, bias=False, tp=tp, shard=shard, dtype=dtype)
        self.v = ColumnParallelLinear(hidden_size, kv_size, bias=False, tp=tp, shard=shard, dtype=dtype)
        self.o = RowParallelLinear(num_heads * self.head_size, hidden_size, bias=False, tp=tp, dtype=dtype)
        self.partial: dict[str, Group] = {}
        if self.replicas is not None and tp.coalesce:
            self.partial = {"k.weight": self.replicas, "v.weight": self.replicas}
        norms = [
            RMSNorm(self.head_size, eps, tp=tp, sharded="tokens", dtype=dtype) if qk_norm else None for _ in range(2)
        ]
        self.q_norm, self.k_norm = norms  # a norm over one head treats heads as tokens: each rank holds other ones

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return y_BSD of x_BSD; under sequence parallelism both hold the rank's tokens.

        `positions_S`: of all tokens in the sequence (default: 0, 1, 2 ...).
        """
        replicas = None if self.tp.coalesce else self.replicas
        layers = self.q, self.k, self.v
        products = fused_column_linear(x, [one.weight for one in layers], self.tp, [None, replicas, replicas])
        products = adapted(x, products, layers)
        q, k, v = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in products)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        positions = torch.arange(q.shape[2], device=x.device) if positions is None else positions
        angles = rope_cos_sin(positions, self.head_size, self.rope_base, x.dtype, self.rope_scaling)
        mixed = self.attend(apply_rope(q, *angles), apply_rope(k, *angles), v)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def kv_replicas(num_kv_heads: int, tp: TensorParallel) -> Group | None:
    """Make the group of ranks that hold the same KV head; None if KV heads are not replicated.

    Where t ranks outnumber the KV heads, a head is on t / a_kv neighbouring ranks, with a shard of the group's query
    heads on each.  These ranks sum dW_k and dW_v, 2 (1 - a_kv / t) * 2 h d * bytes; for dx the usual sum is right.  All
    ranks of the tp group call this, in the same order as they make their other groups.
    """
    if tp.size <= num_kv_heads:
        return None
    num_ranks = tp.size // num_kv_heads
    first = tp.rank // num_ranks * num_ranks
    return group_of(members(tp.group)[first : first + num_ranks])
