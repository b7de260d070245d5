"""The model that the pipeline chapters train: every schedule gives its judge's gradients."""

import pytest
import torch

import dualpipe_lab as lab
from dualpipe_lab.pp.runtime import example
from dualpipe_lab.pp.schedules import dualpipe, gpipe, zero_bubble_h1
from dualpipe_lab.timeline import Span


@pytest.mark.parametrize("program", [zero_bubble_h1(2, 4), dualpipe(2, 4)], ids=lambda program: program.name)
def test_a_pipeline_gives_the_gradients_of_accumulation_bit_for_bit(program):
    """Each direction is judged by itself, in the order of its sums."""
    stages, batch = example.make_stages(2), example.make_batch(4)
    run = lab.launch(example.run_steps, 2, program, stages, batch, None, 2, {"sum_copies": False})
    for rank, outcome in enumerate(run):
        for stage, grads in outcome.grads.items():
            order = [a.microbatch for a in program.actions(rank) if a.stage == stage and a.kind in "BW"]
            judge = lab.launch(example.accumulate, 1, stages, batch, order)[0]
            assert example.same(grads, judge[stage])
            assert example.worst_error({stage: grads}, judge) == 0
        assert outcome.peak_activations == lab.simulate(program).peak_activations(rank)
    assert run.ledger.sent("isend") == 2 * 2 * 4 * example.BOUNDARY_BYTES


def test_stages_are_reproducible_and_leave_the_generator_alone():
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    first, second = example.make_stages(2), example.make_stages(2)
    assert torch.equal(torch.rand(2), expected)
    for ours, theirs in zip(first, second, strict=True):
        assert example.same(ours.parameters(), theirs.parameters())
    assert not example.same(first[0].parameters(), example.make_stages(2, seed=1)[0].parameters())


def test_a_wrong_gradient_shows():
    ours, judge = [torch.ones(3)], [[torch.tensor([1.0, 1.5, 1.0])]]
    assert example.worst_error({0: ours}, judge) == pytest.approx(0.5 / 1.5)
    assert not example.same(ours, judge[0])
    with pytest.raises(ValueError, match="is shorter than"):
        example.same(ours, [])


def test_the_median_step_leaves_the_first_one_out():
    rows = [[Span(0, start, start + time, "F", 0, 0, "0F0") for start, time in ((0, 9), (10, 2), (20, 4), (30, 3))]]
    assert example.median_step(lab.Timeline("run", rows), gpipe(1, 1)).makespan == 3
    assert example.median_step(lab.Timeline("run", [rows[0][:1]]), gpipe(1, 1)).makespan == 9
