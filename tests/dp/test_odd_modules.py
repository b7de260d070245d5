"""Modules as users write them: transposed buffers and weights, parameters without elements, hooks that read weights."""

import warnings

import pytest
import torch
from models import launch
from torch import nn
from zero_runs import STAGES

from dualpipe_lab.dp.checkpoint import load, save
from dualpipe_lab.dp.sharded import full_weights
from dualpipe_lab.dp.zero3 import Zero3

HYPER = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


class Transposed(nn.Module):
    """A buffer and a frozen weight whose memory has another order than their elements."""

    def __init__(self):
        super().__init__()
        self.linear, self.shards, self.stages, self.tied = nn.Linear(3, 3), 4, 2, True  # names that we use otherwise
        self.register_buffer("scale", torch.rand(3, 4).t())
        self.frozen = nn.Parameter(torch.rand(4, 3).t(), requires_grad=False)

    def forward(self, x):
        return self.linear(x) @ self.frozen @ self.scale


class NoElements(nn.Module):
    """The last parameter, with which the buckets begin, has no elements; another is of a type of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.single = nn.Parameter(torch.ones(0, 2, dtype=torch.float32))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.last = nn.Parameter(torch.ones(3, 0))

    def forward(self, x):
        return self.linear(x) * self.scale + self.single.sum() + (x @ self.last).sum()


class Normed(nn.Module):
    """A hook of an older weight norm computes the weight before the forward."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.linear = nn.utils.weight_norm(nn.Linear(3, 3))

    def forward(self, x):
        return self.linear(x)


class Compiled(nn.Module):
    """torch.compile traces its forward and backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.compile(backend="aot_eager")

    def forward(self, x):
        return self.linear(x).tanh()


def make(kind):
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return kind(), torch.randn(4, 3)
    finally:
        torch.set_default_dtype(previous)


def expected(kind):
    model, x = make(kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False, **HYPER)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - 1).square().sum().backward()
        nn.utils.clip_grad_norm_(trained, 1.0, foreach=False)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", [Transposed, NoElements, Normed, Compiled])
def test_odd_modules_train_as_in_one_process_and_are_saved(kind, tmp_path):
    def fn(rank, world_size):
        found = []
        for stage in STAGES:
            model, x = make(kind)
            units = {"units": [model.linear]} if stage is Zero3 else {}
            optimizer = stage(model, **units, **HYPER, reduce="sum")
            for _ in range(3):
                optimizer.zero_grad()
                (model(x[rank::world_size]) - 1).square().sum().backward()
                optimizer.step(max_norm=1.0)
            found.append(full_weights(optimizer))
            path = save(tmp_path / stage.__name__, 1, optimizer)
            kept = [buffer.clone() for buffer in model.buffers()]
            with torch.no_grad():
                for tensor in [*model.buffers(), *(shard.optimizer.weight for shard in optimizer.local_shards)]:
                    tensor.zero_()
            load(path, optimizer)
            again = full_weights(optimizer)
            assert all(torch.equal(again[name], value) for name, value in found[-1].items())
            assert all(map(torch.equal, model.buffers(), kept))
        return found

    right = expected(kind)
    for found in launch(fn, 2):
        for weights in found:
            assert weights.keys() == right.keys()
            for name, value in right.items():
                assert torch.allclose(weights[name], value, rtol=0, atol=1e-14), name
