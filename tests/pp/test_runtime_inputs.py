"""Inputs, targets and losses on any stage; shares by tokens; modules that are not a chain of linear layers."""

import pytest
import torch
from rank_runs import WIDTH, close, grads_of
from stage_zoo import Block
from torch import nn
from torch.nn import functional

import dualpipe_lab as lab
from dualpipe_lab.pp.runtime import PipelineRuntime, recompute
from dualpipe_lab.pp.schedules import build


def test_shares_by_tokens_and_a_microbatch_without_any():
    torch.manual_seed(0)
    stages = [nn.Embedding(5, WIDTH).double(), nn.Linear(WIDTH, 5).double()]
    tokens = [torch.tensor([1, 2, 3]), torch.tensor([4, 4, 0]), torch.tensor([0, 1, 1])]
    labels = [torch.tensor([2, -100, 1]), torch.tensor([-100] * 3), torch.tensor([1, 1, 1])]
    counts = [int((label >= 0).sum()) for label in labels]
    shares = [count / sum(counts) for count in counts]
    program = build("zero_bubble_h1", 2, 3)

    def fn(rank, world_size):
        runtime = PipelineRuntime(program, {rank: stages[rank]}, nn.functional.cross_entropy)
        result = runtime.step(tokens, labels, shares)
        return grads_of(stages[rank]), [float(loss) for loss in result.losses.values()]

    out = lab.launch(fn, 2)
    loss = functional.cross_entropy(nn.Sequential(*stages)(torch.cat(tokens)), torch.cat(labels))
    loss.backward()
    for (ours, _), stage in zip(out, stages, strict=True):
        close(ours, grads_of(stage))
    assert sum(out[1][1]) == pytest.approx(loss.item(), abs=1e-12)


@pytest.mark.parametrize("name", ["zero_bubble_h1", "dualpipev"])
def test_transformer_blocks_with_recomputation(name):
    program = build(name, 2, 4)

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block().eval()

        def forward(self, x):
            return recompute(self.block, x)

    torch.manual_seed(0)
    stages = [(Again() if index % 2 else Block().eval()).double() for index in range(program.num_stages)]
    inputs = [torch.randn(2, 3, 8, dtype=torch.float64) for _ in range(4)]

    def fn(rank, world_size):
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        PipelineRuntime(program, mine, nn.functional.mse_loss).step(inputs, inputs)
        return {stage: grads_of(module) for stage, module in mine.items()}

    out = lab.launch(fn, 2)
    model = nn.Sequential(*stages)
    for x in inputs:
        (functional.mse_loss(model(x), x) * 0.25).backward()
    for grads in out:
        for stage, ours in grads.items():
            close(ours, grads_of(stages[stage]))
