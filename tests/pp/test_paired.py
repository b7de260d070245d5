"""Paired twins: against their closed forms, and the schedules that they are twins of."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import EXACT, SIZES, num_crossings

from dualpipe_lab.pp import closed_forms, schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import B, F, Overlap, Program
from dualpipe_lab.pp.schedules import interleaved, paired_interleaved, paired_one_f_one_b, paired_zero_bubble_h1
from dualpipe_lab.pp.schedules.looped import round_sizes
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import validate

FORMS = {
    paired_interleaved: closed_forms.paired_interleaved_makespan,
    paired_zero_bubble_h1: closed_forms.paired_zero_bubble_h1_makespan,
}


def lap(p, m, v):
    return (v - 1) * round_sizes(p, m)[0]


def has_form(build, p, m, v):
    return build is paired_interleaved or p == 1 or m >= (2 * p if v > 1 else 3 * p - 4)


def peaks_of(build, p, m, v):
    split = build is paired_zero_bubble_h1
    return [min(v * m, lap(p, m, v) + 2 * (p - rank) + rank * split) for rank in range(p)]


def pairs_of(program):
    return [sum(isinstance(step, Overlap) for step in steps) for steps in program.ranks]


@given(p=st.integers(1, 12), m=st.integers(1, 48), v=st.integers(1, 5), f=EXACT, i=EXACT, w=EXACT, share=EXACT)
def test_any_size_and_exact_costs(p, m, v, f, i, w, share):
    pair = max(f, i + w) + min(f, i + w) * Fraction(share) / 40  # from all hidden to longer than one after the other
    cost = Cost(F=f, I=i, W=w, overlap=pair)
    for build, form in FORMS.items():
        program = build(p, m, v)
        validate(program, in_flight=peaks_of(build, p, m, v))
        timeline = simulate(program, cost)
        split = build is paired_zero_bubble_h1
        warmup = [lap(p, m, v) + 2 * (p - 1 - rank) + 1 + rank * split for rank in range(p)]
        assert pairs_of(program) == [max(0, v * m - forwards) for forwards in warmup]
        assert [timeline.peak_activations(rank) for rank in range(p)] == peaks_of(build, p, m, v)
        assert len(timeline.messages) == 2 * num_crossings(program) == closed_forms.looped_num_messages(p, m, v)
        if has_form(build, p, m, v):
            assert timeline.makespan == form(p, m, v, cost)
            for rank, pairs in enumerate(pairs_of(program)):
                idle = timeline.makespan - v * m * (f + i + w) + pairs * (f + i + w - pair)
                assert timeline.bubble_time(rank) == idle


def test_a_twin_keeps_its_schedule_s_order_of_forwards_and_of_backwards():
    assert paired_interleaved(4, 9, 1) == paired_one_f_one_b(4, 9) == schedules.build("paired 1F1B", 4, 9)
    assert closed_forms.paired_one_f_one_b_makespan(8, 24, Cost(F=2, I=2, W=2, overlap=5)) == 163
    for p, m in SIZES:
        for v in (1, 2, 3):
            for mine, theirs in zip(paired_interleaved(p, m, v).ranks, interleaved(p, m, v).ranks, strict=True):
                flat = list(Program("flat", [mine]).actions(0))
                for kind in (F, B):
                    assert [a for a in flat if a.kind == kind] == [a for a in theirs if a.kind == kind]


def test_fewer_warm_up_forwards_make_neighbours_wait_for_each_other_s_pairs():
    rows = ["0F0 0F1 (0F2;0B0)OVERLAP_F_B (0F3;0B1)OVERLAP_F_B 0B2 0B3"]
    rows += ["1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B (1F3;1B2)OVERLAP_F_B 1B3"]
    short, cost = Program.parse("one forward per rank below", rows), Cost(F=2, I=2, W=2, overlap=5)
    assert simulate(short, cost).makespan > simulate(paired_one_f_one_b(2, 4), cost).makespan


@pytest.mark.parametrize("build", [paired_one_f_one_b, *FORMS])
def test_sizes_are_counted(build):
    with pytest.raises(ValueError, match=rf"{build.__name__} needs num_microbatches to be an integer"):
        build(2, 0)


REFUSED = [
    (lambda: paired_interleaved(2, 4, 0), "paired_interleaved needs num_virtual_stages to be an integer"),
    (lambda: closed_forms.paired_interleaved_makespan(2, 4, 2, Cost(latency=1)), "got latency=1; use simulate"),
    (lambda: closed_forms.paired_one_f_one_b_makespan(2, 4, Cost(F=[1, 2])), r"got F=\[1, 2\]; use simulate"),
    (
        lambda: closed_forms.paired_interleaved_makespan(2, 4, 2, Cost(overlap=1)),
        "got overlap=1 for F=1 and B=2; use 2",
    ),
    (lambda: closed_forms.paired_zero_bubble_h1_makespan(8, 19), "at least 20 microbatches on 8 ranks with 1 stages"),
    (
        lambda: closed_forms.paired_zero_bubble_h1_makespan(8, 15, 2),
        "at least 16 microbatches on 8 ranks with 2 stages",
    ),
    (lambda: closed_forms.paired_zero_bubble_h1_makespan(2, 4, cost=Cost(B=3)), "needs B = I . W, got B=3, I=1, W=1"),
]


def test_forms_refuse_what_they_do_not_cover(subtests):
    for call, message in REFUSED:
        with subtests.test(call=call, message=message), pytest.raises(ValueError, match=message):
            call()
