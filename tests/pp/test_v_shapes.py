"""ZBV, V-Half and V-Min: against the closed forms, torch's order, the published table and each other."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_grid import EXACT, ORACLES, SIZES
from torch_orders import zbv_rows

from dualpipe_lab.pp import closed_forms
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.ranking import local_bubble
from dualpipe_lab.pp.schedules import v_half, v_min, zbv
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate

BUILDERS = {
    zbv: (closed_forms.zbv_makespan, closed_forms.zbv_peak_activations),
    v_half: (closed_forms.v_half_makespan, closed_forms.v_half_peak_activations),
    v_min: (closed_forms.v_min_makespan, closed_forms.v_min_peak_activations),
}


def peak(timeline):
    return max(map(timeline.peak_activations, range(timeline.num_ranks)))


@pytest.mark.parametrize("build", BUILDERS)
@settings(max_examples=40)
@given(p=st.integers(1, 16), m=st.integers(1, 64), ticks=st.sampled_from([1, Fraction(7, 3)]))
def test_any_size_is_valid_within_its_peak_and_needs_it(build, p, m, ticks):
    makespan, peak_activations = BUILDERS[build]
    program = build(p, m)
    bound = peak_activations(p, m)
    validate(lower(validate(program, in_flight=bound)), blocking=True)
    with pytest.raises(InvalidProgram, match=f"makes it hold {bound} activations"):
        validate(program, in_flight=bound - 1)
    cost = Cost(F=ticks, I=ticks, W=ticks)
    timeline = simulate(program, cost)
    assert timeline.makespan == makespan(p, m, cost)
    assert peak(timeline) == bound
    assert {timeline.bubble_time(rank) for rank in range(p)} == {timeline.makespan - 6 * m * ticks}
    assert len(timeline.messages) == closed_forms.dualpipev_num_messages(p, m)
    assert {program.rank_of(stage, 0) for stage in (p - 1, p)} == {p - 1}


def test_zbv_has_torch_s_order_wherever_torch_does_not_leave_work_out():
    for p, m in SIZES:
        if m >= 2 * p - 1:
            assert zbv(p, m).rows() == zbv_rows(p, m)
    assert zbv(4, 8) == Program.parse("torch", ORACLES["zbv 4 ranks 8 microbatches (torch)"])


def test_with_few_microbatches_zbv_is_never_longer_than_torch_s_and_holds_no_more():
    gains = {}
    for p, m in SIZES:
        ours, torchs = simulate(zbv(p, m)), simulate(Program.parse("torch", zbv_rows(p, m)))
        gains[p, m] = torchs.makespan - ours.makespan
        assert peak(ours) == peak(torchs)
    assert min(gains.values()) == 0
    assert gains[8, 8] == 7  # 7 idle ticks instead of 14
    assert all(gain > 0 for (p, m), gain in gains.items() if p > 1 and m <= p)


def test_no_order_on_this_v_is_shorter_than_zbv():
    for p, m in SIZES:
        first_f_of_the_last_rank = p - 1
        first_i_of_the_last_rank = 3 * p - 1  # down, up, down again; until then it has 2m forwards
        first_i_of_stage_0 = 4 * p - 1  # until then rank 0 has F of stage 0, and all work of its other stage
        bound = max(first_f_of_the_last_rank, first_i_of_the_last_rank - 2 * m, first_i_of_stage_0 - 4 * m)
        assert simulate(zbv(p, m)).bubble_time(0) == bound


@given(p=st.integers(1, 12), extra=st.integers(0, 30), times=st.lists(EXACT, min_size=3, max_size=3))
def test_zbv_with_unequal_work(p, extra, times):
    f, w, i = sorted(times)
    m = 2 * p - 1 + extra
    for cost in (Cost(F=f, I=i, W=w), Cost(F=w, I=i, W=f)):
        timeline = simulate(zbv(p, m), cost)
        assert timeline.makespan == closed_forms.zbv_makespan(p, m, cost)
        assert local_bubble(timeline) == (p - 1) * max(cost.I - cost.F, 2 * (cost.I - cost.W))


@given(p=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 10, 11]), m=st.integers(1, 30), times=st.tuples(EXACT, EXACT, EXACT))
def test_v_min_with_unequal_work(p, m, times):
    w, f, i = sorted(times)
    costs = [Cost(F=f, I=f, W=w)] if p in (2, 3, 6) else [Cost(F=f, I=i, W=w), Cost(F=i, I=f, W=w)]
    for cost in costs:
        assert simulate(v_min(p, m), cost).makespan == closed_forms.v_min_makespan(p, m, cost)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_how_long_one_more_microbatch_takes(p):
    half = [v_half(p, m) for m in (4 * p, 4 * p + 12)]
    least = [v_min(p, m) for m in (4 * p, 4 * p + 12)]
    for cost in (Cost(F=f, I=i, W=w) for f in range(4) for i in range(4) for w in range(4) if f + i + w):
        if cost.I >= cost.F:
            assert _per_microbatch(half, cost) == closed_forms.v_half_ticks_per_microbatch(p, cost)
        if p != 2:
            assert _per_microbatch(least, cost) == closed_forms.v_min_ticks_per_microbatch(p, cost)


def _per_microbatch(programs, cost):
    few, many = (simulate(program, cost).makespan for program in programs)
    return Fraction(many - few, 12)


TABLE = [  # ranks, then idle, local bubble and peak in full-size stages, for equal times
    (4, zbv, "1.5", "0", "4"),
    (4, v_half, "2.5", "2.5", "3"),
    (4, v_min, "5.5", "5.5", "2"),
    (8, zbv, "3.5", "0", "8"),
    (8, v_half, "8.5", "8.5", "5"),
    (8, v_min, "13.5", "13.5", "4"),
]


@pytest.mark.parametrize(("p", "build", "idle", "local", "held"), TABLE)
def test_the_known_table(p, build, idle, local, held):
    timeline = simulate(build(p, 3 * p))
    found = timeline.bubble_time(0), local_bubble(timeline), peak(timeline)
    assert [Fraction(number, 2) for number in found] == [Fraction(idle), Fraction(local), Fraction(held)]


def test_what_has_no_closed_form_is_refused():
    with pytest.raises(ValueError, match=r"zbv_makespan holds for I >= F, .* at least 7 microbatches, got F=2, I=1"):
        closed_forms.zbv_makespan(4, 8, Cost(F=2))
    with pytest.raises(ValueError, match="v_half_makespan holds for F = I = W, got 1, 2 and 1"):
        closed_forms.v_half_makespan(4, 8, Cost(I=2))
    with pytest.raises(ValueError, match="v_half_ticks_per_microbatch holds for I >= F, got F=2 and I=1"):
        closed_forms.v_half_ticks_per_microbatch(4, Cost(F=2))
    with pytest.raises(ValueError, match=r"v_min_makespan holds for W <= F = I.* got F=1, I=2, W=1 on 6 ranks"):
        closed_forms.v_min_makespan(6, 8, Cost(I=2))
    with pytest.raises(ValueError, match="v_min_ticks_per_microbatch holds for 1 rank and for 3 or more, got 2"):
        closed_forms.v_min_ticks_per_microbatch(2)
    with pytest.raises(ValueError, match=r"V-Min has a closed form .* free links only, got latency=1"):
        closed_forms.v_min_makespan(4, 8, Cost(latency=1))
