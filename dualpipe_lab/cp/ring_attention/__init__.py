"""Ring attention: no rank sees the whole sequence; keys and values travel round the ring while it computes.

Chapter: book/cp/ring-attention.  In: this rank's queries, keys and values, a layout, c ranks.  Out: its output.
                 ring                                          all-gather of K, V
  forward sends  (c - 1) / c * S_kv                            the same
  backward       (c - 1) / c * S_kv + S_dkv (one hop more)     (c - 1) / c * S_dkv
  holds          2 S_kv / c of others, and O, LSE              S_kv
with S_kv bytes of all keys and values, and S_dkv of their gradients (fp32 for 16-bit inputs).
The plan: at step i a rank has the block of the rank i before it; it passes the block on, computes with it while the
next one comes, and merges what it found by LSE.  In the backward the gradient of a block travels behind it, is added to
by every rank, and takes one hop more to come home.
Elsewhere: ring-flash-attention; torch `_templated_ring_attention`; Megatron `AttnFuncWithCPAndKVP2P`.
Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), algorithm 1; Grattafiori et al. 2024 (arXiv 2407.21783),
section 3.3.2, for the all-gather.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.flash_attention.heads import check_heads, default_scale
from dualpipe_lab.cp.flash_attention.kernel import FlashTiles, Kernel
from dualpipe_lab.cp.layouts import SequenceLayout
from dualpipe_lab.cp.ring import Ring
from dualpipe_lab.cp.ring_attention import gathered, travelling
from dualpipe_lab.cp.ring_attention.plan import Plan, RingLog, attend
from dualpipe_lab.cp.sequence import check_part

__all__ = ["RingLog", "all_gather_attention", "ring_attention"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    causal: bool = True,
    scale: float | None = None,
    group: Group | None = None,
    kernel: Kernel | None = None,
    log: RingLog | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks; differentiable.  Returns `out_BHSD`.

    Args:
        q: `q_BHSD`, this rank's positions of the layout; B: batch, H: query heads, D: size of a head.
        k: `k_BKSD`; K: key and value heads, of which each serves H / K query heads in a row.
        v: `v_BKSD`.
        layout: which positions each rank holds; the same on every rank.
        causal: a query sees the keys of its own and earlier positions, else of all.
        scale: of the scores (default: D ** -0.5).
        group: the ranks of the ring, in its order.
        kernel: attention of one block to another (default: `FlashTiles()`).
        log: filled with the blocks that travel.

    Raises:
        ValueError: shapes that do not fit together, a part of another length than the layout gives this rank, or a
            layout for another number of ranks.
    """
    plan = _plan(q, k, v, layout, causal, scale, group, kernel, log)
    out: Tensor = _RingAttention.apply(q, k, v, plan)
    return out


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    causal: bool = True,
    scale: float | None = None,
    group: Group | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """The same with all keys and values gathered first, and kept; arguments and errors as in `ring_attention`."""
    out: Tensor = _AllGatherAttention.apply(q, k, v, _plan(q, k, v, layout, causal, scale, group, kernel, None))
    return out


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    causal: bool,
    scale: float | None,
    group: Group | None,
    kernel: Kernel | None,
    log: RingLog | None,
) -> Plan:
    check_heads(q, k, v)
    ring = Ring(group)
    check_part(q, layout, ring, 2)
    check_part(k, layout, ring, 2)
    return Plan(ring, layout, causal, default_scale(q) if scale is None else scale, kernel or FlashTiles(), log)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        log = None if plan.log is None else plan.log.forward
        out, lse = attend(q, travelling.blocks(k, v, plan, log), plan)
        context.plan, out = plan, out.to(q.dtype)
        context.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = context.saved_tensors
        dq, dkv = travelling.gradients(grad, q, k, v, out, lse, context.plan)
        return dq.to(q.dtype), *dkv.to(k.dtype), None


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        parts = gathered.gather(k, v, plan)
        out, lse = attend(q, gathered.blocks(parts, plan), plan)
        context.plan, out = plan, out.to(q.dtype)
        context.save_for_backward(q, out, lse, *parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *parts = context.saved_tensors
        dq, dkv = gathered.gradients(grad, q, parts, out, lse, context.plan)
        return dq.to(q.dtype), *dkv.to(parts[0].dtype), None
