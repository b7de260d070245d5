"""What changes between two steps of a runtime, refused or followed in the third as in the first."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import dualpipe_lab as lab
from dualpipe_lab import dp, pp, schedules
from dualpipe_lab.pp.runtime.rank_plan import plan_rank

ROWS, WIDTH, MICROBATCHES = 8, 6, 4


def layers(program, rank):
    torch.manual_seed(0)
    every = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(program.num_stages)]
    return every, {action.stage: every[action.stage] for action in program.actions(rank)}


def draw(seed, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, WIDTH, dtype=torch.float64, generator=generator)


def grads(stages):
    return {(i, name): p.grad.clone() for i, stage in stages.items() for name, p in stage.named_parameters()}


def batches_of_several_sizes(rank, world_size, names):
    """By schedule, how far the gradients of later batches are from those of one process."""
    worst = dict.fromkeys(names, 0.0)
    for name in names:
        program = schedules.build(name, world_size, MICROBATCHES)
        every, stages = layers(program, rank)
        runtime = lab.PipelineRuntime(program, stages, mse_loss)
        for number, rows in enumerate((8, 8, 16, 8, 12, 16)):
            x, y = draw(number, rows)
            for stage in every:
                stage.zero_grad()
            runtime.step(x, y)
            found = grads(stages)
            for stage in every:
                stage.zero_grad()
            mse_loss(nn.Sequential(*every)(x), y).backward()
            expected = grads(stages)
            assert found.keys() == expected.keys()
            worst[name] = max(worst[name], *(float((found[key] - expected[key]).abs().max()) for key in found))
    return worst


def test_messages_are_made_anew_for_shapes_that_come_later():
    names = ("1f1b", "paired_1f1b", "zero_bubble_h1", "dualpipev", "dualpipe")
    for worst in lab.launch(batches_of_several_sizes, 2, names):
        assert max(worst.values()) < 1e-12, worst


def read(rank, world_size, program, later, batch):
    """Two steps on one batch, if `later`, and one on the batches that a function gives to this rank."""
    _, stages = layers(program, rank)
    runtime = lab.PipelineRuntime(program, stages, mse_loss)
    for _ in range(2 * later):
        runtime.step(*draw(0))
    return runtime.step(*batch(rank)).loss


def shuffled(rank, ranks=(0, 1)):
    return draw(1 + (rank == ranks[1]))


def unequal_rows(rank):
    return draw(0, ROWS * (rank + 1))


def other_targets(rank):
    x, y = draw(0)
    return x, y + rank


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("batch", "what"), [(shuffled, "inputs"), (unequal_rows, "inputs"), (other_targets, "targets")]
)
def test_ranks_of_a_pipeline_read_one_batch(batch, what, later):
    message = rf"ranks 0 and 1 of the pipeline have other {what} for microbatch 0, .*one batch.*or leave out"
    with pytest.raises(lab.RankError, match=message):
        lab.launch(read, 2, schedules.build("1f1b", 2, MICROBATCHES), later, batch)


def what_is_read(rank):
    x, y = draw(3)
    return (x, None) if rank == 0 else (None, y)


def test_what_a_rank_does_not_read_may_be_left_out():
    program = schedules.build("1f1b", 2, MICROBATCHES)
    found = lab.launch(read, 2, program, True, what_is_read)[1], lab.launch(read, 2, program, True, same)[1]
    assert torch.equal(*found)


def same(rank):
    return draw(3)


def later_rows(rank):
    x, y = draw(0)
    x[ROWS // 2 :] += rank
    return x, y


def test_both_directions_are_compared():
    program = schedules.build("dualpipe", 2, MICROBATCHES)
    with pytest.raises(lab.RankError, match="ranks 1 and 0 of the pipeline have other inputs for microbatch 2"):
        lab.launch(read, 2, program, True, later_rows)


def replace_a_stage(rank, world_size, later, kind):
    program = schedules.build("1f1b", 2, MICROBATCHES)
    _, stages = layers(program, rank)
    given = kind({str(i): stage for i, stage in stages.items()}) if kind is nn.ModuleDict else kind(stages)
    runtime = lab.PipelineRuntime(program, given, mse_loss)
    for _ in range(2 * later):
        runtime.step(*draw(0))
    key = str(rank) if kind is nn.ModuleDict else rank
    given[key] = nn.Linear(WIDTH, WIDTH).double()
    runtime.step(*draw(0))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("kind", [nn.ModuleDict, dict])
def test_a_stage_that_is_replaced_is_told(kind, later):
    with pytest.raises(lab.RankError, match=r"stage [01] was replaced after the runtime was made.*PipelineRuntime\("):
        lab.launch(replace_a_stage, 2, later, kind)


def step_pairs(rank, world_size, program, options):
    _, stages = layers(program, rank)
    runtime = lab.PipelineRuntime(program, stages, mse_loss, **options)
    runtime.step(*draw(0))
    return grads(stages)


def run_by_hook(forward, backward):
    forward.run()
    backward.run()


def test_a_forward_leaves_before_the_backward_of_its_pair_begins():
    """Where nothing overlaps; a hook gets both actions, and their results leave together."""
    program = schedules.build("paired_1f1b", 2, 8)
    plain, hooked = (lab.launch(step_pairs, 2, program, one) for one in ({}, {"overlapped": run_by_hook}))
    for rank in range(2):
        assert all(torch.equal(plain[rank][key], hooked[rank][key]) for key in plain[rank])
    pairs = [step for step in program.ranks[0] if hasattr(step, "forward")]
    assert pairs
    for run, is_early in ((plain, True), (hooked, False)):
        sent = {message.label: message.sent for message in run.timeline.messages}
        spans = {span.label: span for span in run.timeline.spans_by_rank[0]}
        for pair in pairs:
            begun = spans[str(pair.backward)].start if is_early else spans[str(pair)].end
            assert (sent[str(pair.forward)] <= begun) is is_early


def test_a_first_stage_ends_with_the_i_that_is_its_whole_backward():
    """So data parallelism sums while it runs, and not behind the W that has nothing left to do."""
    program = schedules.build("zero_bubble_h1", 2, MICROBATCHES)
    work = [one for planned in plan_rank(pp.lower(program), 0, 2) for one in planned.work]
    assert [one.label for one in work if one.ends_stage and one.is_full_backward] == ["0I3", "0W3"]


def sum_later(rank, world_size):
    """An optimizer that is made after a step: the pipeline tells it when gradients are complete."""
    mesh = lab.Mesh(lab.Topology([("pp", 1), ("dp", world_size)]))
    program = schedules.build("1f1b", 1, MICROBATCHES)
    _, stages = layers(program, 0)
    runtime = lab.PipelineRuntime(program, stages, mse_loss, group=mesh.group("pp"))
    x, y = draw(0, ROWS * world_size)
    mine = slice(ROWS * rank, ROWS * (rank + 1))
    runtime.step(x[mine], y[mine])
    stages[0].zero_grad()
    optimizer = dp.Zero1(nn.ModuleDict({"0": stages[0]}), mesh, lr=0.0)
    runtime.step(x[mine], y[mine])
    found = dp.full_gradients(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    _, alone = layers(program, 0)
    mse_loss(alone[0](x), y).backward()
    expected = {f"0.{name}": p.grad for name, p in alone[0].named_parameters()}
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def test_an_optimizer_that_comes_after_a_step_is_found():
    assert max(lab.launch(sum_later, 2)) < 1e-12


def close_later(rank, world_size):
    """Gradients of a step after its reducer was closed: this rank's own."""
    mesh = lab.Mesh(lab.Topology([("pp", 1), ("dp", world_size)]))
    program = schedules.build("1f1b", 1, MICROBATCHES)
    _, stages = layers(program, 0)
    runtime = lab.PipelineRuntime(program, stages, mse_loss, group=mesh.group("pp"))
    reducer = dp.GradientReducer(stages[0].parameters(), mesh.group("dp"), num_backwards=MICROBATCHES)
    batch = draw(rank)
    runtime.step(*batch)
    reducer.finish()
    reducer.close()
    for parameter in stages[0].parameters():
        parameter.grad = None
    runtime.step(*batch)
    found = grads(stages)
    stages[0].zero_grad()
    mse_loss(stages[0](batch[0]), batch[1]).backward()
    expected = grads(stages)
    return max(float((found[key] - expected[key]).abs().max()) for key in expected)


def test_a_reducer_that_is_closed_is_told_no_more():
    assert max(lab.launch(close_later, 2)) < 1e-12


def count_calls(rank, world_size, name):
    program = schedules.build(name, 2, 8)
    _, stages = layers(program, rank)
    runtime = lab.PipelineRuntime(program, stages, mse_loss)
    step = partial(runtime.step, *draw(0))
    step()
    step()
    events = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    step()
    sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events) - 1


def test_a_third_step_makes_no_more_calls_than_torchs():
    """Python's and C's, beside Schedule1F1B of torch 2.13 on Python 3.11 (`benchmarks/pp.py` has all schedules)."""
    assert lab.launch(count_calls, 2, "1f1b")[0] <= 2_898
