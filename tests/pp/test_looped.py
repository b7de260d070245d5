"""Interleaved 1F1B and looped breadth-first: against the closed forms, torch's orders and each other."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import EXACT, SIZES, num_crossings
from torch_orders import looped_rows

from dualpipe_lab.pp import closed_forms
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Action, Program
from dualpipe_lab.pp.schedules import interleaved, looped_bfs
from dualpipe_lab.pp.schedules.looped import round_sizes
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import validate

VIRTUAL = (1, 2, 3)
FORMS = {interleaved: closed_forms.interleaved_makespan, looped_bfs: closed_forms.looped_bfs_makespan}


def peak_of(build, p, m, v, rank):
    if build is looped_bfs:
        return closed_forms.looped_bfs_peak_activations(m, v)
    return closed_forms.interleaved_peak_activations(p, m, rank, v)


@given(p=st.integers(1, 16), m=st.integers(1, 64), v=st.integers(1, 5), f=EXACT, b=EXACT)
def test_any_size_and_exact_costs(p, m, v, f, b):
    cost = Cost(F=f, B=b)
    for build, form in FORMS.items():
        program = build(p, m, v)
        timeline, peaks = simulate(program, cost), [peak_of(build, p, m, v, rank) for rank in range(p)]
        assert timeline.makespan == form(p, m, v, cost)
        assert [timeline.peak_activations(rank) for rank in range(p)] == peaks
        bubble = timeline.makespan - v * m * (f + b)
        assert {timeline.bubble_time(rank) for rank in range(p)} == {bubble}
        assert m < p or bubble == (p - 1) * (f + b)
        assert len(timeline.messages) == 2 * num_crossings(program) == closed_forms.looped_num_messages(p, m, v)
        validate(program, in_flight=peaks)


@pytest.mark.parametrize("v", VIRTUAL)
def test_interleaved_has_torch_s_order_wherever_torch_is_legal(v):
    compared = 0
    for p, m in SIZES:
        if rows := looped_rows("Interleaved1F1B", p, m, v):
            assert interleaved(p, m, v).rows() == rows
            compared += 1
    assert len(SIZES) > compared > 40


@pytest.mark.parametrize("v", VIRTUAL)
@pytest.mark.parametrize("latency", [0, 2])
def test_breadth_first_is_torch_s_with_the_backwards_in_order_and_as_quick(v, latency):
    cost = Cost(F=3, I=2, W=2, latency=latency)
    for p, m in SIZES:
        theirs = Program.parse("LIFO", looped_rows("LoopedBFS", p, m, v))
        turned = [[Action(s, k, m - 1 - i if k == "B" else i) for s, k, i in row] for row in theirs.ranks]
        ours = looped_bfs(p, m, v)
        assert ours == Program("FIFO", turned)
        here, there = simulate(ours, cost), simulate(theirs, cost)
        assert here.makespan == there.makespan
        assert [here.live_activations(rank) for rank in range(p)] == [there.live_activations(rank) for rank in range(p)]


@given(p=st.integers(1, 8), m=st.integers(1, 48), v=st.integers(1, 4), extra=st.integers(0, 50), f=EXACT, b=EXACT)
def test_larger_rounds_take_as_long_and_hold_more(p, m, v, extra, f, b):
    program, cost = interleaved(p, m, v, round_size=p + extra), Cost(F=f, B=b)
    assert simulate(program, cost).makespan == closed_forms.interleaved_makespan(p, m, v, cost)
    peaks = [closed_forms.interleaved_peak_activations(p, m, rank, v, p + extra) for rank in range(p)]
    validate(program, in_flight=peaks)
    assert [simulate(program).peak_activations(rank) for rank in range(p)] == peaks
    assert peaks[0] >= closed_forms.interleaved_peak_activations(p, m, 0, v)


def test_one_round_of_all_is_breadth_first_until_the_last_stage():
    for ours, breadth_first in zip(interleaved(4, 12, 4, round_size=12).ranks, looped_bfs(4, 12, 4).ranks, strict=True):
        assert ours[:36] == breadth_first[:36]
        assert [a for a in ours if a.kind == "F"] == list(breadth_first[:48])
        assert [a for a in ours if a.kind == "B"] == list(breadth_first[48:])


def test_rounds_too_small_for_the_loop_are_refused():
    with pytest.raises(
        ValueError, match=r"round_size to be at least the number of ranks, 4, got 3: .*use round_size=4"
    ):
        interleaved(4, 12, 2, round_size=3)


def test_rounds_are_full_wherever_they_can_be():
    for p, m in SIZES:
        sizes = round_sizes(p, m)
        assert sum(sizes) == m
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert sizes[-1] >= min(p, m)


def test_the_published_table():
    # 8 ranks, 20 microbatches; half-size stages, so times and activations are halved.
    timeline = simulate(interleaved(8, 20))
    assert Fraction(timeline.makespan, 2) == Fraction("70.5")
    assert simulate(looped_bfs(8, 20)).makespan == 141
    assert Fraction(closed_forms.interleaved_peak_activations(4, 8, 0), 2) == Fraction("5.5")


def test_virtual_stages_are_counted(subtests):
    for v, build in product([0, -1, 1.0, True], FORMS):
        with (
            subtests.test(v=v, build=build),
            pytest.raises(ValueError, match=rf"{build.__name__} needs num_virtual_stages to be an integer"),
        ):
            build(2, 4, v)


def test_forms_refuse_what_they_do_not_cover():
    with pytest.raises(ValueError, match=r"interleaved has a closed form for equal stages.* got F=\[1, 2, 1, 1\]"):
        closed_forms.interleaved_makespan(2, 4, 2, Cost(F=[1, 2, 1, 1]))
    with pytest.raises(ValueError, match=r"looped_bfs has a closed form .* got latency=1; use simulate"):
        closed_forms.looped_bfs_makespan(2, 4, 2, Cost(latency=1))
