"""The search: never worse than the fixed schedules, never below the bound, the best where all orders can be tried."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_grid import legal

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.optimise import lower_bound, optimise, search
from dualpipe_lab.pp.ranking import score, share, stage_cost
from dualpipe_lab.pp.simulator import simulate


def programs(*sizes):
    return [program for name in schedules.names(synchronous=True) for program in legal(name, sizes)]


ticks = st.integers(0, 6)
costs = st.builds(
    Cost,
    F=st.integers(1, 6),
    I=ticks,
    W=ticks,
    B=st.none() | ticks,
    overlap=st.none() | st.integers(1, 12),
    latency=st.integers(0, 3),
    transfer=st.integers(0, 2),
)


@given(st.sampled_from([*programs((1, 2), (2, 4), (3, 6), (4, 8), (4, 3), (2, 7))]), costs)
def test_no_schedule_beats_the_bound_of_its_own_memory(program, cost):
    timeline = simulate(program, cost)
    peaks = [timeline.peak_activations(rank) for rank in range(timeline.num_ranks)]
    assert lower_bound(program, cost, peaks).ticks <= timeline.makespan
    assert lower_bound(program, cost).ticks <= lower_bound(program, cost, peaks).ticks


@settings(max_examples=15)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    costs,
    st.none() | st.integers(1, 6),
    st.none() | st.just(1),
    st.integers(0, 3),
)
def test_a_search_keeps_to_the_limits_and_is_never_worse_than_a_fixed_schedule(p, m, cost, memory, weights, seed):
    scores = [score(program, cost) for program in programs((p, m))]
    allowed = [one for one in scores if one.fits(memory) and (weights is None or one.weights <= weights)]
    found = search(p, m, cost, memory, weights, seed=seed, num_moves=10)
    own = stage_cost(found.program, cost)
    assert simulate(found.program, own).makespan == found.makespan >= found.bound.ticks
    assert found.makespan <= min((one.makespan for one in allowed), default=found.makespan)
    assert (found.fixed is None) == (not allowed)
    assert found.fixed is None or found.fixed[0] == min(one.makespan for one in allowed)
    counted = score(found.program, cost)
    assert counted.fits(memory)
    assert weights is None or counted.weights <= weights
    assert search(p, m, cost, memory, weights, seed=seed, num_moves=10).program == found.program


def test_the_bound_proves_known_schedules_best_and_finds_a_better_one():
    h1 = schedules.build("zero_bubble_h1", 4, 8)
    assert simulate(h1).makespan == lower_bound(h1, Cost()).ticks == 27
    two_ways = search(4, 8, memory=4)
    assert (two_ways.makespan, two_ways.bound.ticks, two_ways.gap) == (25, 25, 0)
    one_way = search(4, 8, memory=4, weights=1)
    assert one_way.makespan == Fraction(51, 2)
    assert share(one_way.program) == Fraction(1, 2)


def test_moves_leave_a_plateau_that_the_list_scheduler_stops_at():
    cost = Cost(F=4, I=4, W=4, latency=1)
    names = ["easy_dualpipe"]
    without, with_moves = (search(4, 12, cost, memory=4, names=names, num_moves=number) for number in (0, 400))
    assert with_moves.makespan < without.makespan
    assert with_moves.bound == without.bound


def test_an_order_that_moves_have_changed_does_not_keep_the_schedule_s_name():
    found = search(4, 8, Cost(F=2, I=3, W=1), memory=2, weights=1)
    assert found.makespan < found.fixed[0]
    assert found.program.name == f"Searched, stages as in {found.fixed[1].name}" != found.fixed[1].name


REFUSED = [
    (lambda: search(4, 8, names=["dualpip"]), "there is no schedule named 'dualpip'"),
    (lambda: search(3, 8, names=["dualpipe"]), "dualpipe needs an even number of ranks"),
    (lambda: search(4, 8, weights=Fraction(1, 2)), "no schedule has 4 ranks, 8 microbatches and room for 1/2 weights"),
    (lambda: search(4, 8, memory=Fraction(1, 3)), "every one of 4 ranks needs room for 1 activation or more, got 0"),
    (lambda: optimise(schedules.build("1f1b", 2, 2), in_flight=[1]), r"every one of 2 ranks needs room .* got \[1\]"),
    (lambda: optimise(schedules.build("dualpipev", 2, 4), in_flight=1), "no order was found with room for 1 activ"),
    (lambda: optimise(schedules.build("1f1b", 2, 2), Cost(overlap=lambda pair: 1)), "overlap to be one number"),
]


def test_what_cannot_be_is_refused(subtests):
    for call, message in REFUSED:
        with subtests.test(call=call, message=message), pytest.raises(ValueError, match=message):
            call()
