"""How many ranks may share a stage: the routes that microbatches take, against what the program states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import legal
from slow_reference import random_program

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.lowering import lower, strip
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.validation.rules import routes
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate


def stated(rows, num_directions):
    steps = Program.parse("x", rows).ranks
    return Program("x", steps, num_directions=num_directions)


def problems_of(program):
    with pytest.raises(InvalidProgram) as caught:
        validate(program)
    return list(caught.value.problems)


def test_every_schedule_states_its_directions_and_keeps_to_them(subtests):
    for name in schedules.names():
        with subtests.test(name=name):
            program = next(legal(name, [(4, m) for m in range(1, 17)]))
            assert program.num_directions == len(set(routes(validate(program))))
            assert {lower(program).num_directions, strip(lower(program)).num_directions} == {program.num_directions}


def test_a_stage_on_two_ranks_is_named_where_the_program_states_one_direction():
    rows = ["0F0 0F1 1F2 0B0 0B1 1B2", "1F0 1F1 0F2 1B0 1B1 0B2"]
    validate(stated(rows, None))
    validate(stated(rows, 2))
    assert problems_of(stated(rows, 1)) == [
        "stage 0 works on microbatch 2 on rank 1, on microbatch 0 on rank 0; num_directions=1 allows every stage on "
        "one rank: move it there, or state num_directions=2"
    ]


@given(st.randoms(use_true_random=False))
def test_a_program_is_accepted_exactly_with_as_many_directions_as_it_has_routes(rng):
    program = random_program(rng)
    count = len(set(routes(program)))
    validate(stated(program.rows(), count))
    if count > 1:
        assert all("num_directions" in problem for problem in problems_of(stated(program.rows(), count - 1)))


def test_what_is_stated_is_no_part_of_equality():
    assert stated(["0F0 0B0"], 1) == stated(["0F0 0B0"], None)
