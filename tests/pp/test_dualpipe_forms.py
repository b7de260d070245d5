"""A2 for Easy-DualPipe, DualPipe and DualPipeV: forms equal the simulator exactly and refuse what they lack."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import EXACT, legal, num_crossings

from dualpipe_lab.pp import closed_forms, schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.simulator import simulate


@st.composite
def costs_with_pairs(draw):
    """Any F, I, W, and a pair from its longer half up to more than both halves."""
    f, i, w = draw(EXACT), draw(EXACT), draw(EXACT)
    share = draw(st.fractions(0, Fraction(3, 2), max_denominator=20))
    return Cost(F=f, I=i, W=w, overlap=max(f, i + w) + share * min(f, i + w))


@given(st.integers(1, 8), st.integers(0, 16), costs_with_pairs())
def test_dualpipe_s_forms_are_exact_for_any_costs(half, more, cost):
    p, m = 2 * half, 2 * (2 * half + more)
    whole, cut = simulate(schedules.dualpipe(p, m), cost), simulate(schedules.dualpipev(half, m // 2), cost)
    assert whole.makespan == closed_forms.dualpipe_makespan(p, m, cost)
    assert cut.makespan == closed_forms.dualpipev_makespan(half, m // 2, cost) == whole.makespan
    for rank in range(half):
        idle = closed_forms.dualpipe_bubble(p, m, rank, cost)
        assert whole.bubble_time(rank) == cut.bubble_time(rank) == idle
        assert whole.peak_activations(rank) == closed_forms.dualpipe_peak_activations(p)
        assert cut.peak_activations(rank) == closed_forms.dualpipev_peak_activations(half)


@given(st.integers(1, 8), st.integers(0, 9), EXACT, EXACT, st.fractions(0, 1, max_denominator=20))
def test_the_published_form_is_the_middle_s_idle_time_where_f_is_i_and_w_is_not_longer(half, more, w, longer, gain):
    cost = Cost(F=w + longer, I=w + longer, W=w, overlap=w + (w + longer) * (1 + gain))
    p, m = 2 * half, 2 * (2 * half + more)
    published = (half - 1) * (cost.overlap + cost.F - 2 * w)  # (P/2 - 1)(F&B + B - 3W)
    assert simulate(schedules.dualpipe(p, m), cost).bubble_time(half) == published
    assert simulate(schedules.dualpipev(half, m), cost).bubble_time(half - 1) == published


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (Cost(latency=1), "free links only, got latency=1; use simulate"),
        (Cost(F=[1, 1, 1, 2]), r"equal stages.* only, got F=\[1, 1, 1, 2\]; use simulate"),
        (Cost(overlap=lambda pair: 2), "got a function as overlap"),
        (Cost(B=3), "need B = I [+] W, got B=3, I=1, W=1; leave B out"),
        (Cost(overlap=1), "got overlap=1 for F=1 and B=2; use 2 or more"),
    ],
)
def test_dualpipe_s_forms_refuse_what_they_do_not_cover(cost, message):
    with pytest.raises(ValueError, match=message):
        closed_forms.dualpipe_makespan(4, 8, cost)


def test_messages():
    for name in ("dualpipe", "easy_dualpipe"):
        for program in legal(name):
            p, m = program.num_ranks, program.num_microbatches
            assert 2 * num_crossings(program) == closed_forms.num_messages(p, m) == len(simulate(program).messages)
    for program in legal("dualpipev"):
        p, m = program.num_ranks, program.num_microbatches
        assert 2 * num_crossings(program) == closed_forms.dualpipev_num_messages(p, m)


@given(st.integers(1, 8), st.integers(1, 32), EXACT, EXACT)
def test_easy_dualpipe_s_forms_are_exact_for_any_costs(half, pairs, f, b):
    p, m = 2 * half, 2 * pairs
    if m > p > 2 and f != b:
        with pytest.raises(ValueError, match=f"or for F = B, got {m} microbatches for {p} ranks"):
            closed_forms.easy_dualpipe_bubble(p, m, Cost(F=f, B=b))
        b = f
    cost = Cost(F=f, B=b)
    timeline = simulate(schedules.easy_dualpipe(p, m), cost)
    assert timeline.makespan == closed_forms.easy_dualpipe_makespan(p, m, cost)
    bubble = closed_forms.easy_dualpipe_bubble(p, m, cost)
    for rank in range(p):
        assert timeline.bubble_time(rank) == bubble
        assert timeline.peak_activations(rank) == closed_forms.easy_dualpipe_peak_activations(p, m, rank)


def test_slow_links_cost_the_v_more_because_its_stages_are_shorter():
    """8 ranks, 16 microbatches, a tenth of t_F per message; DualPipeV in ticks of its half-size stages."""
    free, slow = Cost(F=20, I=20, W=20), Cost(F=20, I=20, W=20, latency=2)
    halves = Cost(F=10, I=10, W=10, latency=2)
    assert simulate(schedules.dualpipe(8, 16), free).makespan == 20 * 54
    assert simulate(schedules.dualpipe(8, 16), slow).makespan == 20 * 56.3
    assert simulate(schedules.dualpipev(8, 16)).makespan == 2 * 55
    assert simulate(schedules.dualpipev(8, 16), halves).makespan == 20 * 59.9
