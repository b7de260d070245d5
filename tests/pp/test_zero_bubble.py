"""ZB-H1, ZB-H2 and the family between them: against the closed forms, torch's order and the published table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import EXACT, SIZES
from torch_orders import looped_rows

from dualpipe_lab.pp import closed_forms
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.schedules import one_f_one_b, zero_bubble_h1, zero_bubble_h2
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate


def local_bubbles(timeline):
    return [timeline.local_bubble(rank) for rank in range(timeline.num_ranks)]


@given(p=st.integers(1, 10), m=st.integers(1, 32), room=st.integers(0, 20), f=EXACT, i=EXACT, w=EXACT)
def test_any_size_room_and_exact_costs(p, m, room, f, i, w):
    cost, in_flight = Cost(F=f, I=i, W=w), p + room
    program, bound = zero_bubble_h2(p, m, in_flight), closed_forms.zero_bubble_h2_peak_activations(p, m, in_flight)
    timeline = simulate(program, cost)
    assert timeline.makespan == closed_forms.zero_bubble_h2_makespan(p, m, in_flight, cost)
    assert {timeline.bubble_time(rank) for rank in range(p)} == {timeline.makespan - m * (f + i + w)}
    assert len(timeline.messages) == closed_forms.num_messages(p, m)
    validate(lower(validate(program, in_flight=bound)), blocking=True)
    if bound > 1:
        with pytest.raises(InvalidProgram, match=rf"rank {p - 1}, .* makes it hold {bound}"):
            validate(program, in_flight=bound - 1)
    if m >= p:
        local = max(local_bubbles(simulate(zero_bubble_h1(p, m), cost)))
        assert local == (p - 1) * max(i, f + i - w)
    if m >= 2 * p - 1:
        local = max(local_bubbles(simulate(zero_bubble_h2(p, m), cost)))
        assert local == closed_forms.zero_bubble_h2_local_bubble(p, m, cost)


@given(p=st.integers(1, 16), m=st.integers(1, 64), v=st.integers(1, 4), f=EXACT, i=EXACT, w=EXACT)
def test_the_looped_form_for_any_size_and_exact_costs(p, m, v, f, i, w):
    cost, program = Cost(F=f, I=i, W=w), zero_bubble_h1(p, m, v)
    validate(program, in_flight=closed_forms.zero_bubble_h1_peak_activations(p, m, v))
    if v == 1 or m >= p:
        assert simulate(program, cost).makespan == closed_forms.zero_bubble_h1_makespan(p, m, v, cost)


def test_room_decides_from_h1_on():
    for p, m in SIZES:
        assert zero_bubble_h2(p, m, in_flight=p) == zero_bubble_h1(p, m)
        assert zero_bubble_h2(p, m, in_flight=2 * p - 1) == zero_bubble_h2(p, m)
        if m <= p:
            assert zero_bubble_h2(p, m) == zero_bubble_h1(p, m)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_h1_has_torch_s_order_wherever_torch_is_legal(v):
    compared = 0
    for p, m in SIZES:
        if rows := looped_rows("InterleavedZeroBubble", p, m, v):
            assert zero_bubble_h1(p, m, v).rows() == rows
            compared += 1
    assert len(SIZES) > compared > 40


@pytest.mark.parametrize(("p", "idle_h1", "local_h1", "idle_h2", "local_h2"), [(4, 3, 3, 3, 0), (8, 7, 7, 7, 0)])
def test_the_published_table(p, idle_h1, local_h1, idle_h2, local_h2):
    h1, h2 = simulate(zero_bubble_h1(p, 3 * p)), simulate(zero_bubble_h2(p, 3 * p))
    assert (h1.bubble_time(0), max(local_bubbles(h1))) == (idle_h1, local_h1)
    assert (h2.bubble_time(0), max(local_bubbles(h2))) == (idle_h2, local_h2)
    assert (h1.peak_activations(0), h2.peak_activations(0)) == (p, 2 * p - 1)
    assert simulate(one_f_one_b(p, 3 * p)).bubble_time(0) == 3 * (p - 1)


def test_sizes_and_room_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"at least the number of ranks, 4, got 3; use in_flight=4 \(which is ZB-H1\)"):
        zero_bubble_h2(4, 8, in_flight=3)
    with pytest.raises(ValueError, match="zero_bubble_h2 needs in_flight to be an integer of at least 1, got 0"):
        closed_forms.zero_bubble_h2_makespan(1, 8, in_flight=0)
    with pytest.raises(ValueError, match="zero_bubble_h1 needs num_virtual_stages to be an integer"):
        zero_bubble_h1(4, 8, 0)
    with pytest.raises(ValueError, match="with 2 stages per rank holds for at least as many microbatches as ranks"):
        closed_forms.zero_bubble_h1_makespan(4, 3, 2)
    with pytest.raises(ValueError, match="zero_bubble_h2_local_bubble holds for at least 7 microbatches, got 6"):
        closed_forms.zero_bubble_h2_local_bubble(4, 6)
    with pytest.raises(ValueError, match=r"ZB-H2 has a closed form .* free links only, got transfer=1"):
        closed_forms.zero_bubble_h2_makespan(4, 8, cost=Cost(transfer=1))
