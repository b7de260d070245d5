"""Torch's runtime executes what we export: one step on GLOO ranks, gradients against a single process."""

import pytest
import torch
from rank_runs import bitwise, expected_grads, make_batch, make_stages
from schedule_grid import ORACLES
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.torch_csv import to_torch_csv

NUM_RANKS, NUM_MICROBATCHES = 2, 8  # a power of two: dividing by it rounds nothing


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


def train_in_torch(program, path, form):
    """Per rank: the gradients by stage after one step of torch's runtime."""

    def fn(rank, world_size):
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        modules = make_stages(program.num_stages)
        x, target = map(torch.cat, make_batch(program.num_microbatches))
        torch.manual_seed(100 + rank)
        mine = program.stages_of(rank)
        stages = [PipelineStage(modules[s], s, program.num_stages, torch.device("cpu")) for s in mine]
        runtime = _PipelineScheduleRuntime(stages, program.num_microbatches, loss_fn=nn.functional.mse_loss)
        runtime._load_csv(path, format=form)
        first, last = 0 in mine, program.num_stages - 1 in mine
        runtime.step(*([x] if first else []), **({"target": target, "losses": []} if last else {}))
        return {s: [p.grad for p in modules[s].parameters()] for s in mine}

    found = lab.launch(fn, program.num_ranks, timeout=240)
    return {stage: grads for rank in found for stage, grads in rank.items()}


@pytest.mark.on_gloo("torch's runtime is the peer, and its buffers are on the CPU")
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("program", exportable(), ids=lambda program: program.name)
def test_one_step_in_torch_has_the_gradients_of_a_single_process(program, form, tmp_path):
    asks_for_waits = [int(part) for part in torch.__version__.split(".")[:2]] >= [2, 15]
    (tmp_path / "program.csv").write_text(to_torch_csv(program, form, waits=asks_for_waits))
    found = train_in_torch(program, str(tmp_path / "program.csv"), form)
    for expected in expected_grads(program, make_batch(program.num_microbatches))[0]:
        for stage, theirs in expected.items():
            assert all(grad.abs().max() > 0 for grad in theirs)
            assert bitwise(found[stage], theirs)
