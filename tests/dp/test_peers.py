"""Every stage beside its peer in torch: the same weights after some steps."""

import pytest
import torch
from models import assert_close, launch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from zero_runs import BATCHES, HYPER, Blocks, build

from dualpipe_lab.dp.ddp import DDP
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.sharding import shard_slice

NUMBERS = {"lr": HYPER["lr"], "weight_decay": HYPER["weight_decay"]}


def make():
    """A model that all peers take: nothing frozen, unused or tied."""
    model = Blocks(tied=False)
    del model.blocks[2].unused
    return model.requires_grad_(True)


def ddp(model):
    wrapped = DistributedDataParallel(model)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), **NUMBERS), model.state_dict


def zero_redundancy(model):
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **NUMBERS), model.state_dict


def fsdp(model):
    for unit in model.units:
        fully_shard(unit)
    fully_shard(model)
    whole = lambda: {name: value.full_tensor() for name, value in model.state_dict().items()}  # noqa: E731
    return model, torch.optim.AdamW(model.parameters(), **NUMBERS), whole


@pytest.mark.on_gloo("torch's DistributedDataParallel makes its buckets in C++, where the stand-in marks nothing")
def test_our_weights_are_those_of_torch_s_peers():
    def fn(rank, world_size):
        found = []
        for stage, peer in ((DDP, ddp), (Zero1, zero_redundancy), (Zero3, fsdp)):
            optimizer, (wrapped, theirs, whole) = build(stage, make(), HYPER), peer(make())
            for tokens, _ in BATCHES:
                x = tokens[shard_slice(len(tokens), world_size, rank)]
                optimizer.zero_grad()
                (optimizer.module(x).square().mean() / world_size).backward()
                optimizer.step()
                theirs.zero_grad()
                wrapped(x).square().mean().backward()  # which averages over the ranks
                theirs.step()
            found.append((full_weights(optimizer), {name: value.detach().clone() for name, value in whole().items()}))
        return found

    for found in launch(fn, 2):
        for ours, theirs in found:
            assert_close(ours, theirs)
    start = make().state_dict()
    assert (found[0][0]["head.weight"] - start["head.weight"]).abs().max() > 1e-2
