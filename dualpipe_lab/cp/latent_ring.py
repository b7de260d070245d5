"""`latent_ring_attention`: latents travel round the ring; each rank unfolds keys and values of a block that arrives.

Chapter: book/tp/latent-attention.  In: this rank's queries and latents, the weight that unfolds.  Out: its output.
The hops are those of `ring_attention`.  A position of a block is r_kv + d_position numbers instead of
2 a max(d_content + d_position, d_value), for a heads on this rank.  The price: every block that a rank attends to is
unfolded there, in both directions, where `ring_attention` unfolds the rank's own block once.
dW stays: it has this rank's queries and all latents, where the dW of `ring_attention` has all queries and this rank's
latents.  Both are summands of the same sum over the ranks.
Elsewhere: Megatron and Transformer Engine send keys and values.
Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1; Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), algorithm 1.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from dualpipe_lab.comm.call import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.flash_attention import FlashTiles, Kernel
from dualpipe_lab.cp.layouts import BlockMask, SequenceLayout
from dualpipe_lab.cp.ring import Ring, recv_buffer
from dualpipe_lab.cp.ring_attention import BlockAttention, empty_result, merge, ring_attention
from dualpipe_lab.cp.sequence import check_local_shard
from dualpipe_lab.cp.softmax import accumulation_dtype
from dualpipe_lab.tp.latent_sizes import LatentSizes

Sends: TypeAlias = Literal["auto", "latents", "keys"]
SENDS: tuple[Sends, ...] = ("auto", "latents", "keys")


@dataclass(frozen=True)
class LatentRing:
    """Ring attention as the `attend` of a layer; of latent attention it sends latents where they are shorter.

    Args:
        layout: which positions each rank holds.
        group: the ranks of the ring.
        sends: what travels for latent attention: `latents`, `keys` (and values), or `auto`, the one with fewer numbers
            per position.
        kernel: attention of one block to another (default: `FlashTiles()`).

    Raises:
        ValueError: another word for `sends`.
    """

    layout: SequenceLayout
    group: Group | None = None
    sends: Sends = "auto"
    kernel: Kernel | None = None

    def __post_init__(self) -> None:
        if self.sends not in SENDS:
            raise ValueError(f"what travels round the ring is one of {', '.join(SENDS)}, got {self.sends!r}")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return `out_BHSD` of queries, keys and values; they travel."""
        return ring_attention(q, k, v, self.layout, group=self.group, kernel=self.kernel)

    def takes_latents(self, sizes: LatentSizes, num_heads: int) -> bool:
        """Return whether the ring sends latents instead of keys and values, for a layer with so many local heads."""
        return self.sends == "latents" or (self.sends == "auto" and sends_latents(sizes, num_heads))

    def of_latents(self, q: Tensor, latents: Tensor, unfold: Tensor, sizes: LatentSizes) -> Tensor:
        """Return the attention of latents that travel round the ring; causal."""
        return latent_ring_attention(q, latents, unfold, sizes, self.layout, group=self.group, kernel=self.kernel)


def sends_latents(sizes: LatentSizes, num_heads: int) -> bool:
    """Return whether the latents of a token are fewer numbers than the keys and values of `num_heads` heads.

    >>> [sends_latents(LatentSizes(), heads) for heads in (1, 2, 128)]
    [False, True, True]
    """
    return sizes.is_shorter(num_heads)


def latent_ring_attention(
    q: Tensor,
    latents: Tensor,
    unfold: Tensor,
    sizes: LatentSizes,
    layout: SequenceLayout,
    causal: bool = True,
    scale: float | None = None,
    group: Group | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys that the latents of all ranks unfold to.  Returns `out_BHSV`.

    Args:
        q: `q_BHSK`, this rank's positions of the layout; K: content, then rotated position.
        latents: `c_BSC`, of the same positions: the latent after its norm, then the rotated key position.
        unfold: `W_OR`: for each head of this rank the rows of its content, then those of its values; R: the latent.
        sizes: K, C, R, and V, the features of a value.
        layout: which positions each rank holds; the same on every rank.
        causal: a query sees the keys of its position and of earlier ones, else of all.
        scale: of the scores (default: K ** -0.5).
        group: the ranks of the ring, in its order.
        kernel: attention of one block to another (default: `FlashTiles()`).

    Raises:
        ValueError: shapes that do not fit together, a shard whose length is not what the layout gives this rank, or a
            layout for another number of ranks.
    """
    _check_shapes(q, latents, unfold, sizes)
    ring = Ring(group)
    check_local_shard(q, layout, ring, 2)
    check_local_shard(latents, layout, ring, 1)
    block = BlockAttention(ring, layout, causal, sizes.key**-0.5 if scale is None else scale, kernel or FlashTiles())
    out: Tensor = _LatentRing.apply(q, latents, unfold, block, _Unfolding(sizes))
    return out


class _LatentRing(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, q: Tensor, latents: Tensor, unfold: Tensor, block: BlockAttention, unfolding: "_Unfolding"
    ) -> Tensor:
        ring, wide_q, c = block.ring, unfolding.fill(q), latents.contiguous().clone()
        out, lse = empty_result(wide_q)
        sent = c.new_empty(0)
        for step in range(ring.size):  # the loop of `ring_attention`, with a shorter block
            source = ring.source(step)
            if step + 1 < ring.size:
                following = recv_buffer(_shape(latents, block, ring.source(step + 1)), sent)
                pending = ring.send_recv(c, following, f"C {source}")
            if (mask := block.mask(source)) is not None:
                rows = mask.queries
                kv = unfolding.forward(c[:, mask.keys], unfold)
                merge(out[:, :, rows], lse[:, :, rows], *block.forward(wide_q, kv, _all_keys(mask)))
            if step + 1 < ring.size:
                sent, c = c, pending.wait()
        out = out[..., : unfolding.sizes.value].to(q.dtype)
        context.block, context.unfolding = block, unfolding
        context.save_for_backward(q, latents, unfold, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, latents, unfold, out, lse = context.saved_tensors
        block: BlockAttention = context.block
        unfolding: _Unfolding = context.unfolding
        ring, c = block.ring, latents.contiguous().clone()
        wide_grad, wide_q, wide_out = (unfolding.fill(x) for x in (grad, q, out))
        dq, dc, dw = (x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in (wide_q, c, unfold))
        sent, dc_sent = c.new_empty(0), dc.new_empty(0)
        dc_pending: Pending[Tensor] | None = None
        for step in range(ring.size):  # the forward's loop, and dC one step behind C
            source = ring.source(step)
            if step + 1 < ring.size:
                following = recv_buffer(_shape(latents, block, ring.source(step + 1)), sent)
                pending = ring.send_recv(c, following, f"C {source}")
            term: Tensor | None = None
            if (mask := block.mask(source)) is not None:
                seen = c[:, mask.keys]
                kv = unfolding.forward(seen, unfold)  # again, so that no block's keys and values are kept
                dq_term, *dkv = block.backward(wide_grad, wide_q, kv, wide_out, lse, _all_keys(mask))
                dq[:, :, mask.queries] += dq_term
                term, dw_term = unfolding.backward(dkv, seen, unfold)
                dw += dw_term
            if dc_pending is not None:
                dc_sent, dc = dc, dc_pending.wait()  # the sum over the ranks upstream
            if mask is not None and term is not None:
                dc[:, mask.keys] += term
            if ring.size > 1:
                following = recv_buffer(_shape(latents, block, ring.source(step + 1)), dc_sent)
                dc_pending = ring.send_recv(dc, following, f"dC {source}")
            if step + 1 < ring.size:
                sent, c = c, pending.wait()
        if dc_pending is not None:
            dc = dc_pending.wait()  # the last hop, home
        return dq[..., : q.shape[-1]].to(q.dtype), dc.to(latents.dtype), dw.to(unfold.dtype), None, None


@dataclass(frozen=True)
class _Unfolding:
    """From latents to keys and values of one width, which kernels ask for, and back."""

    sizes: LatentSizes

    def fill(self, x: Tensor) -> Tensor:
        """Fill the features up with zeros to the size of keys, or of values where these have more."""
        return pad(x, (0, max(self.sizes.key, self.sizes.value) - x.shape[-1]))

    def forward(self, c: Tensor, unfold: Tensor) -> Tensor:
        """Return `kv_2BHSD` of latents `c_BSC`: [k_content, v] = W c,  k = [k_content, k_position]."""
        latent, position = c.split([self.sizes.kv_rank, self.sizes.position], -1)
        heads = linear(latent, unfold).unflatten(-1, (-1, self.sizes.content + self.sizes.value)).transpose(1, 2)
        content, v = heads.split([self.sizes.content, self.sizes.value], -1)
        k = torch.cat((content, position.unsqueeze(1).expand(-1, content.shape[1], -1, -1)), -1)
        return torch.stack((self.fill(k), self.fill(v)))

    def backward(self, dkv: list[Tensor], c: Tensor, unfold: Tensor) -> tuple[Tensor, Tensor]:
        """Return dC `dc_BSC` and dW of the gradients of keys and values, each `_BHSD`.

        dc = W^T [dk_content, dv],  dk_position is summed over the heads,  dW = [dk_content, dv]^T c.
        """
        dk, dv = dkv
        content, rank = self.sizes.content, self.sizes.kv_rank
        dheads = torch.cat((dk[..., :content], dv[..., : self.sizes.value]), -1).transpose(1, 2).flatten(2).to(c.dtype)
        dposition = dk[..., content : self.sizes.key].sum(1)
        dc = torch.cat(((dheads @ unfold).to(dposition.dtype), dposition), -1)
        return dc, dheads.flatten(0, 1).T @ c[..., :rank].flatten(0, 1)


def _shape(latents: Tensor, block: BlockAttention, source: int) -> tuple[int, ...]:
    """The shape `c_BSC` of the block of rank `source`; the lengths of blocks may differ."""
    return latents.shape[0], block.layout.size(source), latents.shape[2]


def _all_keys(mask: BlockMask) -> BlockMask:
    """The mask on the keys that it shows, and on these alone."""
    return mask._replace(keys=slice(0, mask.keys.stop - mask.keys.start))


def _check_shapes(q: Tensor, latents: Tensor, unfold: Tensor, sizes: LatentSizes) -> None:
    sizes.check()
    shapes = [tuple(tensor.shape) for tensor in (q, latents, unfold)]
    fits = [len(shape) for shape in shapes] == [4, 3, 2] and q.shape[0] == latents.shape[0]
    if not fits or (q.shape[3], latents.shape[2], unfold.shape[1]) != (sizes.key, sizes.cached, sizes.kv_rank):
        raise ValueError(
            f"with {sizes}, queries are (batch, heads, positions, {sizes.key}), latents (batch, positions, "
            f"{sizes.cached}) and the weight that unfolds (rows, {sizes.kv_rank}), got {shapes}"
        )
    rows = q.shape[1] * (sizes.content + sizes.value)
    if len(unfold) != rows:
        raise ValueError(
            f"{q.shape[1]} heads x ({sizes.content} + {sizes.value}) features of content and value take {rows} rows of "
            f"the weight that unfolds, got {len(unfold)}; give it the heads of the queries"
        )
