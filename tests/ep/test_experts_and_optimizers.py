"""Experts are no copies: an optimizer over ranks with other experts is refused, one over a mesh sees all."""

from itertools import product
from math import isnan

import pytest
import torch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.data_parallel import broadcast_module
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.gshard import GShardMoE
from dualpipe_lab.ep.moe import Experts, MoE
from dualpipe_lab.ep.router import TopKRouter
from dualpipe_lab.tp.linear import ColumnParallelLinear

WIDTH, NUM_EXPERTS = 3, 4
REFUSING = (DDP, Zero1, Zero2, Zero3, broadcast_module)


def make(ep=None):
    layers = MoE(TopKRouter(WIDTH, NUM_EXPERTS, 2), Experts(WIDTH, WIDTH, NUM_EXPERTS, ep=ep))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layers).double()


def test_experts_and_parts_of_a_layer_are_not_overwritten():
    """All ranks say so, and no weight has changed."""

    def fn(rank, world_size):
        for refuse, make_module in product(REFUSING, (make, lambda: GShardMoE(WIDTH, WIDTH, NUM_EXPERTS, 8))):
            module = make_module()
            before = [parameter.clone() for parameter in module.parameters()]
            with pytest.raises(ValueError, match="is sharded over ranks") as caught:
                refuse(module)
            assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
            assert f"is sharded over ranks [0, 1], and ep of dp 2 = 2 ranks has [{rank}]" in str(caught.value)
            assert "or give an optimizer the Mesh that it is built on, in place of a group" in str(caught.value)
        with pytest.raises(ValueError, match=r"is sharded over ranks \[0, 1\], and tp of dp 2 = 2 ranks has"):
            DDP(nn.Sequential(ColumnParallelLinear(4, 4)))

    lab.launch(fn, 2, output="collect")


def test_a_gradient_that_is_no_number_on_one_rank_stops_the_step_on_all():
    """Also one of an expert that no other rank holds, and of GShard's experts."""

    def fn(rank, world_size):
        mesh, found = lab.Mesh(lab.Topology([("ep", 2)])), []
        for module in (make(), GShardMoE(WIDTH, WIDTH, NUM_EXPERTS, 8)):
            optimizer = DDP(module, mesh, lr=1e-2, eps=1e-3)
            before = full_weights(optimizer)
            for shard, grad in zip(optimizer.local_shards, optimizer.finished_gradients(), strict=True):
                if rank == 1 and "ep" in optimizer.spec.parameters[shard.bucket.parameters[0]].axes:
                    grad[0] = float("nan")
            report = optimizer.step(max_norm=1.0)
            same = all(torch.equal(value, before[name]) for name, value in full_weights(optimizer).items())
            found.append((report.stepped, isnan(report.norm), same))
        return found

    assert lab.launch(fn, 2, output="collect") == [[(False, True, True)] * 2] * 2
