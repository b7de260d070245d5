"""A step that raised and was caught: after zero_grad() the next one is that of one process."""

import pytest
import torch
from models import launch, worst
from torch import nn
from zero_runs import STAGES

import dualpipe_lab as lab
from dualpipe_lab import pp
from dualpipe_lab.dp import Zero3, full_weights

ROWS, M = 8, 2
HYPER = {"lr": 0.1, "eps": 1e-2}


class Interrupted(nn.Module):
    """Raises `error` in the second microbatch: in the forward or the backward of block number `at`, or in the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.where, self.at, self.error, self.microbatches = None, 0, RuntimeError("bad sample"), 0
        self.double()

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if self.where == "forward" and number == self.at:
                self.spoil()
            x = torch.tanh(block(x))
            if self.where == "backward" and number == self.at:
                x.register_hook(self.spoil)
        return x

    def spoil(self, grad=None):
        self.microbatches += 1
        if self.microbatches == M:
            raise self.error

    def loss(self, output, target):
        if self.where == "loss":
            self.spoil()
        return nn.functional.mse_loss(output, target)


def data(step, rank=0, world_size=1):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, 3, dtype=torch.float64, generator=generator)[rank::world_size] for _ in range(2)]


def trained(model, optimizer, backward, spoil):
    """Three steps, of which `spoil` breaks the second."""
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            spoil(model)
        try:
            backward(*data(step))
        except (RuntimeError, KeyboardInterrupt):
            model.where = None
            optimizer.zero_grad()
            continue
        optimizer.step()


def one_process():
    model = Interrupted()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **HYPER)
    for step in (0, 2):
        x, y = data(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("error", [RuntimeError("bad sample"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("place", ["forward", "loss", "backward", "ranks stop at other places"])
def test_the_next_step_is_that_of_one_process(place, error):
    def fn(rank, world_size):
        def spoil(model):
            model.where, model.error = "backward" if place.startswith("ranks") else place, error
            model.at = rank if place.startswith("ranks") else 1

        def backward(x, y):
            for m in range(M):
                part = slice(rank + m * world_size, None, M * world_size)
                model.loss(model(x[part]), y[part]).div(M).backward()

        found = []
        for stage in STAGES:
            model = Interrupted()
            units = {"units": [*model.blocks]} if stage is Zero3 else {}
            optimizer = stage(model, num_backwards=M, **units, **HYPER)
            trained(model, optimizer, backward, spoil)
            found.append(full_weights(optimizer))
        return found

    assert all(worst(weights, one_process()) < 1e-15 for found in launch(fn, 2) for weights in found)


@pytest.mark.parametrize("place", ["forward", "loss", "backward"])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_h1"])
def test_the_next_step_of_a_pipeline_of_one_rank_is_that_of_one_process(schedule, place):
    def fn(rank, world_size):
        mesh, program = lab.Mesh(lab.Topology([("pp", 1), ("dp", 2)])), pp.schedules.build(schedule, 1, M)
        found = []
        for stage in STAGES:
            model = Interrupted()
            stages = nn.ModuleDict({"0": model})
            units = {"units": [model]} if stage is Zero3 else {}
            optimizer = stage(stages, mesh, program=program, **units, **HYPER)
            runtime = pp.PipelineRuntime(program, stages, model.loss, group=mesh.group("pp"))
            trained(
                model,
                optimizer,
                lambda x, y, runtime=runtime: runtime.step(x[rank::world_size], y[rank::world_size]),
                lambda model: setattr(model, "where", place),
            )
            found.append({name.removeprefix("0."): value for name, value in full_weights(optimizer).items()})
        return found

    assert all(worst(weights, one_process()) < 1e-15 for found in launch(fn, 2) for weights in found)
