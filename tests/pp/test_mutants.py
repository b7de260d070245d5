"""Nothing wrong passes and nothing right is refused: mutants of schedules and of random programs, judged by doing."""

import random

from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import legal
from slow_judge import is_right, most_held, mutant
from slow_reference import random_program

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.validation.rules import routes
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate

SIZES = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 8)]


def accepts(program, **options):
    try:
        return validate(program, **options) is program
    except InvalidProgram:
        return False


def agree(program):
    """Whether the validator and the judge find the same, in all three modes; returns the verdict."""
    right = is_right(program)
    assert accepts(program) is right, program
    if program.is_lowered:
        assert accepts(program, blocking=True) is (right and is_right(program, blocking=True)), program
    return right


def test_mutants_of_every_schedule_are_judged_right(subtests):
    for name in schedules.names():
        with subtests.test(name=name):
            rng = random.Random(name)
            programs = list(legal(name, SIZES))
            verdicts = []
            for _ in range(150):
                program = rng.choice(programs)
                program = lower(program) if rng.random() < 0.5 else program
                assert agree(program)
                verdicts.append(agree(mutant(rng, program)))
            assert 3 < sum(verdicts) < 100  # both kinds occur: a judge that says one thing only would be found


@given(st.randoms(use_true_random=False))
def test_mutants_of_random_programs_are_judged_right(rng):
    program = random_program(rng)
    directions = rng.choice([None, len(set(routes(program)))])
    program = Program(program.name, program.ranks, program.num_stages, program.num_microbatches, directions)
    program = lower(program) if rng.random() < 0.5 else program
    assert agree(program)
    for _ in range(rng.randint(1, 3)):
        program = mutant(rng, program)
        if not all(program.ranks):
            break
    agree(program)


@given(st.randoms(use_true_random=False))
def test_the_bound_on_held_activations_is_the_judge_s(rng):
    original = random_program(rng)
    bounds = most_held(original)
    assert accepts(original, in_flight=bounds)
    program = mutant(rng, original)
    fits = is_right(program) and all(peak <= bound for peak, bound in zip(most_held(program), bounds, strict=True))
    assert accepts(program, in_flight=bounds) is fits
