"""Dropout masks: equal on ranks with copies of an activation, different everywhere else, repeated with the step."""

import torch
from torch.nn.functional import dropout

import dualpipe_lab as lab
from dualpipe_lab.topology import Topology
from dualpipe_lab.train.trainer import seed_of, seed_ranks

GRIDS = [Topology([("pp", 2), ("dp", 2), ("tp", 2)]), Topology([("dp", 2), ("ep", 2), ("cp", 2)])]


def mask(mesh, step):
    seed_ranks(7, mesh, step)
    return tuple(dropout(torch.ones(64)).tolist())


def drawing(rank, world_size):
    meshes = [lab.Mesh(grid) for grid in GRIDS]
    masks = [[mask(mesh, step) for step in (0, 1)] for mesh in meshes]
    assert mask(meshes[0], 0) == masks[0][0]
    return masks


def test_copies_drop_the_same_units_and_nobody_else_does():
    masks = lab.launch(drawing, 8, output="collect", timeout=120)
    for number, grid in enumerate(GRIDS):
        assert len({drawn for found in masks for drawn in found[number]}) == 2 * 8 // grid.size("tp")
    for first in range(0, 8, 2):  # the ranks of a tp group
        assert masks[first][0] == masks[first + 1][0]


def test_no_two_places_share_a_seed():
    grid = Topology([("pp", 4), ("dp", 4), ("cp", 2), ("tp", 4)])
    seeds = {
        seed_of(seed, grid.coordinates(rank), step) for seed in range(4) for step in range(4) for rank in range(128)
    }
    assert len(seeds) == 4 * 4 * 128
    assert seed_of(1, {"pp": 0, "dp": 2}) == seed_of(1, {"dp": 2})
    assert all(0 <= seed < 2**64 for seed in seeds)
