"""What an optimizer refuses to take for the layout of a model; and a group in the place of a mesh."""

import pytest
import torch
from runs import launch
from torch import nn
from zero_runs import STAGES

import dualpipe_lab as lab
from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.dp.sums import copy_axes
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero2 import Zero2
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.ep.moe import Experts
from dualpipe_lab.pp import schedules
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import TensorParallel

HYPER = {"lr": 0.01, "eps": 0.1, "weight_decay": 0.1}


def refused(make):
    with pytest.raises(ValueError, match=r".+") as caught:
        make()
    return str(caught.value)


def test_what_cannot_be_right_is_refused():
    """On every rank alike, before anything is sent."""

    def fn(rank, world_size):
        mesh = lab.Mesh(lab.Topology([("dp", 2), ("ep", 2)]))
        piped = lab.Mesh(lab.Topology([("pp", 2), ("dp", 2)]))
        plain = nn.Linear(2, 2)
        experts = Experts(2, 2, 4)  # over the world, and the mesh has 2 ranks of ep
        norm = RMSNorm(4, tp=TensorParallel(coalesce=True), sharded="tokens")
        program = schedules.build("1f1b", 4, 4)
        looped = schedules.build("interleaved", 2, 4)
        tied = nn.Sequential(nn.Linear(2, 2))
        tied.stages, tied.tied = {0: tied[0]}, {0: "weight", 1: "weight"}
        return [
            refused(lambda: DDP(nn.Sequential(experts), mesh)),
            refused(lambda: DDP(nn.Sequential(norm), mesh)),
            refused(lambda: Zero1(plain, piped)),
            refused(lambda: Zero1(plain, piped, program=program)),
            refused(lambda: Zero1(plain, piped, program=looped)),
            refused(lambda: Zero2(plain, mesh, hybrid=True)),
            refused(lambda: DDP(tied)),
        ]

    for rank, found in enumerate(launch(fn, 4)):
        first = 2 * (rank // 2)
        rules = [
            f"(Experts) is sharded over ranks [0, 1, 2, 3], and ep of dp 2 x ep 2 = 4 ranks has [{first}, {first + 1}]",
            f"(RMSNorm) leaves gradients partial over ranks [0, 1, 2, 3], and tp of dp 2 x ep 2 = 4 ranks has [{rank}]",
            "pp 2 x dp 2 = 4 ranks have a pipeline, whose program says which ranks hold a stage; give program=",
            "program '1F1B' is for 4 ranks, pp 2 x dp 2 = 4 has pp 2",
            "and Linear does not say which is which; give it `stages`",
            "hybrid ZeRO shards within nodes, got dp 2 x ep 2 = 4 ranks; give the topology ranks_per_node=",
            "stages [0, 1] hold one weight, and stages [0] are here; give the optimizer the Mesh and the program",
        ]
        for text, rule in zip(found, rules, strict=True):
            assert rule in text


def test_copies_that_lie_unevenly_on_the_nodes_are_refused():
    """Three of four data ranks are on the first node."""

    def fn(rank, world_size):
        topology = lab.Topology([("dp", 3), ("tp", 2)], ranks_per_node=2 * 2 - 1)
        return refused(lambda: Zero1(nn.Linear(2, 2), lab.Mesh(topology), hybrid=True))

    for text in launch(fn, 6):
        assert "dp group [0, 2, 4] lies unevenly on nodes of 3 ranks: [(0, 2), (4,)]; shard over all copies" in text


def test_an_edp_that_leaves_out_ranks_with_other_data_is_refused_without_a_rank():
    with pytest.raises(ValueError, match=r"got dp 2 x cp 2 = 4 ranks with experts_over=\('dp',\); use experts_over="):
        copy_axes(lab.Topology([("dp", 2), ("cp", 2)], edp=2))


@pytest.mark.parametrize("sizes", [[("dp", 2)], [("tp", 2), ("dp", 2)]], ids=str)
def test_a_group_is_a_mesh_with_one_axis_to_the_bit(sizes):
    """Norms and weights after clipped steps; the group is the world, or one of two."""

    def fn(rank, world_size):
        mesh, found = lab.Mesh(lab.Topology(sizes)), {}
        for stage in STAGES:
            for over in (mesh, mesh.group("dp")):
                torch.manual_seed(mesh.rank("dp"))
                model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
                units = {"units": [model[0], model[2]]} if stage is Zero3 else {}
                optimizer, norms = stage(model, over, **units, **HYPER, bucket_bytes=200), []
                for number in range(3):
                    optimizer.zero_grad()
                    x = torch.full((2, 5), 1.0 + number + mesh.rank("dp"), dtype=torch.float64)
                    model(x).square().sum().backward()
                    norms.append(optimizer.step(max_norm=0.5).norm)
                found.setdefault(stage.__name__, []).append((norms, full_weights(optimizer)))
        return found

    for found in launch(fn, lab.Topology(sizes).world_size):
        for (norms, weights), (other_norms, other_weights) in found.values():
            assert norms == other_norms
            assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())
