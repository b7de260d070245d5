"""What does not fit is found before any rank starts, or names rank and action."""

import pytest
import torch
from rank_runs import LIKE, WIDTH, Returns, grads_of, make_batch, make_stages
from runs import assert_refused
from test_runtime import Scaled
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.dp import DDP
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.runtime import PipelineRuntime, WithLoss, check, split_batch
from dualpipe_lab.pp.runtime.check import Buffers, check_stages
from dualpipe_lab.pp.schedules import build

BATCH = make_batch(2)


def integers(x):
    return x.long()


def test_check_finds_it_without_ranks(subtests):
    for changes, message in [
        ({"num_ranks": 4}, "GPipe is written for 2 ranks, the group has 4; build it for 4"),
        ({"stages": dict(enumerate(make_stages(3)))}, r"has stages 0 to 1, got modules for \[0, 1, 2\]; give all"),
        (
            {"inputs": BATCH[0][:1]},
            "GPipe needs 2 inputs, one per microbatch, got 1; the fields of one batch go in a tuple",
        ),
        ({"inputs": (x for x in BATCH[0])}, "2 inputs, one per microbatch, got a generator; give a list"),
        ({"targets": [*BATCH[1], 0]}, "GPipe needs 2 targets, one per microbatch, got 3"),
        ({"extra": {1: []}}, "GPipe needs 2 extra inputs of stage 1, one per microbatch, got 0"),
        ({"stages": [Returns(integers), nn.Identity()]}, "stage 0 returned torch.int64 for microbatch 0"),
        ({"stages": [Returns(torch.Tensor.to_sparse), nn.Identity()]}, r"torch\.sparse_coo .* return to_dense\(\)"),
        ({"loss_fn": lambda y, target: mse_loss(y, target).item()}, r"is a tensor, got float; leave out item\(\)"),
        ({"boundary": LIKE.float()}, r"stage 0 made .*float64 .* the boundary says .*float32"),
        ({"inputs": [x.clone().requires_grad_() for x in BATCH[0]]}, "inputs of microbatch 0 need a gradient"),
        ({"loss_fn": lambda y, target: y}, r"the loss of a microbatch is one number, got shape \(3, 4\)"),
        ({"stages": [nn.Linear(WIDTH, 3).double(), nn.Linear(WIDTH, 1).double()]}, "cannot be multiplied"),
        ({"stages": [Returns(lambda x: WithLoss(x, x)), *make_stages(1)]}, "the loss of a microbatch is one number"),
    ]:
        arguments = {"stages": make_stages(2), "loss_fn": mse_loss, "inputs": BATCH[0], "targets": BATCH[1], **changes}
        with subtests.test(message=message), pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            check(build("gpipe", 2, 2), **arguments)


def test_check_tells_of_a_parameter_in_two_stages():
    first, second = make_stages(2)
    second.register_parameter("also", next(first.parameters()))
    with pytest.warns(UserWarning, match="stage 0 and also of stage 1 are one parameter"):
        check(build("gpipe", 2, 2), [first, second], mse_loss, *BATCH)


def test_check_leaves_no_trace():
    stages = {0: nn.Sequential(nn.BatchNorm1d(WIDTH).double(), nn.Dropout()), 1: make_stages(1)[0]}
    before = {name: value.clone() for name, value in stages[0].state_dict().items()}
    state = torch.get_rng_state()
    check(build("1f1b", 2, 2), stages, mse_loss, *BATCH, num_ranks=2, boundary=LIKE)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in stages[0].state_dict().items())
    assert not any(grad is not None for grad in grads_of(stages[1]))


def test_what_would_train_on_something_else_is_refused():
    """With the rule, the values and the remedy; on one rank, which holds all stages."""
    linear, ids = nn.Linear(WIDTH, 5), torch.tensor([0, 1, 2, -100])
    x, y = torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.int64)
    one, two = build("1f1b", 1, 2), Program.parse("two", ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"])
    frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), Returns(torch.detach))

    def detached(y, target):
        return cross_entropy(y.detach(), target)

    def forgetful():
        pairs, halves = build("dualpipev", 1, 2), make_stages(2)
        PipelineRuntime(pairs, halves, mse_loss, overlapped=lambda f, b: f.run()).step(*BATCH)

    def without_grad():
        with torch.no_grad():
            PipelineRuntime(one, {0: linear}, cross_entropy).step(x, y)

    def shared():
        first, last = make_stages(2)
        last[0].weight = first[0].weight
        check_stages(build("zbv", 1, 4), 0, {0: first, 1: last}, False)
        check_stages(build("dualpipe", 2, 4), 0, {0: first, 1: last}, True)

    rows = [
        (build("1f1b", 1, 3), [linear], (x, y), "4 rows does not split into 3 equal microbatches; use 1, 2, 4"),
        (one, [linear], (x, torch.tensor(1)), r"a tensor of shape \(\) has none"),
        (one, [linear], ({"x": x, "m": torch.ones(6)}, y), r"one number of rows, got \[4, 6\]"),
        (one, [linear], ({"x": x.numpy()}, y), "and ndarray has none"),
        (one, [linear], (None, y), "holds stage 0, which needs inputs"),
        (one, [linear], (x,), "holds the last stage, which needs targets"),
        (two, [frozen, linear], (x, y), "stage 0 returned tensors without a graph for microbatch 0"),
        (two, [nn.Linear(WIDTH, WIDTH), frozen], (x, y), "stage 1 returns a tensor without a graph"),
        (one, linear, (x, y), "give each module under its number"),
        (one, nn.ModuleDict({"head": linear}), (x, y), r"got the names \['head'\]"),
        (one, nn.ModuleList([linear, linear]), (x, y), "got 2 modules without numbers"),
        (one, {0: linear, 1: linear}, (x, y), r"1F1B places stages \[0\] on rank 0, got modules for \[0, 1\]"),
        (build("gpipe", 2, 2), [linear], (x, y), "GPipe is written for 2 ranks, the group has 1"),
    ]
    cases = [
        (lambda row=row: PipelineRuntime(*row[:2], cross_entropy).step(*row[2]), message) for *row, message in rows
    ]
    cases += [
        (
            lambda: PipelineRuntime(one, [linear], detached).step(x, y),
            "the loss function returns a tensor without",
        ),
        (
            lambda: PipelineRuntime(one, [nn.Sequential(DistributedDataParallel(linear))], cross_entropy),
            "stage 0 is wrapped in torch's DistributedDataParallel.* sum its gradients with DDP of dualpipe_lab.dp",
        ),
        (without_grad, "use evaluate"),
        (forgetful, "the hook for overlapped pairs has not run [01]B0"),
        (shared, "stages 0 and 1 of this rank share a parameter"),
        (lambda: split_batch(torch.zeros(0, 2), 1), "use a batch that has rows"),
    ]
    assert_refused(1, cases)
    lab.launch(lambda rank, size: PipelineRuntime(one, [linear], cross_entropy).step(x, ids, [2 / 3, 1 / 3]), 1)


def failing(x):
    raise KeyError("weights")


class Growing(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x[:, : self.calls]


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        (nn.Identity(), {"boundary": LIKE[:1]}, r"stage 0 made \(3, 4\) of torch.float64 for microbatch 0, the bounda"),
        (Returns(integers), {}, "stage 0 returned torch.int64 for microbatch 0, and no gradient comes back for integ"),
        (Returns(lambda x: [x]), {}, "stage 0 must return a tensor, a tuple of tensors or WithLoss"),
        (Growing(), {}, r"stage 0 made \(3, 2\) .* for microbatch 1, but \(3, 1\) .* the same shape; pass `boundary`"),
        (Returns(lambda x: (x,) * 8), {}, "a boundary carries at most 7 tensors"),
        (Returns(failing), {}, "KeyError: 'weights'\n.*at 0F0"),
    ],
)
def test_an_error_names_rank_and_action(stage, options, message):
    def fn(rank, world_size):
        module = stage if rank == 0 else nn.Linear(WIDTH, WIDTH)
        PipelineRuntime(build("gpipe", 2, 2), {rank: module}, mse_loss, **options).step(*BATCH)

    with pytest.raises(lab.RankError, match=message) as caught:
        lab.launch(fn, 2)
    assert "of 'GPipe', rank 0 of the pipeline" in str(caught.value)


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


class Counting(nn.Module):
    """Hands on how many rows it has seen; a copy of that number, or the number itself."""

    def __init__(self, copies):
        super().__init__()
        self.linear, self.copies = nn.Linear(WIDTH, WIDTH).double(), copies
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        return self.linear(x), self.seen.clone() if self.copies else self.seen


class ByRows(nn.Module):
    """Its result depends on the number that came."""

    def forward(self, x, seen):
        return x * seen


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble_h1", "dualpipev"])
def test_what_a_stage_hands_on_and_changes_in_its_next_forward_is_refused(schedule):
    def fn(rank, world_size, copies):
        program = build(schedule, 2, 4)
        torch.manual_seed(0)
        every = [Counting(copies), *(Passing() for _ in range(program.num_stages - 2)), ByRows()]
        mine = {a.stage: every[a.stage] for a in program.actions(rank)}
        PipelineRuntime(program, mine, mse_loss).step(*make_batch(4))

    lab.launch(fn, 2, True)
    with pytest.raises(lab.RankError, match=r"0F0 \(1\) handed on was changed in place before it had arrived"):
        lab.launch(fn, 2, False)


class Passing(nn.Module):
    """A stage in between."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x, seen):
        return self.linear(x), seen
