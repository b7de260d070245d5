"""All-gather attention: every rank gathers all keys and values first; their gradients are reduce-scattered at the end.

Chapter: book/cp/ring-attention.  In: this rank's queries, keys and values, a layout, c ranks.  Out: its output.
  forward sends  (c - 1) / c * S_kv        the same as the ring form
  backward       (c - 1) / c * S_dkv       the ring form: S_kv (c - 1) / c + S_dkv
  holds          S_kv, until the backward has ended
It holds c times the memory of a block and overlaps no message with work, but needs no exchange between two steps of
work.  It suits few KV heads, and masks that are not known block by block.
Elsewhere: torch `set_rotate_method("allgather")`.
Source: Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.flash_attention import Kernel
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.ring import ring_all_gather, ring_reduce_scatter
from dualpipe_lab.cp.ring_attention import BlockAttention, add_gradients, empty_result, merge
from dualpipe_lab.cp.softmax import accumulation_dtype


def all_gather_attention(
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
    """Attend to the keys of all ranks, which are gathered first and kept; arguments and errors as in `ring_attention`.

    The result has the bits of `ring_attention`, because blocks are merged in the same order.
    """
    block = BlockAttention.of_call(q, k, v, layout, causal, scale, group, kernel)
    out: Tensor = _AllGatherAttention.apply(q, k, v, block)
    return out


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, block: BlockAttention) -> Tensor:
        ring, kv, (out, lse) = block.ring, torch.stack((k, v)), empty_result(q, block.value_size)
        blocks = [
            kv if ring.position == source else kv.new_empty(block.shape(kv, source)) for source in range(ring.size)
        ]
        ring_all_gather(blocks, ring, ring.position)
        for source in map(ring.source, range(ring.size)):  # in the order in which the ring would bring them
            if (mask := block.mask(source)) is not None:
                rows = mask.queries
                merge(out[:, :, rows], lse[:, :, rows], *block.forward(q, blocks[source], (), mask))
        context.block, out = block, out.to(q.dtype)
        context.save_for_backward(q, out, lse, *blocks)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *blocks = context.saved_tensors
        block: BlockAttention = context.block
        ring, dtype = block.ring, accumulation_dtype(q.dtype)
        dq, dblocks = q.new_zeros(q.shape, dtype=dtype), [torch.zeros_like(kv, dtype=dtype) for kv in blocks]
        for source in map(ring.source, range(ring.size)):
            if (mask := block.mask(source)) is not None:
                grads = block.backward(grad, q, blocks[source], (), out, lse, mask)
                add_gradients(dq, dblocks[source], (), mask, grads)
        ring_reduce_scatter(dblocks, ring, ring.position)
        return dq.to(q.dtype), *dblocks[ring.position].to(blocks[0].dtype), None
