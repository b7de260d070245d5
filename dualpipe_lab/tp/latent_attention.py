"""`LatentAttention`: queries, keys and values are unfolded from short vectors; heads are sharded over the ranks (MLA).

Chapter: book/tp/latent-attention.  In: `x_..SD`.  Out: `y_..SD`.
A cache needs r_kv + d_position numbers per token, whatever the number of heads.  A rank sums T h numbers forward, the
output, and T (r_q + r_kv + d_position) backward; under sequence parallelism it gathers as many, where grouped-query
attention gathers the T h of x.
Elsewhere: DeepSeek-V3 `MLA`; Megatron `MLASelfAttention`; torchtitan's DeepSeek-V3 `Attention`.
Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1; DeepSeek-V3 (arXiv 2412.19437), section 2.1.1.
"""

from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.launch.context import device
from dualpipe_lab.tp.closed_forms import check_heads
from dualpipe_lab.tp.gqa import Attend, causal_attention
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear
from dualpipe_lab.tp.mappings import copy_to_ranks, gather_tokens
from dualpipe_lab.tp.rms_norm import RMSNorm, Sharded
from dualpipe_lab.tp.rope import apply_rope, rope_cos_sin
from dualpipe_lab.tp.rope_scaling import Scaling
from dualpipe_lab.tp.shard import TensorParallel, ranks_of


@runtime_checkable
class AttendLatents(Protocol):
    """An attention function that can take latents and unfold them itself, as `LatentRing` of part cp."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return `o_BHSD` of queries, keys and values."""

    def takes_latents(self, sizes: LatentSizes, num_heads: int) -> bool:
        """Return whether the attention is given latents, for so many local heads."""

    def of_latents(self, q: Tensor, latents: Tensor, unfold: Tensor, sizes: LatentSizes) -> Tensor:
        """Return `o_BHSV` of `q_BHSK`, `c_BSC` (latent, rotated key position) and the weight that unfolds."""


class LatentAttention(nn.Module):
    """Multi-head attention whose keys and values are unfolded from a short latent.

    The latents are c_q = norm(x W_qd^T) and c_kv = norm(first part of x W_kvd^T).  A head has q = [content, rotated
    position] from c_q, and k = [content, rotated position] with content and v from c_kv.  The position of k is the rest
    of x W_kvd^T, one for all heads: angles stay out of what is unfolded (decoupled).  W_qd, W_kvd and their norms are
    on every rank; the rows of W_qu and W_kvu and the columns of W_o are sharded by heads.

    Args:
        hidden_size: of the full layer.
        num_heads: of the full layer; divides among the ranks.
        sizes: of latents and heads.
        tp: the ranks (default: the world).
        rope_base, rope_scaling: of the rotary angles.
        attend: as in `GroupedQueryAttention`; all but the default one get values that are padded to the size of keys,
            or latents, if they take them (`AttendLatents`).
        dtype: of the weights.
        eps: of the two norms.

    Raises:
        ValueError: sizes that do not fit, or heads that do not divide among the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentSizes,
        *,
        tp: TensorParallel | None = None,
        rope_base: float = 10_000.0,
        rope_scaling: Scaling | None = None,
        attend: Attend = causal_attention,
        dtype: torch.dtype | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        sizes.check()
        self.tp = tp = ranks_of(tp)
        check_heads(hidden_size, num_heads, num_heads, tp.size, sizes.key)
        _check_values(sizes, attend, num_heads // tp.size)
        self.sizes, self.attend, self.rope_base, self.rope_scaling = sizes, attend, rope_base, rope_scaling
        queries, unfolded = num_heads * sizes.key, num_heads * (sizes.content + sizes.value)
        norm: Sharded = "tokens" if tp.sequence_parallel else "none"
        self.q_down = self.q_norm = None
        if sizes.query_rank is not None:
            self.q_down = ReplicatedLinear(hidden_size, sizes.query_rank, tp, dtype)
            self.q_norm = RMSNorm(sizes.query_rank, eps, tp=tp, sharded=norm, dtype=dtype)
        self.q_up = ColumnParallelLinear(sizes.query_rank or hidden_size, queries, bias=False, tp=tp, dtype=dtype)
        self.kv_down = ReplicatedLinear(hidden_size, sizes.cached, tp, dtype)
        self.kv_norm = RMSNorm(sizes.kv_rank, eps, tp=tp, sharded=norm, dtype=dtype)
        self.kv_up = ColumnParallelLinear(sizes.kv_rank, unfolded, bias=False, tp=tp, dtype=dtype)
        self.o = RowParallelLinear(num_heads * sizes.value, hidden_size, bias=False, tp=tp, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return y_BSD of x_BSD; under sequence parallelism both hold the rank's tokens.

        `positions_S`: of all tokens in the sequence (default: 0, 1, 2 ...).
        """
        content, position = self.sizes.content, self.sizes.position
        latent, shared = self.kv_down(x).split([self.sizes.kv_rank, position], -1)
        short = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q_up(short).unflatten(-1, (-1, self.sizes.key)).transpose(1, 2)
        positions = torch.arange(q.shape[2], device=x.device) if positions is None else positions
        angles = rope_cos_sin(positions, position, self.rope_base, x.dtype, self.rope_scaling)
        q = torch.cat((q[..., :content], apply_rope(_halves(q[..., content:]), *angles)), -1)
        if self.rope_scaling is not None and self.rope_scaling.score_factor != 1:
            q = q * self.rope_scaling.score_factor  # here, because no function of attention takes a factor of scores
        turned = apply_rope(_halves(self._spread(shared).unsqueeze(1)), *angles)
        mixed = self._mixed(q, self.kv_norm(latent), turned)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def _mixed(self, q: Tensor, latent: Tensor, turned: Tensor) -> Tensor:
        """Return o_BHSV of queries, latents and the rotated key position that all heads share."""
        if _takes_latents(self.attend, self.sizes, q.shape[1]):
            latents = torch.cat((self._spread(latent), turned.squeeze(1)), -1)
            return self.attend.of_latents(q, latents, self.kv_up.weight, self.sizes)
        k, v = _heads(self.kv_up(latent), self.sizes.content, self.sizes.value)
        return self._attended(q, torch.cat((k, turned.expand(-1, k.shape[1], -1, -1)), -1), v)

    def _spread(self, x: Tensor) -> Tensor:
        """Return x of all tokens; its gradient is summed over the ranks, because the heads of all ranks use it."""
        return (gather_tokens if self.tp.sequence_parallel else copy_to_ranks)(x.contiguous(), self.tp.group)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return o_BHSV; ring attention and others take values of the size of keys alone, so zeros fill these up."""
        if self.attend is causal_attention:
            return causal_attention(q, k, v)
        return self.attend(q, k, pad(v, (0, k.shape[-1] - v.shape[-1])))[..., : v.shape[-1]]


class ReplicatedLinear(nn.Module):
    """y = x W^T with the same W on every rank; under sequence parallelism its gradient is summed over the tokens."""

    def __init__(self, in_features: int, out_features: int, tp: TensorParallel, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device()))
        self.tp = tp
        is_partial = tp.sequence_parallel and tp.coalesce
        self.partial: dict[str, Group | None] = {"weight": tp.group} if is_partial else {}

    def forward(self, x: Tensor) -> Tensor:
        """Return `y_..SO` of `x_..SD`."""
        sums = self.tp.sequence_parallel and not self.tp.coalesce
        return linear(x, copy_to_ranks(self.weight, self.tp.group) if sums else self.weight)


def _takes_latents(attend: Attend, sizes: LatentSizes, num_heads: int) -> TypeGuard[AttendLatents]:
    return isinstance(attend, AttendLatents) and attend.takes_latents(sizes, num_heads)


def _check_values(sizes: LatentSizes, attend: Attend, num_heads: int) -> None:
    """Refuse values that a function of queries, keys and values cannot take."""
    if attend is causal_attention or sizes.value <= sizes.key or _takes_latents(attend, sizes, num_heads):
        return
    raise ValueError(
        f"this attention takes values of the size of keys, and they cannot be padded from {sizes.value} to "
        f"{sizes.key} features; use value of at most content + position"
    )


def _heads(unfolded: Tensor, content: int, value: int) -> tuple[Tensor, Tensor]:
    """Return the content of keys and the values, each `_BHSK`, of both side by side for each head."""
    heads = unfolded.unflatten(-1, (-1, content + value)).transpose(1, 2)
    return heads[..., :content], heads[..., content:]


def _halves(x: Tensor) -> Tensor:
    """Put the first features of all pairs before the second ones.

    Pairs are neighbours, 0 and 1, as in DeepSeek's files; `apply_rope` wants i and i + d / 2.
    """
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)
