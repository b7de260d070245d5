"""Stages that take and return dictionaries: gradients of one process on every kind of schedule, and what is refused."""

import pytest
import torch
from rank_runs import Returns
from runs import A1, draw, launch
from torch import nn

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.runtime import PipelineRuntime, WithLoss, check
from dualpipe_lab.pp.runtime.shape_inference import from_header, spec_of, to_header
from dualpipe_lab.pp.runtime.stage import NamedTensors

WIDTH, ROWS, M = 4, 3, 8
NAMES = ("1f1b", "interleaved", "zero_bubble_h1", "dualpipe", "dualpipev")  # whole, looped, split, mirrored, folded


class Fork(nn.Module):
    """Two branches, an integer that rides along, an input of its own (`shift`) and a loss of its own."""

    def __init__(self, stage, as_tuple=False):
        super().__init__()
        torch.manual_seed(stage)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.as_tuple = as_tuple
        self.double()

    def forward(self, left, key, right=None, shift=None):
        right = left.square() if right is None else right
        left, right = self.left(left).tanh() + 0.1 * right, self.right(right).tanh()
        left = left if shift is None else left + shift
        output = (left, key + 1, right) if self.as_tuple else {"left": left, "key": key + 1, "right": right}
        return WithLoss(output, left.square().mean())


def loss_of(output, target):
    return (output["left"] * output["right"] - target).square().mean() + 0.01 * output["key"].double().mean()


def loss_of_tuple(left, key, right, target):
    return loss_of({"left": left, "key": key, "right": right}, target)


def batch():
    xs, ys = draw(1, M, ROWS, WIDTH), draw(2, M, ROWS, WIDTH)
    keys = torch.arange(M * ROWS).reshape(M, ROWS)
    shifts = [{"shift": row} for row in draw(3, M, WIDTH)]
    return xs, keys, shifts, list(ys)


def one_process(num_stages):
    """Loss and gradients without the runtime; stage 1 gets the shift."""
    stages = [Fork(stage) for stage in range(num_stages)]
    xs, keys, shifts, ys = batch()
    total = 0.0
    for m in range(M):
        payload, losses = {"left": xs[m], "key": keys[m]}, []
        for number, stage in enumerate(stages):
            found = stage(**payload, **(shifts[m] if number == 1 else {}))
            payload, losses = found.output, [*losses, found.loss]
        loss = (sum(losses) + loss_of(payload, ys[m])) / M
        loss.backward()
        total += loss.item()
    return [[p.grad for p in stage.parameters()] for stage in stages], total


def run(program, rank, as_tuple):
    """One step of a rank: gradients by stage, and its losses."""
    mine = {action.stage: Fork(action.stage, as_tuple) for action in program.actions(rank)}
    xs, keys, shifts, ys = batch()
    pairs = list(zip(xs, keys, strict=True))
    inputs = pairs if as_tuple else [{"left": x, "key": key} for x, key in pairs]
    runtime = PipelineRuntime(program, mine, loss_of_tuple if as_tuple else loss_of)
    result = runtime.step(inputs, ys, extra={1: shifts})
    runtime.sum_copies()
    losses = [*result.losses.values(), *result.stage_losses.values()]
    return {stage: [p.grad for p in module.parameters()] for stage, module in mine.items()}, float(sum(losses))


def test_dictionaries_and_tuples_on_every_kind_of_schedule_have_the_gradients_of_one_process():
    def fn(rank, world_size):
        programs = [schedules.build(name, 2, M) for name in NAMES]
        return [[run(program, rank, as_tuple) for as_tuple in (False, True)] for program in programs]

    references = {}
    for name, *ranks in zip(NAMES, *launch(fn, 2, timeout=400), strict=True):
        number = schedules.build(name, 2, M).num_stages
        grads, loss = references.setdefault(number, one_process(number))
        for form in (0, 1):
            assert abs(sum(rank[form][1] for rank in ranks) - loss) <= A1 * loss, name
            for found, _ in (rank[form] for rank in ranks):
                for stage, values in found.items():
                    for ours, theirs in zip(values, grads[stage], strict=True):
                        assert (ours - theirs).abs().max() <= A1 * max(1, theirs.abs().max()), (name, form, stage)


def test_evaluation_returns_the_dictionary():
    xs, keys, _, _ = batch()

    def fn(rank, world_size):
        runtime = PipelineRuntime(schedules.gpipe(2, M), {rank: Fork(rank)}, loss_of)
        return runtime.evaluate([{"left": x, "key": key} for x, key in zip(xs, keys, strict=True)]).outputs

    nothing, found = launch(fn, 2)
    assert not nothing
    assert list(found) == list(range(M))
    for m, output in found.items():
        expected = Fork(1)(**Fork(0)(xs[m], keys[m]).output).output
        assert list(output) == ["left", "key", "right"]
        assert all(torch.equal(output[name], expected[name]) for name in expected)


def test_names_travel_in_the_header():
    tensors = NamedTensors({"x": torch.zeros(2, 3), "ids": torch.tensor([1])})
    spec = spec_of(tensors)
    assert spec == (((2, 3), torch.float32, "x"), ((1,), torch.int64, "ids"))
    assert from_header(to_header(spec)) == spec
    assert from_header(to_header(())) == ()
    assert from_header(to_header(spec_of(tuple(tensors)))) == spec_of(tuple(tensors))
    with pytest.raises(ValueError, match="at most 128 bytes together, got 129"):
        to_header((((1,), torch.float32, "a" * 129),))


GIVEN = schedules.gpipe(2, 1), lambda y, _: y.sum(), [torch.ones(2)], [None]
REFUSED = [
    (
        lambda x: {"x": 3},
        {},
        TypeError,
        "must return a tensor, .* a dictionary of tensors may replace the tuple",
    ),
    (lambda x: {1: x}, {}, TypeError, r"stage 0 names its tensors as Python names arguments, got \[1\]; rename them"),
    (lambda x: {"y": x}, {}, TypeError, "unexpected keyword argument 'y'"),
    (lambda x: {"x": x.long()}, {}, ValueError, "stage 0 returned torch.int64 .* no gradient comes back"),
    (lambda x: {}, {}, ValueError, "stage 0 returned nothing"),
    (
        lambda x: {"x": x},
        {"boundary": {"y": torch.ones(2)}},
        ValueError,
        r"stage 0 made x \(2,\) of torch.float32 .* the boundary says y \(2,\)",
    ),
    (
        lambda x: {"x": x},
        {"extra": {1: [{"x": torch.ones(2)}]}},
        ValueError,
        r"each name once, got \['x'\] from the stage before and as extra inputs",
    ),
]


def test_what_is_no_payload_is_refused_without_ranks(subtests):
    program, *batch = GIVEN
    check(program, [Returns(lambda x: {"x": x}), Returns(lambda x: x)], *batch, boundary={"x": torch.ones(2)})
    for make, options, error, message in REFUSED:
        with subtests.test(message=message), pytest.raises(error, match=message):
            check(program, [Returns(make), Returns(lambda x: x)], *batch, **options)
