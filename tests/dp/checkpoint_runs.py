"""What the tests of checkpoints save, and everything that must come back."""

import torch
from models import launch
from torch import nn
from zero_runs import BATCHES, HYPER, Blocks, build, train

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.dp.checkpoint import save
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.sharding import shard_slice


class Counting(Blocks):
    """With a buffer, a number, and a buffer that is not saved."""

    def __init__(self, dtype=torch.float64, **options):
        super().__init__(dtype, **options)
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.temperature = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, tokens):
        self.num_batches += 1
        return super().forward(tokens) * self.temperature


def make(stage, dtype=torch.float64, seed=0):
    return build(stage, Counting(dtype, seed=seed), {**HYPER, "master": dtype == torch.bfloat16})


def state_of(optimizer):
    """Everything that counts, whole, by name; the same on every rank."""
    parts = {}
    for held in optimizer.local_shards:
        for kind, tensor in held.optimizer.state_dict().items():
            for part in held.bucket.layout.tensors_between(held.start, held.stop):
                parameter = held.bucket.parameters[part.tensor]
                begin = held.bucket.layout.offsets[part.tensor] + part.start - held.start
                values = tensor[begin : begin + part.stop - part.start].clone()
                parts.setdefault((kind, optimizer.names[parameter]), {})[part.start] = values
    merged = {}
    for found in [parts] if not optimizer.is_sharded else comm.all_gather_object(parts):
        for key, pieces in found.items():
            merged.setdefault(key, {}).update(pieces)
    whole = {key: torch.cat([pieces[start] for start in sorted(pieces)]) for key, pieces in merged.items()}
    return whole | full_weights(optimizer) | {"steps": torch.tensor(optimizer.num_steps)}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def save_all(stages, num_ranks, folder, dtype=torch.float64, num_steps=2):
    """What each stage saved after some steps: its state, the path, the buffer."""

    def fn(rank, world_size):
        found = []
        for stage in stages:
            optimizer = make(stage, dtype)
            train(optimizer, shard_slice(6, world_size, rank), BATCHES[:num_steps], 1)
            options = {"sampler": {"batch": 7}, "config": {"lr": 0.01}, "topology": lab.Topology([("dp", world_size)])}
            path = save(folder / stage.__name__, num_steps, optimizer, **options)
            found.append((state_of(optimizer), path, int(optimizer.module.num_batches)))
        return found

    return launch(fn, num_ranks)[0]


def save_from(stage, num_ranks, folder):
    return save_all([stage], num_ranks, folder)[0]
