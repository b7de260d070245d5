"""What does not fit is found before any rank starts, or names rank and action."""

import pytest
import torch
from rank_runs import LIKE, WIDTH, close, grads_of, make_batch, make_stages
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.dp import DDP
from dualpipe_lab.pp.runtime import PipelineRuntime, WithLoss, check, split_batch
from dualpipe_lab.pp.runtime.check import Buffers, check_stages
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
        ({"targets": make_batch(2, rows=[3, 2])[1]}, "got targets of 12, 8 elements; give step the share"),
        ({"inputs": [x.clone().requires_grad_() for x in BATCH[0]]}, "inputs of microbatch 0 need a gradient"),
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


class Scaled(nn.Module):
    """A loss with a weight."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, y, target):
        return (nn.functional.mse_loss(y, target) * self.log_scale.exp() - self.log_scale).mean()


class Table(nn.Module):
    """A table that grows with the length of the input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(2))

    def forward(self, x):
        self.angles = torch.arange(max(len(self.angles), len(x)))
        return x


class Counter(nn.Module):
    """Counts the rows that it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + len(x)
        return x


def test_one_parameter_in_two_stages_of_a_rank_is_refused_where_copies_are_added():
    first, last = make_stages(2)
    last[0].weight = first[0].weight
    check_stages(build("zbv", 1, 4), 0, {0: first, 1: last}, False)
    with pytest.raises(ValueError, match="stages 0 and 1 of this rank share a parameter"):
        check_stages(build("dualpipe", 2, 4), 0, {0: first, 1: last}, True)


def normed():
    return [nn.Sequential(stage, nn.BatchNorm1d(WIDTH)).double() for stage in make_stages(2)]


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (lambda: nn.BatchNorm1d(WIDTH), "0.running_mean"),
        (lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True), "0.running_mean"),
        (lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), "0.parametrizations.weight.0._u"),
        (Counter, "0.count"),
        (lambda: nn.BatchNorm1d(WIDTH).eval(), None),
        (lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), None),
        (Table, None),
    ],
)
def test_a_buffer_that_a_forward_changes_is_seen(make, changed):
    module = nn.Sequential(make())
    buffers = Buffers(3, module)
    buffers.begin()
    module(torch.randn(5, WIDTH, WIDTH))
    if changed is None:
        buffers.check()
        return
    with pytest.raises(ValueError, match=f"stage 3 changes its buffer {changed}, and the copies"):
        buffers.check()


@pytest.mark.parametrize(
    ("schedule", "make", "message"),
    [
        ("dualpipe", normed, r"stage [01] changes its buffer 1\.running_mean, and the copies"),
        ("dualpipe", lambda: make_stages(2), r"trains a weight of its own \(shape \(\)\), and nobody sums"),
        ("1f1b, DDP", lambda: make_stages(2), r"make the loss function a part of the last stage"),
    ],
)
def test_what_copies_and_data_ranks_would_not_share_is_refused(schedule, make, message):
    program = build(schedule.split(",")[0], 2, 4)

    def fn(rank, world_size):
        mine = {action.stage: make()[action.stage] for action in program.actions(rank)}
        alone = [comm.new_group([number]) for number in range(world_size)][rank]
        held = [DDP(stage, alone) for stage in mine.values()] if "DDP" in schedule else []
        loss = nn.MSELoss() if make is normed else Scaled()
        PipelineRuntime(program, mine, loss).step(*make_batch(4))
        return held

    with pytest.raises(lab.RankError, match=message):
        lab.launch(fn, 2)


def test_weights_of_a_loss_that_is_a_part_of_the_last_stage_are_trained():
    """And without copies and data ranks any loss may have weights."""

    def stages_of():
        stages = make_stages(2)
        stages[1].loss = Scaled()
        stages[1].forward = lambda x: stages[1][1](stages[1][0](x))
        return stages

    def fn(rank, world_size):
        found = []
        for name, apart in (("1f1b", True), ("zero_bubble_h1", False), ("dualpipe", False)):
            program, stages = build(name, 2, 4), stages_of()
            mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
            loss = Scaled() if apart else stages[1].loss
            PipelineRuntime(program, mine, loss).step(*make_batch(4))
            if 1 in mine:
                found.append([loss.log_scale.grad, *grads_of(stages[1][0])])
        return found

    stages = stages_of()
    for x, y in zip(*make_batch(4), strict=True):
        (stages[1].loss(stages[1](stages[0](x)), y) / 4).backward()
    theirs = [stages[1].loss.log_scale.grad, *grads_of(stages[1][0])]
    first, second = lab.launch(fn, 2)
    assert (len(first), len(second)) == (1, 3)
    for ours in (*first, *second):
        close(ours, theirs)


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zbv"])
def test_running_statistics_are_those_of_one_process_with_the_same_microbatches(name):
    program, batch = build(name, 2, 4), make_batch(4)

    def stages_of():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(program.num_stages)]

    def fn(rank, world_size):
        stages = [stage.double() for stage in stages_of()]
        mine = {action.stage: stages[action.stage] for action in program.actions(rank)}
        PipelineRuntime(program, mine, nn.functional.mse_loss).step(*batch)
        return {stage: ([*module.buffers()], grads_of(module)) for stage, module in mine.items()}

    stages = [stage.double() for stage in stages_of()]
    for x, y in zip(*batch, strict=True):
        (nn.functional.mse_loss(nn.Sequential(*stages)(x), y) / 4).backward()
    for found in lab.launch(fn, 2):
        for stage, (buffers, grads) in found.items():
            close([*map(torch.Tensor.double, buffers)], [*map(torch.Tensor.double, stages[stage].buffers())])
            close(grads, grads_of(stages[stage]))
