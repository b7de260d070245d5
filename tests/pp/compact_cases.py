"""What tests of compact programs compare: costs of all kinds, and every number of the full simulator."""

from dataclasses import replace

from slow_reference import random_cost

from dualpipe_lab.pp import compact_simulate
from dualpipe_lab.pp.compact.order import find_execution
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import F, actions_of
from dualpipe_lab.pp.simulator import simulate


class FloatCost(Cost):
    """Costs that `Cost` refuses, because sums of floats depend on their order: here the orders have to be equal."""

    def __post_init__(self):
        pass

    def to_dict(self, num_stages):
        return {}


def float_cost(rng, num_stages):
    def number():
        return rng.choice([0.0, rng.random(), rng.random() * 1e-6, 3 * rng.random(), rng.randint(0, 3)])

    stages = [[number() for _ in range(num_stages)] for _ in range(4)]
    return FloatCost(
        *stages[:3],
        B=rng.choice([None, stages[3]]),
        overlap=rng.choice([None, number()]),
        latency=rng.choice([0, 0.1, number()]),
        transfer=rng.choice([0, number()]),
    )


def whole_cost(rng, num_stages):
    """Integers, unlike those of `random_cost` with links that are busy all the time in some cases."""
    stages = [[rng.randint(0, 9) for _ in range(num_stages)] for _ in range(4)]
    overlap = rng.choice(
        [None, rng.randint(0, 9), lambda pair: (pair.forward.microbatch + 2 * pair.backward.stage) % 5]
    )
    return Cost(*stages[:3], rng.choice([None, stages[3]]), overlap, rng.randint(0, 3), rng.choice([0, 1, 20]))


COSTS = (random_cost, whole_cost, float_cost)


def refusal(function, *arguments):
    """The text of a ValueError; "" if there is none."""
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def with_order(compact, wide):
    """The same program with an order of execution that was found in turn, or in waves."""
    copy = replace(compact)
    copy.__dict__["execution"] = find_execution(copy, copy.wiring.source, wide=wide)
    assert (copy.execution.waves is not None) is wide
    return copy


def first_peak(steps):
    """The largest number of live activations of one rank, and where it is first reached; counted step by step."""
    held, best = 0, (0, 0)
    for position, step in enumerate(steps):
        held += sum(action.kind == F for action in actions_of(step))
        best = max(best, (held, -position))
        held -= sum(action.kind in "BW" for action in actions_of(step))
    return best[0], -best[1]


def passes_of(spans):
    """Stage by stage, when a rank's first forward and its last backward start and end, from the record of each step."""
    firsts, lasts = {}, {}
    for span in spans:
        for stage, kind, _ in span.actions:
            if kind == F:
                firsts.setdefault(stage, (span.start, span.end))
            else:
                lasts[stage] = span.start, span.end
    return [(stage, (first, lasts[stage])) for stage, first in firsts.items()]


def check_numbers(program, cost, *compacts):
    timeline = simulate(program, cost)
    ranks = range(program.num_ranks)
    for compact in compacts:
        result = compact_simulate(compact, cost)
        assert result.makespan == timeline.makespan
        assert result.busy == tuple(map(timeline.busy_time, ranks))
        assert result.idle == tuple(map(timeline.bubble_time, ranks))
        assert result.ends == tuple(spans[-1].end for spans in timeline.spans_by_rank)
        assert [list(one.items()) for one in result.passes] == list(map(passes_of, timeline.spans_by_rank))
        assert result.peak_activations == tuple(map(timeline.peak_activations, ranks))
        assert result.bubble_fraction == timeline.bubble_fraction
