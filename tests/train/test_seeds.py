"""Dropout masks: equal on ranks with copies of an activation, different everywhere else, repeated with the step."""

import torch
from torch.nn.functional import dropout

import dualpipe_lab as lab
from dualpipe_lab.topology import Topology
from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import TensorParallel
from dualpipe_lab.train.trainer import seed_of, seed_ranks

GRIDS = [Topology([("pp", 2), ("dp", 2), ("tp", 2)]), Topology([("dp", 2), ("ep", 2), ("cp", 2)])]


def mask(mesh, step):
    seed_ranks(7, mesh, step)
    return tuple(dropout(torch.ones(64)).tolist())


def norm_gradient(tp):
    """Of a norm behind dropout; all ranks of tp have a copy of it."""
    up, down = ColumnParallelLinear(8, 16, bias=True, tp=tp), RowParallelLinear(16, 8, bias=True, tp=tp)
    for index, parameter in enumerate([*up.parameters(), *down.parameters()]):
        parameter.data = torch.randn(*parameter.shape, generator=torch.Generator().manual_seed(index))
    norm, x = RMSNorm(8, tp=tp), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    (norm(dropout(down(up(x)))) ** 3).sum().backward()
    return norm.weight.grad.tolist()


def drawing(rank, world_size):
    torch.manual_seed(rank)
    meshes = [lab.Mesh(grid) for grid in GRIDS]
    masks = [[mask(mesh, step) for step in (0, 1)] for mesh in meshes]
    assert mask(meshes[0], 0) == masks[0][0]
    gradients = []
    for seed in (torch.manual_seed, lambda _: seed_ranks(0, meshes[0])):
        seed(rank)
        gradients.append(norm_gradient(TensorParallel(meshes[0].group("tp"))))
    return masks, gradients


def test_copies_drop_the_same_units_and_nobody_else_does():
    """With a seed per rank, the copies of a norm behind dropout get different gradients; with `seed_ranks` the same."""
    masks, gradients = zip(*lab.launch(drawing, 8, output="collect", timeout=120), strict=True)
    for number, grid in enumerate(GRIDS):
        assert len({drawn for found in masks for drawn in found[number]}) == 2 * 8 // grid.size("tp")
    for first, second in zip(range(0, 8, 2), range(1, 8, 2), strict=True):  # the ranks of a tp group
        assert masks[first][0] == masks[second][0]
        assert gradients[first][0] != gradients[second][0]
        assert gradients[first][1] == gradients[second][1]
    assert gradients[0][1] != gradients[2][1]  # other data, other units


def test_no_two_places_share_a_seed():
    grid = Topology([("pp", 4), ("dp", 4), ("cp", 2), ("tp", 4)])
    seeds = {
        seed_of(seed, grid.coordinates(rank), step) for seed in range(4) for step in range(4) for rank in range(128)
    }
    assert len(seeds) == 4 * 4 * 128
    assert seed_of(1, {"pp": 0, "dp": 2}) == seed_of(1, {"dp": 2})
    assert all(0 <= seed < 2**64 for seed in seeds)
