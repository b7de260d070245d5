"""Ring attention: no rank holds the full sequence; keys and values travel round the ring while the ranks compute.

Chapter: book/cp/ring-attention.  In: this rank's queries, keys and values, a layout, c ranks.  Out: its output.
                 ring                                          all-gather of K, V (all_gather_attention.py)
  forward sends  (c - 1) / c * S_kv                            the same
  backward       (c - 1) / c * S_kv + S_dkv (one hop more)     (c - 1) / c * S_dkv
  holds          2 S_kv / c of other ranks, and O, LSE         S_kv
with S_kv bytes of all keys and values, and S_dkv of their gradients (fp32 for 16-bit inputs).
Elsewhere: ring-flash-attention; torch `_templated_ring_attention`; Megatron `AttnFuncWithCPAndKVP2P`.
Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), algorithm 1; Dao 2023 (arXiv 2307.08691), section 3.1, for the
merge, there of tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.comm.call import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.flash_attention import FlashTiles, Grads, Kernel, check_heads
from dualpipe_lab.cp.layouts import BlockMask, SequenceLayout
from dualpipe_lab.cp.ring import Ring, recv_buffer
from dualpipe_lab.cp.sequence import check_local_shard
from dualpipe_lab.cp.softmax import NEG_INF, accumulation_dtype, reference


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    *,
    causal: bool = True,
    scale: float | None = None,
    group: Group | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks; differentiable.  Returns `out_BHSD`.

    Args:
        q: `q_BHSD`, this rank's positions of the layout; B: batch, H: query heads, D: size of a head.
        k: `k_BKSD`; K: key and value heads, of which each serves H / K consecutive query heads.
        v: `v_BKSD`.
        layout: which positions each rank holds; the same on every rank.
        causal: a query sees the keys of its position and of earlier ones, else of all.
        scale: of the scores (default: D ** -0.5).
        group: the ranks of the ring, in its order.
        kernel: attention of one block to another (default: `FlashTiles()`).

    Raises:
        ValueError: shapes that do not fit together, a shard whose length is not what the layout gives this rank, or a
            layout for another number of ranks.
    """
    block = BlockAttention.of_call(q, k, v, layout, causal, scale, group, kernel)
    out: Tensor = RingAttention.apply(block, q, k, v)
    return out


class RingAttention(torch.autograd.Function):
    """Attention of `q_BHSD` to what the kernel of `block` takes: keys and values, which travel round the ring."""

    @staticmethod
    def forward(context: Any, block: "BlockAttention", q: Tensor, *operands: Tensor) -> Tensor:
        """Compute `out_BHSV`, V: features of a value."""
        ring, (out, lse) = block.ring, empty_result(q, block.value_size)
        # keys and values in one message per hop, so one latency
        kv, weights = torch.stack(operands[: block.num_travelling]), operands[block.num_travelling :]
        sent = kv.new_empty(0)
        for step in range(ring.size):  # Liu et al. 2023, algorithm 1
            source = ring.source(step)  # the rank whose keys and values are here
            if step + 1 < ring.size:
                following = recv_buffer(block.shape(kv, ring.source(step + 1)), sent)
                pending = ring.send_recv(kv, following, f"{block.name} {source}")
            if (mask := block.mask(source)) is not None:
                rows = mask.queries
                merge(out[:, :, rows], lse[:, :, rows], *block.forward(q, kv, weights, mask))
            if step + 1 < ring.size:
                sent, kv = kv, pending.wait()  # after the work: the message has this step to arrive
        context.block, out = block, out.to(q.dtype)
        context.save_for_backward(out, lse, q, *operands)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dQ and the gradients of the operands."""
        out, lse, q, *operands = context.saved_tensors
        block: BlockAttention = context.block
        ring, kv = block.ring, torch.stack(operands[: block.num_travelling])
        weights = operands[block.num_travelling :]
        dq, dkv, *dweights = (x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in (q, kv, *weights))
        sent, dkv_sent = kv.new_empty(0), dkv.new_empty(0)
        dkv_pending: Pending[Tensor] | None = None
        for step in range(ring.size):  # the forward's loop, and dKV one step behind KV
            source = ring.source(step)
            if step + 1 < ring.size:
                following = recv_buffer(block.shape(kv, ring.source(step + 1)), sent)
                pending = ring.send_recv(kv, following, f"{block.name} {source}")
            mask = block.mask(source)
            grads = None if mask is None else block.backward(grad, q, kv, weights, out, lse, mask)
            if dkv_pending is not None:
                dkv_sent, dkv = dkv, dkv_pending.wait()  # the sum over the ranks upstream
            if mask is not None and grads is not None:
                add_gradients(dq, dkv, dweights, mask, grads)
            if ring.size > 1:
                following = recv_buffer(block.shape(kv, ring.source(step + 1)), dkv_sent)
                dkv_pending = ring.send_recv(dkv, following, f"d{block.name} {source}")
            if step + 1 < ring.size:
                sent, kv = kv, pending.wait()
        if dkv_pending is not None:
            dkv = dkv_pending.wait()  # the last hop, home; no work can hide it
        return None, *(dx.to(x.dtype) for dx, x in zip((dq, *dkv, *dweights), (q, *operands), strict=True))


@dataclass(frozen=True)
class BlockAttention:
    """Attention of this rank's queries to the block of one rank: what all steps of one call have in common.

    Attributes:
        kernel: it takes queries and two operands: keys and values, which travel; or latents, and a weight that stays.
        value_size: features of an output.
        name: of what travels, in traces.
        num_travelling: the operands that travel, the first ones.
    """

    ring: Ring
    layout: SequenceLayout
    causal: bool
    scale: float
    kernel: Kernel
    value_size: int
    name: str = "KV"
    num_travelling: int = 2

    @classmethod
    def of_call(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: SequenceLayout,
        causal: bool,
        scale: float | None,
        group: Group | None,
        kernel: Kernel | None,
    ) -> "BlockAttention":
        """Check the arguments of `ring_attention` and fill in their defaults."""
        check_heads(q, k, v)
        ring = Ring(group)
        check_local_shard(q, layout, ring, 2)
        check_local_shard(k, layout, ring, 2)
        size = q.shape[-1]
        return cls(ring, layout, causal, size**-0.5 if scale is None else scale, kernel or FlashTiles(), size)

    def mask(self, source: int) -> BlockMask | None:
        """Return the mask of this rank's queries on the keys of rank `source`; None if no pair is visible."""
        return self.layout.mask(self.ring.position, source, self.causal)

    def shape(self, kv: Tensor, source: int) -> tuple[int, ...]:
        """Return the shape of the block of rank `source`, given another one's; the lengths of blocks may differ."""
        return *kv.shape[:3], self.layout.size(source), kv.shape[4]

    def forward(self, q: Tensor, kv: Tensor, weights: Sequence[Tensor], mask: BlockMask) -> tuple[Tensor, Tensor]:
        """Return output and LSE of the queries `mask.queries` over the keys of this block alone."""
        seen: tuple[Tensor, ...] = kv[:, :, :, mask.keys].unbind()
        k, v = *seen, *weights
        return self.kernel.forward(q[:, :, mask.queries], k, v, mask.offset, self.scale)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        kv: Tensor,
        weights: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        mask: BlockMask,
    ) -> Grads:
        """Return this block's term of dQ, and this rank's term of the gradients of the block's operands.

        `out` and `lse` must be the final values over all keys.  Then exp(S - LSE) is this block's slice of the full
        softmax, and rowsum(dO * O) is the full correction D of the softmax backward.
        """
        rows = slice(None), slice(None), mask.queries
        seen: tuple[Tensor, ...] = kv[:, :, :, mask.keys].unbind()
        k, v = *seen, *weights
        return self.kernel.backward(grad[rows], q[rows], k, v, out[rows], lse[rows], mask.offset, self.scale)


def empty_result(q: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
    """Return `out_BHSV` and `lse_BHS` of attention to no keys: zeros and -inf; V: `value_size`."""
    dtype = accumulation_dtype(q.dtype)
    return q.new_zeros(*q.shape[:3], value_size, dtype=dtype), q.new_full(q.shape[:3], NEG_INF, dtype=dtype)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Replace `out_BHSD` and `lse_BHS` by the result over both sets of keys.

    LSE = ln(e^LSE1 + e^LSE2),   O = O1 + e^(LSE2 - LSE) (O2 - O1).

    >>> out, lse = torch.zeros(1), torch.tensor(float("-inf"))
    >>> merge(out, lse, torch.tensor([5.0]), torch.tensor(1700.0))
    >>> out.item(), lse.item()
    (5.0, 1700.0)
    """
    total = torch.logaddexp(lse, block_lse)
    weight = torch.exp(block_lse - reference(total))  # 0, and not NaN, where neither side has seen a key
    out.lerp_(block_out.to(out.dtype), weight.to(out.dtype)[..., None])
    lse.copy_(total)


def add_gradients(dq: Tensor, dkv: Tensor, dweights: Sequence[Tensor], mask: BlockMask, grads: Grads) -> None:
    """Add what `BlockAttention.backward` returned to dQ `dq_BHSD`, to the block's `dkv_NBKSD` and to dW of the rest."""
    dq[:, :, mask.queries] += grads[0]
    for total, term in zip((*dkv[:, :, :, mask.keys], *dweights), grads[1:], strict=True):
        total.add_(term)
