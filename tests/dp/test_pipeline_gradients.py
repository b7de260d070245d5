"""Data parallelism beside a pipeline: a stage is summed when its last backward is done."""

import pytest
import torch
from models import launch
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.ddp import GradientReducer
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime import PipelineRuntime
from dualpipe_lab.pp.schedules import build


@pytest.mark.parametrize("name", ["1f1b", "split"])
def test_a_pipeline_sums_each_stage_after_its_last_backward(name):
    """dp 2 x pp 2: gradients equal one process, with one sum per stage."""
    split = Program.parse("split", ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"])
    program = build("1f1b", 2, 2) if name == "1f1b" else split
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(2)]
    x, y = torch.randn(2, 2, 4, 3, dtype=torch.float64), torch.randn(2, 2, 4, 3, dtype=torch.float64)
    topology = lab.Topology([("dp", 2), ("pp", 2)])

    def fn(rank, world_size):
        mesh = lab.Mesh(topology)
        stage = stages[mesh.rank("pp")]
        reducer = GradientReducer(stage.parameters(), mesh.group("dp"), num_backwards=2)
        runtime = PipelineRuntime(
            program, {mesh.rank("pp"): stage}, nn.functional.mse_loss, torch.empty(4, 3, dtype=torch.float64),
            group=mesh.group("pp"),
        )  # fmt: skip
        entries = lab.rank_context().ledger.entries
        connecting = entries["all_reduce"].count if "all_reduce" in entries else 0  # the ranks of a pipeline, on NCCL
        part = mesh.rank("dp")
        runtime.step(list(x[part]), list(y[part]), weights=[0.25, 0.25])
        reducer.finish()
        sums = lab.rank_context().ledger.entries["all_reduce"].count - connecting
        return [parameter.grad.clone() for parameter in stage.parameters()], sums

    out = launch(fn, 4)
    model = nn.Sequential(*stages)
    for inputs, targets in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        (nn.functional.mse_loss(model(inputs), targets) / 4).backward()
    for rank, (ours, sums) in enumerate(out):
        theirs = [parameter.grad for parameter in stages[topology.at(rank).rank("pp")].parameters()]
        assert all((a - b).abs().max() <= 1e-12 for a, b in zip(ours, theirs, strict=True))
        assert sums == 1
