"""What does not fit is found before any rank starts, or names rank and action."""

import pytest
import torch
from rank_runs import LIKE, WIDTH, grads_of, make_batch, make_stages
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.pp.runtime import PipelineRuntime, WithLoss, check, split_batch
from dualpipe_lab.pp.schedules import build

BATCH = make_batch(2)


class Integers(nn.Module):
    def forward(self, x):
        return x.long()


class NoLoss(nn.Module):
    def forward(self, x):
        return WithLoss(x, x)


def test_check_finds_it_without_ranks(subtests):
    for changes, message in [
        ({"num_ranks": 4}, "GPipe is written for 2 ranks, the group has 4; build it for 4"),
        ({"stages": dict(enumerate(make_stages(3)))}, r"has stages 0 to 1, got modules for \[0, 1, 2\]; give all"),
        ({"inputs": BATCH[0][:1]}, "GPipe needs 2 inputs, one per microbatch, got 1"),
        ({"targets": [*BATCH[1], 0]}, "GPipe needs 2 targets, one per microbatch, got 3"),
        ({"extra": {1: []}}, "GPipe needs 2 extra inputs of stage 1, one per microbatch, got 0"),
        ({"stages": {0: Integers(), 1: nn.Identity()}}, "stage 0 returned torch.int64 for microbatch 0"),
        ({"boundary": LIKE.float()}, r"stage 0 made .*float64 .* the boundary says .*float32"),
        ({"loss_fn": lambda y, target: y}, r"the loss of a microbatch is one number, got shape \(3, 4\)"),
        ({"stages": {0: nn.Linear(WIDTH, 3).double(), 1: nn.Linear(WIDTH, 1).double()}}, "cannot be multiplied"),
        ({"stages": {0: NoLoss(), 1: make_stages(1)[0]}}, "the loss of a microbatch is one number"),
    ]:
        with subtests.test(changes=changes, message=message):
            arguments = {
                "stages": dict(enumerate(make_stages(2))), "loss_fn": nn.functional.mse_loss, "inputs": BATCH[0],
                "targets": BATCH[1], **changes,
            }  # fmt: skip
            with pytest.raises((ValueError, RuntimeError), match=message):
                check(build("gpipe", 2, 2), **arguments)


def test_check_leaves_no_trace():
    stages = {0: nn.Sequential(nn.BatchNorm1d(WIDTH).double(), nn.Dropout()), 1: make_stages(1)[0]}
    before = {name: value.clone() for name, value in stages[0].state_dict().items()}
    state = torch.get_rng_state()
    check(build("1f1b", 2, 2), stages, nn.functional.mse_loss, *BATCH, num_ranks=2, boundary=LIKE)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in stages[0].state_dict().items())
    assert not any(grad is not None for grad in grads_of(stages[1]))


def test_a_batch_that_does_not_split():
    with pytest.raises(ValueError, match=r"10 rows does not split into 4 equal microbatches; use 1, 2, 5, 10"):
        split_batch(torch.zeros(10, 2), 4)
    with pytest.raises(ValueError, match="use a batch that has rows"):
        split_batch(torch.zeros(0, 2), 1)
    assert torch.equal(torch.cat(split_batch(torch.arange(6), 3)), torch.arange(6))


def test_an_error_in_a_stage_names_rank_and_action():
    class Faulty(nn.Module):
        def forward(self, x):
            raise KeyError("weights")

    def fn(rank, world_size):
        stages = {rank: Faulty() if rank == 1 else make_stages(1)[0]}
        PipelineRuntime(build("1f1b", 2, 3), stages, nn.functional.mse_loss, LIKE).step(*make_batch(3))

    with pytest.raises(lab.RankError, match=r"KeyError: 'weights'\n.*at 1F0 of '1F1B', rank 1 of the pipeline"):
        lab.launch(fn, 2)
