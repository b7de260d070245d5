"""Torch's runtime executes what we export: one step on GLOO ranks, gradients against a single process."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import B, Program, W
from dualpipe_lab.pp.torch_csv import to_torch_csv

pytestmark = pytest.mark.slow
ORACLES = json.loads((Path(__file__).parents[1] / "oracles" / "programs.json").read_text())
WIDTH, ROWS, NUM_RANKS, NUM_MICROBATCHES = 4, 3, 2, 8  # a power of two: dividing by it rounds nothing


def exportable():
    """Every schedule of the registry that torch can express, and the V-shaped oracles on 4 ranks."""
    for name in schedules.names():
        program = schedules.build(name, NUM_RANKS, NUM_MICROBATCHES)
        homes = {stage: rank for (stage, _), rank in program.placement.items()}
        if all(homes[stage] == rank for (stage, _), rank in program.placement.items()):
            yield program
    for name, rows in ORACLES.items():
        if name.startswith("zbv"):
            yield Program.parse(name, rows)


def make_stages(number):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(number)]


def make_batch(number):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(number * ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)]


def reference(program):
    """Gradients of one process, each stage's summed in the order in which the program makes them."""
    model = nn.Sequential(*make_stages(program.num_stages))
    inputs, targets = (batch.chunk(program.num_microbatches) for batch in make_batch(program.num_microbatches))
    parts = []
    for x, target in zip(inputs, targets, strict=True):
        loss = nn.functional.mse_loss(model(x), target)
        parts.append([torch.autograd.grad(loss, list(stage.parameters()), retain_graph=True) for stage in model])
    order = {
        stage: [a.microbatch for a in program if a.kind in (B, W) and a.stage == stage] for stage in range(len(model))
    }
    return [
        [sum(parts[m][stage][k] for m in order[stage]) / len(parts) for k in range(len(parts[0][stage]))]
        for stage in range(len(model))
    ]


def train_in_torch(program, path, form):
    """Per rank: the gradients by stage after one step of torch's runtime."""

    def fn(rank, world_size):
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        modules, (x, target) = make_stages(program.num_stages), make_batch(program.num_microbatches)
        torch.manual_seed(100 + rank)
        mine = sorted({action.stage for action in program.actions(rank)})
        stages = [PipelineStage(modules[s], s, program.num_stages, torch.device("cpu")) for s in mine]
        runtime = _PipelineScheduleRuntime(stages, program.num_microbatches, loss_fn=nn.functional.mse_loss)
        runtime._load_csv(path, format=form)
        first, last = 0 in mine, program.num_stages - 1 in mine
        runtime.step(*([x] if first else []), **({"target": target, "losses": []} if last else {}))
        return {s: [p.grad for p in modules[s].parameters()] for s in mine}

    found = lab.launch(fn, program.num_ranks, timeout=240)
    return {stage: grads for rank in found for stage, grads in rank.items()}


@pytest.mark.on_gloo("torch's runtime is the peer, and its buffers are on the CPU")
@pytest.mark.drawn(5)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("program", exportable(), ids=lambda program: program.name)
def test_one_step_in_torch_has_the_gradients_of_a_single_process(program, form, tmp_path):
    (tmp_path / "program.csv").write_text(to_torch_csv(program, form))
    found = train_in_torch(program, str(tmp_path / "program.csv"), form)
    for stage, expected in enumerate(reference(program)):
        for ours, theirs in zip(found[stage], expected, strict=True):
            assert theirs.abs().max() > 0
            assert torch.equal(ours, theirs)
