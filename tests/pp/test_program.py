import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import ORACLES
from slow_reference import random_program

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Action, Program

PROGRAMS = {name: rows for name, rows in ORACLES.items() if name != "legend"}


@given(st.randoms(use_true_random=False))
def test_random_programs_round_trip_through_text_and_pickle(rng):
    program = random_program(rng)
    assert Program.parse(program.name, str(program)) == program
    assert Program.parse("lowered", str(lower(program))) == lower(program)
    assert pickle.loads(pickle.dumps(program)) == program
    assert hash(Program.parse("x", program.rows())) == hash(program)


def test_a_bad_token_is_named_with_its_rank_and_position(subtests):
    for token in [
        "0F0junk",
        "F0",
        "0F",
        "0X1",
        "-1F0",
        "0f0",
        "(0F1;0W2)OVERLAP_F_B",
        "(0B1;0F2)OVERLAP_F_B",
        "0F1;0B2",
        "1UNSHARD",
        "٣F0",
    ]:
        with subtests.test(token=token):
            with pytest.raises(ValueError, match="rank 1, position 2: '") as caught:
                Program.parse("bad", ["0F0 0B0", f"1F0 1B0 {token}"])
            assert token in str(caught.value)


def test_rows_may_be_labelled():
    assert Program.parse("x", ["rank 0: 0F0 0B0"]) == Program.parse("x", ["0F0 0B0"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Program.parse("x", ["rank 1: 0F0 0B0"]), ValueError, "row 0 is labelled rank 1"),
        (lambda: Program("x", [[Action(0, "F", 0), "0B0"]]), TypeError, "rank 0, position 1: '0B0' is not an Action"),
        (lambda: schedules.gpipe(2, 2).rank_of(7, 0), KeyError, "7F0"),
    ],
)
def test_what_is_no_program_or_cell_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_programs_differ_by_their_ranks_and_counts_only():
    one, other = Program("a", [[Action(0, "F", 0)]]), Program("b", [[Action(0, "F", 0)]])
    assert one == other
    assert one != Program("a", [[Action(0, "F", 0)]], num_microbatches=2)
    assert one != Program("a", [[Action(0, "F", 1)]])
    assert one != "0F0"
