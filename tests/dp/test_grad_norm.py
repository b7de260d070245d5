"""The norm of the whole gradient over every kind of group, against one process."""

from math import inf, isnan, nan, sqrt

import pytest
import torch
from models import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.grad_norm import clip_factor, global_norm

ORDERS = [1.0, 2.0, 3.0, inf]


def test_mixed_sharding_equals_one_process():
    """pp 2 x dp 2 x tp 2: weights sharded over all three, norms replicated over tp, experts over ep inside of dp."""
    topology = lab.Topology([("pp", 2), ("dp", 2), ("tp", 2)], edp=1)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights, norms, experts = draw(2, 2, 2, 9), draw(2, 2, 5), draw(2, 2, 2, 3)  # [pp, tp, dp], [pp, dp], [pp, tp, ep]
    weights[0, 0, 1, 4:] = 0  # padding

    def fn(rank, world_size):
        mesh = lab.Mesh(topology)
        pp, tp, dp = (mesh.rank(axis) for axis in ("pp", "tp", "dp"))
        gradients = [
            (weights[pp, tp, dp, :4], {"pp", "tp", "dp"}),
            (weights[pp, tp, dp, 4:], {"pp", "tp", "dp"}),
            (norms[pp, dp], {"pp", "dp"}),
            (experts[pp, tp, mesh.rank("ep")], {"pp", "tp", "ep"}),
            (torch.zeros(0), {"dp"}),
        ]
        groups = {axis: mesh.group(axis) for axis in ("dp", "tp", "ep", "pp")}
        return [global_norm(gradients, groups, p) for p in ORDERS]

    whole = torch.cat([weights.flatten(), norms.flatten(), experts.flatten()])
    first, *others = launch(fn, 8)
    assert first == pytest.approx([float(whole.norm(p)) for p in ORDERS], rel=1e-12)
    assert all(found == first for found in others)  # the same bits: ranks must not clip differently


def test_a_stage_without_gradients_takes_part_and_low_precision_is_summed_widely():
    def fn(rank, world_size):
        own = [(torch.full((4,), 3.0), {"pp"})] if rank == 0 else []
        many = torch.ones(10_000, dtype=torch.bfloat16)
        return global_norm(own, {"pp": None}), global_norm([(many, {"shard"})], {"shard": None})

    assert launch(fn, 2) == [(6.0, sqrt(20_000))] * 2


def test_clipping_as_torch_does_it():
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0])
    factor = clip_factor(5.0, 1.0)
    nn.utils.clip_grad_norm_([parameter], 1.0)
    assert torch.allclose(parameter.grad, torch.tensor([3.0, 0.0, 4.0]) * factor, rtol=1e-7)
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(5.0, None) == 1.0
    assert isnan(clip_factor(nan, 1.0))
    assert clip_factor(inf, 1.0) == 0.0
    with pytest.raises(ValueError, match="max_norm > 0, got 0"):
        clip_factor(1.0, 0)


def test_bad_orders_and_axes_are_refused():
    with pytest.raises(ValueError, match="a norm needs p > 0, got 0"):
        global_norm([], {}, 0)
    with pytest.raises(ValueError, match=r"sharded over \['tp'\], and groups are given for \[\]"):
        global_norm([(torch.ones(1), {"tp"})], {})
    assert global_norm([(torch.full((4,), 2.0), ())], {}) == 4.0
