"""Shares of a loss by the tokens of each microbatch."""

import pytest
import torch
from rank_runs import WIDTH, close, grads_of
from torch import nn
from torch.nn import functional

import dualpipe_lab as lab
from dualpipe_lab.pp.runtime import PipelineRuntime
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
