"""The check of compact programs refuses what the validator refuses, and names what deadlocks."""

import random
from dataclasses import replace

import numpy as np
import pytest
from compact_cases import (
    COSTS,
    check_numbers,
    refusal,
    with_order,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_grid import legal
from slow_judge import mutant
from slow_reference import random_program

from dualpipe_lab.pp import CompactProgram, compact_build, compact_simulate, schedules
from dualpipe_lab.pp.compact.order import find_execution
from dualpipe_lab.pp.compact.program import _converted
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Action, Overlap, Program
from dualpipe_lab.pp.validation.rules import routes
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate


def agrees(program, rng):
    """Whether the program is right, for the validator, for `of` and for the check alike; checks its numbers."""
    refused = refusal(validate, program)
    assert refusal(CompactProgram.of, program) == refused
    if refused and not program.is_lowered:
        with pytest.raises((InvalidProgram, KeyError)):  # the check by itself; KeyError: an unknown kind
            _converted(program).check()
    elif not refused:
        compact = CompactProgram.of(program)
        cost = rng.choice(COSTS)(rng, program.num_stages)
        check_numbers(program, cost, *(with_order(compact, wide) for wide in (False, True)))
    return not refused


@settings(deadline=None, max_examples=120)
@given(st.randoms(use_true_random=False))
def test_the_check_refuses_what_the_validator_refuses(rng):
    program = random_program(rng)
    directions = rng.choice([None, 1, len(set(routes(program)))])
    program = Program(program.name, program.ranks, program.num_stages, program.num_microbatches, directions)
    for _ in range(rng.randint(0, 3)):
        program = mutant(rng, program)
    agrees(program, rng)


@pytest.mark.parametrize("name", schedules.names())
def test_mutants_of_every_schedule_are_refused_as_by_the_validator(name):
    rng = random.Random(name)
    programs = list(legal(name, [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 8)]))
    verdicts = []
    for _ in range(80):
        program = mutant(rng, rng.choice(programs))
        verdicts.append(
            agrees(lower(program) if rng.random() < 0.2 and not refusal(validate, program) else program, rng)
        )
    assert 3 < sum(verdicts) < 60  # both kinds occur


DEADLOCK = Program.parse("crossed", ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"])
PAIRS = Program.parse("pairs", ["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (
            DEADLOCK,
            [
                "ranks 0 and 1 wait for each other",
                "rank 0 stands before 0B0 (position 1), which needs the gradient of 1B0 on rank 1 (position 3)",
                "rank 1 stands before 1F1 (position 0), which needs the activation of 0F1 on rank 0 (position 2)",
            ],
        ),
        (
            PAIRS,
            [
                "rank 0 stands before 0B0 (position 1), which needs the gradient of 1B0 on rank 1 (position 1)",
                "rank 1 stands before 1F1 (position 1), which needs the activation of 0F1 on rank 0 (position 1)",
            ],
        ),
        (Program.parse("alone", ["0F0 1F1 1B1 0F1 1F0 1B0 0B0 0B1"]), ["rank 0 is stuck", "the activation of 0F1 on"]),
    ],
)
def test_a_deadlock_names_the_actions(program, lines, wide):
    compact = _converted(program)
    with pytest.raises(InvalidProgram) as raised:
        find_execution(compact, compact.wiring.source, wide=wide)
    for line in lines:
        assert line in str(raised.value)
    with pytest.raises(InvalidProgram, match="deadlock"):
        compact_simulate(compact)
    with pytest.raises(InvalidProgram, match="fix: "):  # the validator's report
        CompactProgram.of(program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": {0: 1}}, "stage 0, microbatch 0: no F; every stage runs every microbatch"),
        ({"kind": {0: 7}}, r"rank 0, position 0: the action has kind 7, out of range 0\.\.3"),
        ({"stage": {5: 3}}, r"rank 1, position 1: the action has stage 3, out of range 0\.\.1"),
        ({"microbatch": {5: -1}}, r"rank 1, position 1: the action has microbatch -1"),
        ({"microbatch": {0: 1}}, "stage 0, microbatch 1: F runs again; keep one"),
        ({"kind": {2: 2}}, "stage 0, microbatch 0: I without W; add it"),
        ({"second": {1: True}}, "0F1 must be the B or I of a pair, behind its F"),
        ({"second": {0: True}}, "0F0 must be the B or I of a pair, behind its F"),
        ({"second": {5: True}}, r"1B0 \(rank 1, position 0\) needs 1F0 \(rank 1, position 0\) in an earlier step"),
        ({"kind": {4: 1, 5: 0}}, r"1B0 \(rank 1, position 0\) needs 1F0 \(rank 1, position 1\) in an earlier step"),
        ({"num_microbatches": 3}, r"stage 0, microbatch 2 \(and 1 more\): no F"),
        ({"num_directions": 0}, "take 1 routes through the ranks, num_directions=0"),
        ({"offsets": [0, 4, 4, 8]}, "rank 1 has no actions"),
        ({"offsets": [0, 5, 8]}, r"1B0 \(rank 1, position 0\) needs 1F0 \(rank 0, position 4\)"),
    ],
)
def test_arrays_that_are_no_program_are_explained(change, message):
    compact = compact_build("1f1b", 2, 2)
    with pytest.raises(InvalidProgram, match=message):
        replace(compact, **{name: _changed(getattr(compact, name), value) for name, value in change.items()}).check()


def _changed(old, new):
    if isinstance(new, int):
        return new
    if isinstance(new, list):
        return np.array(new)
    array = old.copy()
    for index, value in new.items():
        array[index] = value
    return array


def test_empty_programs_are_refused():
    for rows in ([], [[]]):
        with pytest.raises(InvalidProgram):
            CompactProgram.of(Program("empty", rows))
    nothing = np.zeros(0, np.int32)
    columns = [nothing, nothing, nothing, nothing.astype(bool)]
    with pytest.raises(InvalidProgram, match="no ranks"):
        CompactProgram("none", 0, 0, np.zeros(1, np.int64), *columns).check()
    with pytest.raises(ValueError, match="offsets that grow from 0"):
        CompactProgram("none", 0, 0, np.array([0, 2]), *columns)


def test_indices_beyond_the_arrays_are_refused_by_the_validator():
    for stage in (10**6, 2**40):
        with pytest.raises(InvalidProgram, match="stage"):
            CompactProgram.of(Program("far", [[Action(0, "F", 0), Action(stage, "B", 0)]]))
    with pytest.raises(InvalidProgram, match="unknown kind"):
        CompactProgram.of(Program("odd", [[Action(0, "X", 0), Action(0, "B", 0)]]))
    with pytest.raises(InvalidProgram, match="must pair"):
        CompactProgram.of(Program("odd", [[Overlap(Action(0, "B", 0), Action(0, "F", 0))]]))
