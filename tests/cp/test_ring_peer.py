"""Torch's own ring beside ours: the same numbers from the same kernel, in float64.  Its functions are private."""

import pytest
import torch
from attention_runs import inputs, run_part
from cp_runs import assert_close
from runs import launch

from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.cp.ring_attention import ring_attention
from dualpipe_lab.cp.sequence import shard_sequence
from dualpipe_lab.cp.torch_flash import TorchFlash

HEADS, LENGTH = 2, 16


def theirs(q, k, v, grad):
    """Output and gradients of torch's balanced ring."""
    import torch.distributed.tensor.experimental._context_parallel._attention as peer

    peer._cp_options.enable_load_balance, peer._cp_options.convert_to_f32 = True, False
    peer.set_rotate_method("alltoall")
    kernel, scale, group = TorchFlash(), q.shape[-1] ** -0.5, torch.distributed.group.WORLD

    def forward(q, k, v, is_causal=False, **_):
        return kernel.forward(q, k, v, 0 if is_causal else None, scale)

    def backward(query, key, value, out, logsumexp, is_causal, grad_out):
        return kernel.backward(grad_out, query, key, value, out, logsumexp, 0 if is_causal else None, scale)

    out, lse = peer._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)[:2]
    saved = (q, k, v, out, lse)
    return [
        out,
        *peer._templated_ring_attention_backward(group, 2, backward, grad, "grad_out", *saved, is_causal=True)[:3],
    ]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.every)])
def test_both_rings_find_the_same(num_ranks):
    layout = make_layout("zigzag", LENGTH, num_ranks)

    def fn(rank, world_size):
        tensors = inputs(LENGTH, HEADS, HEADS)
        ours, _ = run_part(ring_attention, layout, rank, tensors, True, kernel=TorchFlash())
        return ours, theirs(*(shard_sequence(tensor, layout, rank, 2) for tensor in tensors))

    for ours, other in launch(fn, num_ranks, timeout=400):
        for mine, expected in zip(ours, other, strict=True):
            assert_close(mine, expected)
