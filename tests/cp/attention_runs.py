"""Attention across ranks beside one process: inputs, parts, the whole again, and what was sent."""

import itertools

import torch
import torch.nn.functional as F
from cp_runs import draw
from runs import launch, sent

from dualpipe_lab.cp.all_gather_attention import all_gather_attention
from dualpipe_lab.cp.layouts import LAYOUTS, make_layout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import positions, shard_sequence

FORMS = {"ring": ring_attention, "all-gather": all_gather_attention}
HEADS = ((2, 2), (4, 2), (3, 1))
BATCH, SIZE = 2, 4


def inputs(length, heads, kv_heads, dtype=torch.float64):
    """q, k, v and the gradient of the output, of a whole sequence."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [draw(BATCH, count, length, SIZE, seed=seed).to(dtype) for seed, count in enumerate(counts)]


def reference(q, k, v, grad, causal):
    """Output and gradients of torch's attention on one process."""
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def run_part(form, layout, rank, tensors, causal, **options):
    """Output and gradients of this rank's part, and the bytes sent in forward and backward."""
    q, k, v, grad = (shard_sequence(tensor, layout, rank, 2) for tensor in tensors)
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, forward = sent(lambda: form(*leaves, layout, causal=causal, **options))
    grads, backward = sent(lambda: torch.autograd.grad(out, leaves, grad))
    return [out.detach(), *grads], (forward, backward)


def join(shards, layout, dim=2):
    """The whole of a tensor from the shards of all ranks."""
    held = torch.cat([positions(layout, rank) for rank in range(layout.num_ranks)])
    return torch.cat(shards, dim).index_select(dim, held.argsort())


def whole(parts, layout):
    """The whole of every tensor from the parts of all ranks."""
    return [join(shards, layout) for shards in zip(*parts, strict=True)]


def cases(num_ranks, lengths):
    """Every layout that can deal out a length, causal and not; the grouping of heads changes from case to case."""
    found = []
    for (i, name), (j, length), causal in itertools.product(enumerate(LAYOUTS), enumerate(lengths), (True, False)):
        if name != "zigzag" or length % (2 * num_ranks) == 0:
            found.append((make_layout(name, length, num_ranks), causal, *HEADS[(i + j + causal) % len(HEADS)]))
    return found


def run(num_ranks, chosen, dtype=torch.float64, **options):
    """All cases by all forms in one launch: the results of the ranks, and their bytes."""

    def fn(rank, world_size):
        return [
            run_part(form, layout, rank, inputs(layout.length, h, kv, dtype), causal, **options)
            for layout, causal, h, kv in chosen
            for form in FORMS.values()
        ]

    return list(zip(*launch(fn, num_ranks, timeout=400), strict=True))
