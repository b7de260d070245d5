"""The norm of the whole gradient over every kind of group, against one process."""

from math import inf, isnan, nan, sqrt

import pytest
import torch
from models import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.grad_norm import clip_factor, global_norm

ORDERS = [1.0, 2.0, 3.0, inf]


def test_sums_of_squares_and_not_of_norms():
    """Four 1s and four 2s: sqrt(4 + 16); the sum of the ranks' norms would be 6."""

    def fn(rank, world_size):
        grad = torch.full((4,), rank + 1.0)
        sharded = [global_norm([(grad, {"shard"})], {"shard": None}, p) for p in ORDERS]
        return sharded, global_norm([(grad, ())], {"shard": None})

    for sharded, replicated in launch(fn, 2):
        assert sharded == pytest.approx([12.0, sqrt(20), (4 + 32) ** (1 / 3), 2.0], rel=1e-12)
        assert replicated in (2.0, 4.0)  # this rank's own, counted once


@pytest.mark.parametrize("p", ORDERS)
def test_mixed_sharding_equals_one_process(p):
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
        return global_norm(gradients, groups, p)

    whole = torch.cat([weights.flatten(), norms.flatten(), experts.flatten()])
    out = launch(fn, 8)
    assert out == pytest.approx([float(whole.norm(p))] * 8, rel=1e-12)
    assert len(set(out)) == 1  # the same bits: ranks must not clip differently


def test_a_stage_without_gradients_takes_part():
    def fn(rank, world_size):
        own = [(torch.full((4,), 3.0), {"pp"})] if rank == 0 else []
        return global_norm(own, {"pp": None})

    assert launch(fn, 2) == [6.0, 6.0]


def test_one_bad_number_spreads_and_low_precision_is_summed_widely():
    def fn(rank, world_size):
        bad = torch.tensor([1.0, inf if rank else 0.0])
        many = torch.ones(10_000, dtype=torch.bfloat16)
        return global_norm([(bad, {"shard"})], {"shard": None}), global_norm([(many, {"shard"})], {"shard": None})

    assert launch(fn, 2) == [(inf, sqrt(20_000))] * 2


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
