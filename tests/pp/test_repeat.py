"""Several steps in a row: the numbers of the slow reference, and the exact time of one more step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_judge import is_right
from slow_reference import random_cost, random_program, solve

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Action, actions_of, parse_action
from dualpipe_lab.pp.repeat import repeat, simulate_steps, step_time
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import validate


@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_without_a_barrier_the_steps_are_one_program(rng, num_steps):
    program = random_program(rng)
    cost = random_cost(rng, program.num_stages)
    several = repeat(program, num_steps)
    assert is_right(validate(several))
    size = program.num_microbatches
    for rank, steps in enumerate(program.ranks):
        expected = [
            (a.stage, a.kind, a.microbatch + k * size) for k in range(num_steps) for s in steps for a in actions_of(s)
        ]
        assert list(map(tuple, several.actions(rank))) == expected
    found = simulate_steps(program, num_steps, cost)
    assert {part: (s.start, s.end) for row in found.spans_by_rank for s in row for part in s.actions} == solve(
        several, cost
    )


@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_with_a_barrier_the_steps_are_copies(rng, num_steps):
    program = random_program(rng)
    cost = random_cost(rng, program.num_stages)
    one, several = simulate(program, cost), simulate_steps(program, num_steps, cost, barrier=True)
    times, size = solve(program, cost), program.num_microbatches
    assert several.makespan == num_steps * one.makespan
    assert len(several.messages) == num_steps * len(one.messages)
    for rank, row in enumerate(several.spans_by_rank):
        for index, span in enumerate(row):
            k = index // len(program.ranks[rank])
            assert span.label == str(repeat(program, num_steps).ranks[rank][index])
            for stage, kind, m in span.actions:
                start, end = times[stage, kind, m - k * size]
                assert (span.start, span.end) == (start + k * one.makespan, end + k * one.makespan)
    for index, message in enumerate(several.messages):
        (made_by,) = actions_of(parse_action(message.label))
        k = index // max(len(one.messages), 1)
        end = times[Action(made_by.stage, made_by.kind, made_by.microbatch - k * size)][1]
        assert message.sent == end + k * one.makespan <= message.arrived <= (k + 1) * one.makespan


@given(st.randoms(use_true_random=False))
def test_the_time_of_a_step_lies_between_work_and_makespan_and_is_the_long_run_s(rng):
    program = random_program(rng)
    cost = Cost(*[[rng.randint(0, 5) for _ in range(program.num_stages)] for _ in range(3)], latency=rng.randint(0, 2))
    one, time = simulate(program, cost), step_time(program, cost)
    assert max(map(one.busy_time, range(program.num_ranks))) <= time <= one.makespan
    assert step_time(program, cost, barrier=True) == one.makespan
    few, many = (simulate_steps(program, n, cost).makespan for n in (8, 40))
    assert abs(many - few - 32 * time) <= one.makespan


def test_at_least_one_step():
    for call in (repeat, simulate_steps):
        with pytest.raises(ValueError, match="num_steps to be an integer of at least 1, got 0"):
            call(schedules.gpipe(2, 2), 0)
    with pytest.raises(ValueError, match="num_steps"):
        simulate_steps(schedules.gpipe(2, 2), 0, barrier=True)
