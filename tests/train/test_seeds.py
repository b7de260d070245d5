"""Masks are equal on ranks with copies of an activation, different everywhere else, and the same when drawn again."""

import torch
from torch.nn.functional import dropout

import dualpipe_lab as lab
from dualpipe_lab.pp.runtime import recompute
from dualpipe_lab.topology import Topology
from dualpipe_lab.tp.linear import ColumnParallelLinear, RowParallelLinear
from dualpipe_lab.tp.rms_norm import RMSNorm
from dualpipe_lab.tp.shard import TensorParallel
from dualpipe_lab.train.seeds import seed_of, seed_ranks, sharded_random

ONES = torch.ones(64)


def launch(fn, world_size):
    return lab.launch(fn, world_size, output="collect", timeout=120)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def masks(mesh, step):
    """One draw before, one inside and one after a block for shards."""
    seed_ranks(7, mesh, step)
    found = [dropout(ONES)]
    with sharded_random(mesh):
        found.append(dropout(ONES))
    return [tuple(mask.tolist()) for mask in [*found, dropout(ONES)]]


def test_copies_drop_the_same_units_and_nobody_else_does():
    """pp 2 x dp 2 x tp 2, and dp 2 x ep 2 x cp 2; step by step, and drawn again for a step that is repeated."""
    grids = [Topology([("pp", 2), ("dp", 2), ("tp", 2)]), Topology([("dp", 2), ("ep", 2), ("cp", 2)])]

    def fn(rank, world_size):
        torch.manual_seed(rank)
        found = [[masks(lab.Mesh(grid), step) for step in (0, 1)] for grid in grids]
        assert masks(lab.Mesh(grids[0]), 0) == found[0][0]
        return found

    out = launch(fn, 8)
    for number, grid in enumerate(grids):
        groups = grid.size("tp")
        for place, distinct in ((0, 8 // groups), (1, 8), (2, 8 // groups)):
            drawn = [out[rank][number][step][place] for rank in range(8) for step in (0, 1)]
            assert len(set(drawn)) == 2 * distinct
            assert all(0 < sum(mask) < 2 * len(mask) for mask in drawn)
    for first in range(0, 8, 2):  # the ranks of a tp group
        assert [out[first][0][step][::2] for step in (0, 1)] == [out[first + 1][0][step][::2] for step in (0, 1)]


def test_a_norm_behind_dropout_stays_one_norm():
    """The symptom: with a seed per rank, the copies of a norm get different gradients; with `seed_ranks` the same."""

    def gradient(mesh, sharded):
        tp = TensorParallel(mesh.group("tp"))
        up, down = ColumnParallelLinear(8, 16, True, tp), RowParallelLinear(16, 8, True, tp)
        norm, x = RMSNorm(8, tp=tp), draw(1, 4, 8)
        for index, parameter in enumerate([*up.parameters(), *down.parameters()]):
            parameter.data = draw(index, *parameter.shape)
        hidden = up(x)
        if sharded:
            with sharded_random(mesh):
                hidden = dropout(hidden)
        (norm(dropout(down(hidden))) ** 3).sum().backward()
        return norm.weight.grad.tolist()

    def fn(rank, world_size):
        mesh, found = lab.Mesh(Topology([("dp", 2), ("tp", 2)])), []
        for sharded in (False, True):
            torch.manual_seed(rank)
            found.append(gradient(mesh, sharded))
            seed_ranks(0, mesh)
            found.append(gradient(mesh, sharded))
        return found

    out = launch(fn, 4)
    for first in (0, 2):
        apart, together, sharded_apart, sharded_together = zip(out[first], out[first + 1], strict=True)
        assert apart[0] != apart[1]
        assert together[0] == together[1]
        assert sharded_apart[0] != sharded_apart[1]
        assert sharded_together[0] == sharded_together[1]
    assert out[0][1] != out[2][1]  # other data, other units


def test_a_recomputed_block_drops_the_same_units():
    def fn(rank, world_size):
        mesh = lab.Mesh(Topology([("tp", 2)]))
        seed_ranks(3, mesh)
        x = torch.ones(64, requires_grad=True)

        def block(x):
            with sharded_random(mesh):
                x = dropout(x) * x
            return dropout(x) * x

        plain, again = block(x), None
        seed_ranks(3, mesh)
        again = recompute(block, x)
        dropout(ONES)  # the state moves on between forward and backward
        (expected,) = torch.autograd.grad(plain.sum(), x)
        (found,) = torch.autograd.grad(again.sum(), x)
        return torch.equal(plain, again), torch.equal(found, expected), found.tolist()

    first, second = launch(fn, 2)
    assert first[:2] == second[:2] == (True, True)
    assert first[2] != second[2]


def test_no_two_places_share_a_seed():
    grid = Topology([("pp", 4), ("dp", 4), ("cp", 2), ("tp", 4)])
    seeds = {
        seed_of(seed, grid.coordinates(rank), step) for seed in range(4) for step in range(4) for rank in range(128)
    }
    assert len(seeds) == 4 * 4 * 128
    assert all(0 <= seed < 2**64 for seed in seeds)
