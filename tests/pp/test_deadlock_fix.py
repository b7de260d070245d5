"""A deadlock names the action to move: following the advice, read from its text, ends the deadlock."""

import re

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_reference import how_far, random_program, runs_to_its_end

from dualpipe_lab.pp.lowering import lower, strip
from dualpipe_lab.pp.program import parse_action
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate

MOVE = re.compile(r"move (\S+) on rank (\d+) from position (\d+) to position (\d+), (before|behind) (\S+)[;,] ")
TAKE = re.compile(
    r"take (\S+) out of (\S+) on rank (\d+) \(position (\d+)\) and run it at position (\d+), (before|behind) (\S+)[;,] "
)


def deadlock(program, **options):
    """The text of the deadlock; None for a program that is valid or has other problems."""
    try:
        validate(program, **options)
    except InvalidProgram as error:
        return error.problems[0] if error.problems[0].startswith("deadlock") else None
    return None


def followed(program, text):
    """The program after what the text tells to do, and whether it promises that no more is needed."""
    advice = text[text.index("fix:") :]
    if advice.startswith("fix: lower()"):
        return lower(strip(program)), True
    if advice.startswith("fix: strip()"):
        program = strip(program)
    rows = [list(steps) for steps in program.ranks]
    if found := MOVE.search(advice):
        token, rank, position, target, side, neighbour = found.groups()
        row = rows[int(rank)]
        step = row.pop(int(position))
        assert str(step) == token
    else:
        token, pair, rank, position, target, side, neighbour = TAKE.search(advice).groups()
        row, step = rows[int(rank)], parse_action(token)
        assert str(row[int(position)]) == pair
        row[int(position) : int(position) + 1] = [a for a in row[int(position)] if a != step]
    target = int(target)
    assert str(row[target] if side == "before" else row[target - 1]) == neighbour
    row.insert(target, step)
    moved, promised = program.with_ranks(rows), "then it runs to its end" in advice
    return lower(moved) if promised and "lower() it again" in advice else moved, promised


def shuffled(rng, program, moves):
    """The program after some steps went to another place of their rank."""
    rows = [list(steps) for steps in program.ranks]
    for _ in range(moves):
        row = rng.choice(rows)
        row.insert(rng.randrange(len(row)), row.pop(rng.randrange(len(row))))
    return program.with_ranks(rows)


def broken(rng, make, moves, **options):
    """A random program in which `moves` steps moved and which is stuck since; and what the validator says."""
    for _ in range(60):
        program = shuffled(rng, make(rng), moves)
        if text := deadlock(program, **options):
            return program, text
    return assume(False)


@given(st.randoms(use_true_random=False))
def test_what_one_move_broke_one_move_mends(rng):
    program, text = broken(rng, random_program, 1)
    mended, promised = followed(program, text)
    assert promised
    assert runs_to_its_end(validate(mended))


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_following_the_advice_again_and_again_ends_every_deadlock(rng):
    program, text = broken(rng, random_program, rng.randint(2, 6))
    for _ in range(sum(1 for _ in program)):  # each move lets at least one more action run
        before = how_far(program)
        program, promised = followed(program, text)
        again = deadlock(program)
        if again is None:
            break
        assert how_far(program) > before
        assert not promised
        text = again
    assert runs_to_its_end(validate(program))


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.booleans())
def test_the_advice_for_programs_with_messages_is_right_too(rng, blocking):
    program, text = broken(rng, lambda rng: lower(random_program(rng)), rng.randint(1, 2), blocking=blocking)
    for _ in range(20):
        program, _ = followed(program, text)
        text = deadlock(program, blocking=blocking)
        if text is None:
            break
    validate(lower(program) if not program.is_lowered else program, blocking=blocking)
