"""Tensor parallelism with layers of one's own: they start alike, and a first step that moves them apart is refused."""

import pytest
import torch
from runs import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab import dp, tp


def trained(model, mesh, x, y, sharding):
    """A step with an optimizer, and how far the ranks of tp are apart in each parameter that no layer shards."""
    optimizer = sharding(model, mesh, lr=0.1)
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
    with optimizer.gathered():
        shared = [p.detach().clone() for name, p in model.named_parameters() if name not in tp.shards_of(model)]
    mine = torch.cat([p.reshape(-1) for p in shared])
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    return float((both[0] - both[1]).abs().max())


def pair(sequence_parallel=False):
    mesh = lab.Mesh(lab.Topology([("dp", 1), ("tp", 2)]))
    shared = tp.TensorParallel(mesh.group("tp"), sequence_parallel)
    return mesh, [tp.ColumnParallelLinear(4, 8, tp=shared), tp.RowParallelLinear(8, 4, tp=shared)]


SHARDINGS = (dp.DDP, dp.Zero1, dp.Zero2, dp.Zero3)


def test_replicated_layers_that_nobody_has_seeded_start_alike():
    def fn(rank, world_size):
        mesh, layers = pair()
        ids, y = torch.arange(8)[None], torch.ones(1, 8, 4)
        return [trained(nn.Sequential(nn.Embedding(9, 4), *layers), mesh, ids, y, one) for one in SHARDINGS]

    assert launch(fn, 2) == [[0.0] * 4] * 2


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("case", ["dropout", "token shards"])
def test_a_first_step_that_moves_replicas_apart_is_refused(case, sharding):
    def fn(rank, world_size):
        mesh, layers = pair(sequence_parallel=case == "token shards")
        x = torch.arange(32.0).view(1, 8, 4).sin()
        if case == "token shards":  # a norm of one's own sees other tokens on each rank, and nobody sums its gradient
            return trained(
                nn.Sequential(nn.LayerNorm(4), *layers), mesh, x.chunk(2, 1)[rank], torch.ones(1, 4, 4), sharding
            )
        # each rank draws from its own stream, as `launch` seeds it
        return trained(nn.Sequential(*layers, nn.Dropout(0.5)), mesh, x, torch.ones(1, 8, 4), sharding)

    with pytest.raises(lab.RankError, match=r"differ on ranks \[0, 1\] of tp, which hold these parameters in full"):
        launch(fn, 2)
