"""The all-gather form: every rank collects all keys and values first, and the gradients are summed at the end.

Chapter: book/cp/ring-attention.  In: this rank's part.  Out: all blocks; dQ, and this rank's dK with dV.
It holds c times the memory of a block and hides nothing, but takes one collective where a ring takes c - 1 messages
between steps of work: for few key heads, and masks that are not known per block, the better form.
Source: Grattafiori et al. 2024 (arXiv 2407.21783), section 3.3.2.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dualpipe_lab.cp.ring_all_reduce import ring_all_gather, ring_reduce_scatter
from dualpipe_lab.cp.ring_attention.plan import Plan, add_block, block_gradients
from dualpipe_lab.cp.softmax import accumulate_in


def gather(k: Tensor, v: Tensor, plan: Plan) -> list[Tensor]:
    """The blocks `kv_2BKSD` of all ranks, in the order of the ring."""
    own = plan.ring.position
    parts = [k.new_empty(plan.block_shape(k, source)) for source in range(plan.ring.size)]
    torch.stack((k, v), out=parts[own])
    ring_all_gather(parts, plan.ring, own)
    return parts


def blocks(parts: Sequence[Tensor], plan: Plan) -> Iterator[tuple[int, Tensor]]:
    """Each block once, in the order in which the ring would bring it."""
    for step in range(plan.ring.size):
        source = plan.ring.behind(step)
        yield source, parts[source]


def gradients(
    grad: Tensor, q: Tensor, parts: Sequence[Tensor], out: Tensor, lse: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return dQ `dq_BHSD` and this rank's own `dkv_2BKSD`, summed over the ranks."""
    wide = accumulate_in(q.dtype)
    dq, dparts = torch.zeros_like(q, dtype=wide), [torch.zeros_like(part, dtype=wide) for part in parts]
    for source, kv in blocks(parts, plan):
        view = plan.view(source)
        found = None if view is None else block_gradients(grad, q, kv, out, lse, view, plan)
        add_block(dq, dparts[source], view, found)
    ring_reduce_scatter(dparts, plan.ring, plan.ring.position)
    return dq, dparts[plan.ring.position]
