import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import ORACLES
from slow_reference import random_program

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Action, Overlap, Program, parse_action

PROGRAMS = {name: rows for name, rows in ORACLES.items() if name != "legend"}


@given(st.randoms(use_true_random=False))
def test_random_programs_round_trip_through_text_and_pickle(rng):
    program = random_program(rng)
    assert Program.parse(program.name, str(program)) == program
    assert Program.parse("lowered", str(lower(program))) == lower(program)
    assert pickle.loads(pickle.dumps(program)) == program
    assert hash(Program.parse("x", program.rows())) == hash(program)


def test_dualpipe_keeps_a_stage_on_two_ranks_by_microbatch():
    program = Program.parse("DualPipe", PROGRAMS["dualpipe 8 ranks 20 microbatches"])
    assert (program.num_ranks, program.num_stages, program.num_microbatches) == (8, 8, 20)
    assert all(program.rank_of(stage, m) == (stage if m < 10 else 7 - stage) for stage in range(8) for m in range(20))
    assert sum(1 for _ in program) == sum(len(list(program.actions(rank))) for rank in range(8))


def test_a_pair_is_written_as_torch_writes_it():
    pair = Overlap(Action(0, "F", 7), Action(7, "I", 3))
    assert parse_action(str(pair)) == pair
    assert parse_action("12RECV_B345") == Action(12, "RECV_B", 345)


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
