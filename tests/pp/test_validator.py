import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_reference import random_program

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.lowering import lower, strip
from dualpipe_lab.pp.program import Action, Overlap, Program
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate


def problems_of(rows, **options):
    with pytest.raises(InvalidProgram) as caught:
        validate(rows if isinstance(rows, Program) else Program.parse("broken", rows), **options)
    return "\n".join(caught.value.problems)


@given(st.randoms(use_true_random=False))
def test_random_programs_are_valid_and_lowering_is_safe_for_blocking_messages(rng):
    program = random_program(rng)
    lowered = validate(lower(validate(program)), blocking=True, in_order=True)
    assert strip(lowered) == program
    assert lower(lowered) == lowered


CASES = {
    "duplicate F": (["0F0 0F0 0B0"], "rank 0, position 1: 0F0 runs again, it ran at rank 0, position 0"),
    "duplicate B": (["0F0 0B0 0B0"], "0B0 runs again"),
    "B after I and W": (["0F0 0I0 0W0 0B0"], "stage 0, microbatch 0: B and I and W, so a gradient is computed twice"),
    "missing W": (["0F0 0I0"], "stage 0, microbatch 0: I without W"),
    "missing I": (["0F0 0W0"], "W without I"),
    "missing B": (["0F0 0F1 0B0"], "stage 0, microbatch 1: F without a backward"),
    "missing F": (["0F0 0B0 0B1"], "stage 0, microbatch 1: B without F"),
    "one stage skips a microbatch": (["0F0 0F1 0B0 0B1", "1F0 1B0"], "stage 1, microbatch 1: no work at all"),
    "last rank off by one": (["0F0 0F1 0B0 0B1", "1F1 1B1 1F2 1B2"], "stage 0, microbatch 2: no work at all"),
    "huge microbatch": (
        ["0F0 0B0 0F1000000000 0B1000000000"],
        "microbatches run from 0 to 1000000000, but no rank runs 1",
    ),
    "missing stage": (["0F0 0B0", "2F0 2B0"], "stages run from 0 to 2, but no rank runs 1"),
    "one microbatch on two ranks": (["0F0 0B0", "0F0 0B0"], "rank 1, position 0: 0F0 runs again"),
    "backward elsewhere": (["0F0", "0B0"], "0F0 is on rank 0 and 0B0 on rank 1"),
    "W elsewhere": (["0F0 0I0 1F0 1B0", "0W0"], "0I0 is on rank 0 and 0W0 on rank 1"),
    "B before F": (["0B0 0F0"], r"rank 0: 0B0 (position 0) comes before 0F0 (position 1)"),
    "W before I": (["0F0 0W0 0I0"], r"0W0 (position 1) comes before 0I0 (position 2)"),
    "own pair": (["(0F0;0B0)OVERLAP_F_B"], "0B0 needs the result of 0F0, they cannot be a pair"),
    "idle rank": (["0F0 0B0", ""], "rank 1 has no actions"),
    "no ranks": ([], "it has no ranks"),
    "V turned around": (["1F0 0F0 1B0 0B0"], "the activation of 0F0 on the same rank (position 1)"),
    "pair in a cycle": (["0F0 0F1 (1F0;0B0)OVERLAP_F_B 1B0 1F1 1B1 0B1"], "the gradient of 1B0 on the same rank"),
}


def test_what_is_wrong_is_said(subtests):
    for case in CASES:
        with subtests.test(case=case):
            rows, expected = CASES[case]
            assert expected in problems_of(rows)
            with pytest.raises(InvalidProgram):
                simulate(Program.parse("broken", rows))


def test_stray_actions_are_named():
    work = [Action(0, "F", 0), Action(0, "B", 0)]
    assert "0F1 has microbatch 1, out of range 0..0" in problems_of(
        Program("x", [[*work, Action(0, "F", 1), Action(0, "B", 1)]], num_stages=1, num_microbatches=1)
    )
    assert "-1F0 has stage -1, out of range" in problems_of(Program("x", [[*work, Action(-1, "F", 0)]]))
    assert "0X0 is of the unknown kind 'X'" in problems_of(Program("x", [[*work, Action(0, "X", 0)]]))
    assert "must pair an F with a B or I" in problems_of(Program("x", [[Overlap(work[1], work[0])]]))


LOWERED = ["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"]
MESSAGE_CASES = {
    "missing receive": ("1RECV_F1 ", "", "1RECV_F1 is missing; it belongs before 1F1 (rank 1, position 4)"),
    "missing send": ("0SEND_F1 ", "", "0SEND_F1 is missing; it belongs after 0F1 (rank 0, position 2)"),
    "sent too early": ("0F1 0SEND_F1", "0SEND_F1 0F1", "0SEND_F1 is in the wrong place; it belongs after 0F1"),
    "received too late": ("0RECV_B0 0B0", "0B0 0RECV_B0", "0RECV_B0 is in the wrong place; it belongs before 0B0"),
    "sent twice": ("0SEND_F1", "0SEND_F1 0SEND_F1", "0SEND_F1 runs again"),
    "sent nowhere": ("1B1 ", "1B1 1SEND_F1 ", "1SEND_F1 has no other end on another rank; remove it"),
    "swapped": (
        "0SEND_F0 0F1 0SEND_F1",
        "0F1 0SEND_F1 0SEND_F0",
        "rank 0 sends 0SEND_F1 where rank 1 expects the other",
    ),
}


def test_what_is_wrong_with_messages_is_said(subtests):
    for case in MESSAGE_CASES:
        with subtests.test(case=case):
            old, new, expected = MESSAGE_CASES[case]
            rows = [row.replace(old, new) for row in LOWERED]
            assert rows != LOWERED
            validate(Program.parse("whole", LOWERED))
            assert expected in problems_of(rows)


def test_a_deadlock_is_explained_by_its_smallest_cycle():
    # Ranks 0 and 1 wait for each other; ranks 2 and 3 wait for rank 1, but are not part of the cycle.
    rows = ["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"]
    text = problems_of(rows)
    assert text.splitlines() == [
        "deadlock: ranks 0 and 1 wait for each other",
        "      rank 0 stands before 0B0 (position 1), which needs the gradient of 1B0 on rank 1 (position 2)",
        "      rank 1 stands before 1F1 (position 0), which needs the activation of 0F1 on rank 0 (position 2)",
        "      fix: move 0F1 on rank 0 from position 2 to position 1, before 0B0; then it runs to its end",
    ]


def test_blocking_messages_deadlock_where_buffered_ones_do_not():
    rows = ["0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", LOWERED[1]]
    program = validate(Program.parse("both send", rows))
    text = problems_of(program, blocking=True)
    assert "rank 0 stands before 0SEND_F1 (position 3), which needs 1RECV_F1 on rank 1 (position 4)" in text
    assert "rank 1 stands before 1SEND_B0 (position 3), which needs 0RECV_B0 on rank 0 (position 4)" in text


def test_in_one_order_the_steady_state_of_1f1b_must_send_before_it_receives():
    lowered = lower(schedules.one_f_one_b(2, 3))
    receives_first = swapped(lowered, 0, "0SEND_F1", "0RECV_B0")
    validate(receives_first)  # buffered messages, each direction in its own order
    assert problems_of(receives_first, in_order=True) == (
        "deadlock in order: message 1 between ranks 0 and 1 is 0RECV_B0 for rank 0 (position 3) and 1RECV_F1 for rank "
        "1 (position 2); NCCL has no tags and completes the messages between two ranks in the order of their launch; "
        "lower() the program anew"
    )
    assert validate(lower(receives_first), in_order=True) == lowered


def test_in_one_order_each_pair_of_ranks_has_a_queue_of_its_own():
    """Three ranks send round a ring before they receive: a deadlock with blocking messages, none with NCCL's queues."""
    first = ["0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2", *(through(stage, "RECV_F", "F", "SEND_F") for stage in (1, 2))]
    second = [through(3, "RECV_F", "F"), "", ""]
    third = [through(3, "B", "SEND_B"), "", ""]
    last = [through(stage, "RECV_B", "B", *["SEND_B"] * (stage > 0)) for stage in (0, 1, 2)]
    program = Program.parse("ring", list(map(" ".join, zip(first, second, third, last, strict=True))))
    validate(program, in_order=True)
    assert "ranks 0, 1 and 2 wait for each other" in problems_of(program, blocking=True)


def through(stage, *kinds):
    return " ".join(f"{stage}{kind}{microbatch}" for microbatch in range(3) for kind in kinds)


def swapped(program, rank, first, second):
    row = program.rows()[rank].split()
    one, two = row.index(first), row.index(second)
    row[one], row[two] = second, first
    return Program.parse("swapped", [*program.rows()[:rank], " ".join(row), *program.rows()[rank + 1 :]])


def test_the_number_of_held_activations_can_be_bounded():
    program = schedules.one_f_one_b(4, 8)
    assert "rank 0, position 3: 0F3 makes it hold 4 activations, the bound is 3" in problems_of(program, in_flight=3)
    assert "rank 1" in problems_of(schedules.gpipe(2, 2), in_flight=[2, 1])
    with pytest.raises(ValueError, match="in_flight lists 2 bounds, the program has 4 ranks"):
        validate(program, in_flight=[1, 2])


def test_many_problems_are_listed_briefly_and_the_error_crosses_processes():
    rows = [" ".join(f"0F{m} 0F{m} 0B{m}" for m in range(100))]
    with pytest.raises(InvalidProgram, match="has 100 problems") as caught:
        validate(Program.parse("all twice", rows))
    assert len(caught.value.problems) == 12
    assert str(caught.value).endswith("and 88 more")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems) == (str(caught.value), caught.value.problems)
