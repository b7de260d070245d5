"""What is critical decides, for unequal stages and slow links too; and what a rank holds equals the slow reference."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from slow_reference import random_program, solve

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.simulator import simulate


@given(st.randoms(use_true_random=False))
def test_whatever_grows_on_the_critical_path_delays_the_end_by_as_much(rng):
    program = random_program(rng)
    stages = range(program.num_stages)
    table = {kind: [rng.randint(0, 5) for _ in stages] for kind in "FIWB"}
    overlap = rng.choice([None, rng.randint(0, 9)])
    cost = Cost(**table, overlap=overlap, latency=rng.choice([0, 0, 3]), transfer=rng.choice([0, 0, 2, 7]))
    timeline = simulate(program, cost)
    route = timeline.critical_path()
    assert (route[0].start, route[-1].end) == (0, timeline.makespan)
    crossings = sum(one.rank != other.rank for one, other in pairwise(route))
    assert all(one.end == other.start for one, other in pairwise(route) if one.rank == other.rank)
    delta = rng.randint(1, 4)
    for name in ("latency", "transfer"):
        slower = replace(cost, **{name: getattr(cost, name) + delta})
        assert simulate(program, slower).makespan >= timeline.makespan + delta * crossings
    for kind in "FIWB":
        stage = rng.choice(stages)
        times = sum(
            (stage, kind) == part[:2] for span in route for part in span.actions if not span.pair or overlap is None
        )
        slower = replace(cost, **{kind: [ticks + delta * (s == stage) for s, ticks in enumerate(table[kind])]})
        assert simulate(program, slower).makespan >= timeline.makespan + delta * times


@given(st.randoms(use_true_random=False))
def test_held_activations_and_due_weight_gradients_equal_the_slow_reference(rng):
    program = random_program(rng)
    ticks = [[rng.randint(1, 4) for _ in range(program.num_stages)] for _ in range(4)]
    cost = Cost(*ticks[:3], B=ticks[3], latency=rng.randint(0, 2))
    timeline, times = simulate(program, cost), solve(program, cost)
    for rank in range(program.num_ranks):
        mine = list(program.actions(rank))
        for steps, opens, closes in (
            (timeline.live_activations(rank), {a: times[a][0] for a in mine if a.kind == "F"}, "BW"),
            (timeline.pending_weight_grads(rank), {a: times[a][1] for a in mine if a.kind == "I"}, "W"),
        ):
            held = [(since, _until(action, closes, times)) for action, since in opens.items()]
            for (start, count), (end, _) in pairwise([*steps, (timeline.makespan + 1, 0)]):
                assert all(count == sum(a <= t < b for a, b in held) for t in range(start, end))


def _until(action, closes, times):
    return next(times[key][1] for kind in closes if (key := (action.stage, kind, action.microbatch)) in times)
