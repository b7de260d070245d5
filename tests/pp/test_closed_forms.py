"""Closed forms of all schedules: exactly the simulator's numbers for any size and exact costs, and what they refuse."""

from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_grid import EXACT, num_crossings

from dualpipe_lab.pp import closed_forms as forms
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Overlap
from dualpipe_lab.pp.schedules.looped import round_sizes
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate


@st.composite
def costs(draw):
    """F, I and W: any, all alike, or W the shortest; and a pair from its longer half up to more than both."""
    one, other, third, share = draw(EXACT), draw(EXACT), draw(EXACT), draw(EXACT)
    f, i, w = draw(st.sampled_from([(one, other, third), (one,) * 3, (max(one, other),) * 2 + (min(one, other),)]))
    return Cost(F=f, I=i, W=w, overlap=max(f, i + w) + min(f, i + w) * Fraction(share) / 40)


def num_pairs(program, rank):
    return sum(isinstance(step, Overlap) for step in program.ranks[rank])


def busy(program, rank, cost):
    """The ticks of a rank's work."""
    ticks = {"F": cost.F, "B": cost.I + cost.W, "I": cost.I, "W": cost.W}
    pairs = num_pairs(program, rank)
    saved = pairs * (cost.F + cost.I + cost.W - cost.overlap) if pairs else 0
    return sum(ticks[action.kind] for action in program.actions(rank)) - saved


def check(program, makespan, exists=True, *, peaks, num_messages, cost, bubbles=None, local_bubble=None):
    """Beside a simulation: a form of the makespan, where it exists; activations of each rank, or the most; idle times.

    `local_bubble` is the longest of all ranks.
    """
    validate(program, in_flight=peaks)
    ranks, timeline = range(program.num_ranks), simulate(program, cost)
    found = [timeline.peak_activations(rank) for rank in ranks]
    assert found == peaks or max(found) == peaks, program
    if max(found) > 1:
        with pytest.raises(InvalidProgram, match=f"makes it hold {max(found)} activations"):
            validate(program, in_flight=max(found) - 1)
    assert len(timeline.messages) == 2 * num_crossings(program) == num_messages, program
    if exists:
        assert timeline.makespan == makespan(), program
    else:
        with pytest.raises(ValueError, match=r"use .*simulate"):
            makespan()
    idle = [timeline.makespan - busy(program, rank, cost) for rank in ranks]
    assert [timeline.bubble_time(rank) for rank in ranks] == idle, program
    assert bubbles in (None, idle), program
    assert local_bubble in (None, max(map(timeline.local_bubble, ranks))), program


def any_size(num_ranks):
    """Up to so many ranks, microbatches, stages of a rank, room for more activations; and a cost."""
    p, m, v, room = (st.integers(low, high) for low, high in ((1, num_ranks), (1, 40), (1, 4), (0, 16)))
    return given(p=p, m=m, v=v, room=room, cost=costs())


@any_size(num_ranks=12)
def test_whole_and_split_backwards(p, m, v, room, cost):
    """GPipe, 1F1B, and what is between ZB-H1 and ZB-H2."""
    stated = {"num_messages": forms.num_messages(p, m), "cost": cost}
    held = [forms.one_f_one_b_peak_activations(p, m, rank) for rank in range(p)]
    gpipe, one_f_one_b = partial(forms.gpipe_makespan, p, m, cost), partial(forms.one_f_one_b_makespan, p, m, cost)
    check(schedules.gpipe(p, m), gpipe, peaks=[forms.gpipe_peak_activations(m)] * p, **stated)
    check(schedules.one_f_one_b(p, m), one_f_one_b, peaks=held, **stated)
    for limit in (p + room, None):
        makespan = partial(forms.zero_bubble_h2_makespan, p, m, limit, cost)
        peak = forms.zero_bubble_h2_peak_activations(p, m, limit)
        local = forms.zero_bubble_h2_local_bubble(p, m, cost) if limit is None and m >= 2 * p - 1 else None
        check(schedules.zero_bubble_h2(p, m, limit), makespan, peaks=peak, local_bubble=local, **stated)


@any_size(num_ranks=12)
def test_loops(p, m, v, room, cost):
    stated = {"num_messages": forms.looped_num_messages(p, m, v), "cost": cost}
    interleaved, breadth_first, h1 = (
        partial(form, p, m, v, cost)
        for form in (forms.interleaved_makespan, forms.looped_bfs_makespan, forms.zero_bubble_h1_makespan)
    )
    for size in (None, p + room):  # of a round
        held = [forms.interleaved_peak_activations(p, m, rank, v, size) for rank in range(p)]
        check(schedules.interleaved(p, m, v, size), interleaved, peaks=held, **stated)
    held = forms.looped_bfs_peak_activations(m, v)
    check(schedules.looped_bfs(p, m, v), breadth_first, peaks=[held] * p, **stated)
    local = (p - 1) * max(cost.I, cost.F + cost.I - cost.W) if v == 1 and m >= p else None
    stated |= {"peaks": forms.zero_bubble_h1_peak_activations(p, m, v), "local_bubble": local}
    check(schedules.zero_bubble_h1(p, m, v), h1, exists=v == 1 or m >= p, **stated)


@any_size(num_ranks=12)
def test_loops_with_pairs(p, m, v, room, cost):
    """A rank warms up with one forward more than without, and with one for each rank that puts off its W."""
    num_messages = forms.looped_num_messages(p, m, v)
    fewest = 0 if p == 1 else 2 * p if v > 1 else 3 * p - 4
    for build, form, exists, is_split in (
        (schedules.paired_interleaved, forms.paired_interleaved_makespan, True, False),
        (schedules.paired_zero_bubble_h1, forms.paired_zero_bubble_h1_makespan, m >= fewest, True),
    ):
        lap = (v - 1) * round_sizes(p, m)[0]
        warmup = [lap + 2 * (p - rank) - 1 + rank * is_split for rank in range(p)]
        peaks = [min(v * m, number + 1) for number in warmup]
        program = build(p, m, v)
        check(program, partial(form, p, m, v, cost), exists, peaks=peaks, num_messages=num_messages, cost=cost)
        assert [num_pairs(program, rank) for rank in range(p)] == [max(0, v * m - number) for number in warmup]


@any_size(num_ranks=16)
def test_stages_on_a_v(p, m, v, room, cost):
    f, i, w = cost.F, cost.I, cost.W
    is_even = f == i == w
    for size in (m, 2 * p - 1):
        is_full = i == max(f, i, w) and size >= 2 * p - 1
        local = (p - 1) * max(i - f, 2 * (i - w)) if is_full else None
        stated = {"peaks": forms.zbv_peak_activations(p, size), "num_messages": forms.dualpipev_num_messages(p, size)}
        makespan = partial(forms.zbv_makespan, p, size, cost)
        check(schedules.zbv(p, size), makespan, is_even or is_full, cost=cost, local_bubble=local, **stated)
    stated = {"num_messages": forms.dualpipev_num_messages(p, m)}
    half, even = forms.v_half_peak_activations(p, m), Cost(F=f, I=f, W=f)
    check(schedules.v_half(p, m), partial(forms.v_half_makespan, p, m, even), peaks=half, cost=even, **stated)
    exists = p == 1 or (w <= min(f, i) and (f == i or (p > 3 and p % 3 > 0)))
    least, makespan = forms.v_min_peak_activations(p, m), partial(forms.v_min_makespan, p, m, cost)
    check(schedules.v_min(p, m), makespan, exists, peaks=least, cost=cost, **stated)


@any_size(num_ranks=8)
def test_two_directions(p, m, v, room, cost):
    """DualPipe on twice as many ranks, its half, and Easy-DualPipe, whose long steps have a form for F = B."""
    ranks, whole, half = range(2 * p), (2 * p, 2 * (2 * p + room)), (p, 2 * p + room)
    idle = [forms.dualpipe_bubble(*whole, rank, cost) for rank in ranks]
    stated = {"peaks": forms.dualpipe_peak_activations(2 * p), "num_messages": forms.num_messages(*whole)}
    makespan = partial(forms.dualpipe_makespan, *whole, cost)
    check(schedules.dualpipe(*whole), makespan, cost=cost, bubbles=idle, **stated)
    stated = {"peaks": forms.dualpipev_peak_activations(p), "num_messages": forms.dualpipev_num_messages(*half)}
    makespan = partial(forms.dualpipev_makespan, *half, cost)
    check(schedules.dualpipev(*half), makespan, cost=cost, bubbles=idle[:p], **stated)
    easy, cost = (2 * p, 2 * m), cost if m <= p else Cost(F=cost.F, I=cost.F, W=0)
    idle = [forms.easy_dualpipe_bubble(*easy, cost)] * 2 * p
    held = [forms.easy_dualpipe_peak_activations(*easy, rank) for rank in ranks]
    stated = {"peaks": held, "num_messages": forms.num_messages(*easy)}
    check(
        schedules.easy_dualpipe(*easy),
        partial(forms.easy_dualpipe_makespan, *easy, cost),
        bubbles=idle,
        cost=cost,
        **stated,
    )


@given(
    m=st.integers(1, 9), stages=st.lists(st.tuples(EXACT, EXACT), min_size=1, max_size=6), latency=EXACT, transfer=EXACT
)
def test_gpipe_has_a_form_for_unequal_stages_and_slow_links_too(m, stages, latency, transfer):
    cost, p = Cost(F=[f for f, _ in stages], B=[b for _, b in stages], latency=latency, transfer=transfer), len(stages)
    assert simulate(schedules.gpipe(p, m), cost).makespan == forms.gpipe_makespan(p, m, cost)
    assert simulate(schedules.gpipe(p, m)).bubble_fraction == float(forms.bubble_fraction(p, m))


@given(st.integers(1, 8), st.integers(0, 9), EXACT, EXACT, st.fractions(0, 1, max_denominator=20))
def test_the_published_form_is_the_middle_s_idle_time_where_f_is_i_and_w_is_not_longer(half, more, w, longer, gain):
    cost = Cost(F=w + longer, I=w + longer, W=w, overlap=w + (w + longer) * (1 + gain))
    published = (half - 1) * (cost.overlap + cost.F - 2 * w)  # (P/2 - 1)(F&B + B - 3W)
    assert forms.dualpipe_bubble(2 * half, 2 * (2 * half + more), half, cost) == published


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_how_long_one_more_microbatch_takes_on_a_v(p):
    for build, form, exists in (
        (schedules.v_half, forms.v_half_ticks_per_microbatch, lambda cost: cost.I >= cost.F),
        (schedules.v_min, forms.v_min_ticks_per_microbatch, lambda cost: p != 2),
    ):
        few, many = build(p, 4 * p), build(p, 4 * p + 12)
        for cost in (Cost(F=f, I=i, W=w) for f in range(4) for i in range(4) for w in range(4) if f + i + w):
            if exists(cost):
                longer = simulate(many, cost).makespan - simulate(few, cost).makespan
                assert Fraction(longer, 12) == form(p, cost)


REFUSED = [
    (
        forms.one_f_one_b_makespan,
        (4, 8, Cost(latency=1)),
        "1F1B has this closed form for equal stages and free links only; use simul",
    ),
    (forms.interleaved_makespan, (2, 4, 2, Cost(F=[1, 2, 1, 1])), r"interleaved .* equal stages.* got F=\[1, 2, 1, 1"),
    (forms.looped_bfs_makespan, (2, 4, 2, Cost(latency=1)), "looped_bfs has a closed form .* got latency=1; use sim"),
    (forms.zero_bubble_h1_makespan, (4, 3, 2), "with 2 stages per rank holds for at least as many microbatches as ra"),
    (forms.zero_bubble_h2_makespan, (1, 8, 0), "zero_bubble_h2 needs in_flight to be an integer of at least 1, got 0"),
    (forms.zero_bubble_h2_makespan, (4, 8, None, Cost(transfer=1)), "ZB-H2 .* free links only, got transfer=1"),
    (forms.zero_bubble_h2_local_bubble, (4, 6), "holds for at least 7 microbatches, got 6"),
    (forms.zbv_makespan, (4, 8, Cost(F=2)), "zbv_makespan holds for I >= F, .* at least 7 microbatches, got F=2, I=1"),
    (forms.v_half_makespan, (4, 8, Cost(I=2)), "v_half_makespan holds for F = I = W, got 1, 2 and 1"),
    (forms.v_half_ticks_per_microbatch, (4, Cost(F=2)), "holds for I >= F, got F=2 and I=1"),
    (forms.v_min_makespan, (6, 8, Cost(I=2)), "holds for W <= F = I.* got F=1, I=2, W=1 on 6 ranks"),
    (forms.v_min_makespan, (4, 8, Cost(latency=1)), "V-Min has a closed form .* free links only, got latency=1"),
    (forms.v_min_ticks_per_microbatch, (2,), "holds for 1 rank and for 3 or more, got 2"),
    (forms.easy_dualpipe_bubble, (4, 6), "or for F = B, got 6 microbatches for 4 ranks, F=1, B=2"),
    (forms.dualpipe_makespan, (4, 8, Cost(latency=1)), "free links only, got latency=1; use simulate"),
    (forms.dualpipe_makespan, (4, 8, Cost(F=[1, 1, 1, 2])), r"equal stages.* only, got F=\[1, 1, 1, 2\]; use simulate"),
    (forms.dualpipe_makespan, (4, 8, Cost(overlap=lambda pair: 2)), "got a function as overlap"),
    (forms.dualpipe_makespan, (4, 8, Cost(B=3)), "need B = I [+] W, got B=3, I=1, W=1; leave B out"),
    (forms.dualpipe_makespan, (4, 8, Cost(overlap=1)), "got overlap=1 for F=1 and B=2; use 2 or more"),
    (forms.paired_interleaved_makespan, (2, 4, 2, Cost(latency=1)), "got latency=1; use simulate"),
    (forms.paired_interleaved_makespan, (2, 4, 2, Cost(overlap=1)), "got overlap=1 for F=1 and B=2; use 2"),
    (forms.paired_one_f_one_b_makespan, (2, 4, Cost(F=[1, 2])), r"got F=\[1, 2\]; use simulate"),
    (forms.paired_zero_bubble_h1_makespan, (8, 19), "at least 20 microbatches on 8 ranks with 1 stages"),
    (forms.paired_zero_bubble_h1_makespan, (8, 15, 2), "at least 16 microbatches on 8 ranks with 2 stages"),
    (forms.paired_zero_bubble_h1_makespan, (2, 4, 1, Cost(B=3)), "needs B = I . W, got B=3, I=1, W=1"),
]


def test_what_a_form_does_not_cover_is_refused(subtests):
    for form, arguments, message in REFUSED:
        with subtests.test(form=form, message=message), pytest.raises(ValueError, match=message):
            form(*arguments)


# A schedule whose record lacks a closed form; a new one without stands here, or brings its form.
WITHOUT = {
    "paired_1f1b": {"peak"},
    "paired_interleaved": {"peak"},
    "paired_zero_bubble_h1": {"peak"},
    "pipedream": {"makespan", "peak"},
}


def test_the_records_of_the_registry_have_the_simulator_s_numbers_and_say_what_they_lack():
    for name in schedules.names():
        known = schedules.named(name)
        assert {what for what in ("makespan", "peak", "messages") if getattr(known, what) is None} == WITHOUT.get(
            name, set()
        )
        compared = 0
        for p, m in ((2, 4), (3, 7), (4, 8), (4, 12), (6, 14)):
            try:
                program = known.build(p, m)
            except ValueError:
                continue  # a size that this schedule does not have
            cost = Cost(F=2, B=2) if name == "easy_dualpipe" else Cost()  # its form wants F = B
            timeline, given = simulate(program, cost), {"num_ranks": p, "num_microbatches": m, "cost": cost}
            assert len(timeline.messages) == known.value(known.messages, **given), program
            if known.makespan:
                assert timeline.makespan == known.value(known.makespan, **given), program
            if known.peak:
                peaks = [known.value(known.peak, rank=rank, **given) for rank in range(p)]
                assert max(map(timeline.peak_activations, range(p))) == max(peaks), program
            compared += 1
        assert compared >= 3, name


@pytest.mark.parametrize(("p", "f", "b", "latency"), [(2, 1, 2, 1), (4, 1, 2, 1), (6, 2, 2, 3), (8, 3, 5, 4)])
def test_1f1b_with_slow_messages_takes_a_round_trip_for_p_microbatches(p, f, b, latency):
    cost = Cost(F=f, B=b, latency=latency)
    early, late = (simulate(schedules.one_f_one_b(p, m), cost).makespan for m in (3 * p, 4 * p))
    assert late - early == p * (f + b) + 2 * (p - 1) * latency
