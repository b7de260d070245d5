"""The studio's numbers equal the library's: times, peaks, bounds, waits and chains of causes, in Chromium."""

import random

import pytest
from schedule_vectors import broken, packed, registry
from timeline_grid import COSTS

from dualpipe_lab import Cost, simulate
from dualpipe_lab.pp import explain, lower_bound
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate
from dualpipe_lab.timeline.data import _Walk

pytestmark = pytest.mark.browser

MEASURE = """inputs => inputs.map(packed => {
  const program = read(packed), [rank, position] = packed.place;
  const { times, ...numbers } = measures(program, packed.costs, packed.inFlight), starts = [];
  const track = draftTrack(program, packed.costs);
  program.ranks.forEach((row, r) => row.forEach((_, at) => starts.push(explainStart(program, packed.costs, r, at))));
  const why = explainStart(program, packed.costs, rank, position);
  const places = (span) => criticalPath(track, span).spans.map((one) => Object.values(stepOfSpan(track, one)));
  return { ...numbers, start: [...times.start], end: [...times.end],
    pauses: starts.map(({ pause }) => pause).filter(Boolean).map(p =>
      [p.rank, p.start, p.end, p.phase, p.beside, p.what, p.needed, p.source, p.onLink, p.words, p.text]),
    why: [why.start, why.end, why.pause && why.pause.words],
    chain: places(spanOfStep(track, rank, position)), critical: places() };
})"""
ZERO = Cost(F=0, I=0, W=0, latency=1)


def chain(walk, place):
    """The walk back to time 0 from any span, not only from the last."""
    found = []
    while place is not None:
        found.append(list(place))
        place = walk.before(*place)
    return found[::-1]


def library(program, cost, place, bound):
    """What the library says of a valid program, in the form of the page."""
    timeline, ranks = simulate(program, cost), range(program.num_ranks)
    pauses = [pause for pause in explain(program, cost).pauses if pause.phase != "cool-down"]
    span = timeline.spans_by_rank[place[0]][place[1]]
    words = [p.words() for p in pauses if (p.rank, p.end) == (place[0], span.start)]
    path = timeline.critical_path()
    at = {id(span): [r, i] for r, row in enumerate(timeline.spans_by_rank) for i, span in enumerate(row)}
    return {
        "makespan": timeline.makespan,
        "busy": [timeline.busy_time(rank) for rank in ranks],
        "bubble": timeline.bubble_fraction,
        "peak": [timeline.peak_activations(rank) for rank in ranks],
        "pending": [timeline.peak_pending_weight_grads(rank) for rank in ranks],
        "messages": len(timeline.messages),
        "stored": max(len({action.stage for action in program.actions(rank)}) for rank in ranks),
        "bound": lower_bound(program, cost, bound)._asdict(),
        "start": [span.start for row in timeline.spans_by_rank for span in row],
        "end": [span.end for row in timeline.spans_by_rank for span in row],
        "pauses": [[*pause, pause.words(), str(pause)] for pause in pauses],
        "why": [span.start, span.end, words[0] if words and starts_late(timeline, place) else None],
        "chain": chain(_Walk(timeline.spans_by_rank, timeline.messages), place),
        "critical": [at[id(span)] for span in path],
    }


def starts_late(timeline, place):
    rank, position = place
    row = timeline.spans_by_rank[rank]
    return row[position].start > (row[position - 1].end if position else 0)


def drawn_cost(rng, program):
    """One of the grid's costs, one without durations, or costs that differ between stages."""
    stages = range(program.num_stages)
    return rng.choice(
        [
            *COSTS,
            ZERO,
            Cost(
                F=[1 + s % 3 for s in stages],
                I=[2 + s % 2 for s in stages],
                W=1,
                latency=1,
                transfer=rng.choice((0, 2)),
            ),
            Cost(F=[rng.randint(0, 5) for _ in stages], I=2, W=3, B=[4 + s % 2 for s in stages], overlap=5, transfer=4),
        ]
    )


def compare(core, programs, seed):
    rng, inputs, expected = random.Random(seed), [], []
    for program in programs:
        cost, rank = drawn_cost(rng, program), rng.randrange(program.num_ranks)
        place = [rank, rng.randrange(len(program.ranks[rank]))]
        bound = rng.choice((None, None, 1, program.num_microbatches, [1 + r % 3 for r in range(program.num_ranks)]))
        costs = cost.to_dict(program.num_stages)
        inputs.append(packed(program, costs=costs, place=place, inFlight=bound))
        expected.append(library(program, cost, place, bound))
    for one, found, wanted in zip(inputs, core.evaluate(MEASURE, inputs), expected, strict=True):
        assert found == wanted, one
    return expected


def is_valid(program):
    try:
        return bool(validate(program))
    except InvalidProgram:
        return False


def test_every_schedule_of_the_registry_has_the_library_s_numbers(core):
    expected = compare(core, list(registry(microbatches=(1, 2, 4, 6, 9))), seed=1)
    assert {one["bound"]["reason"] for one in expected} == {"work", "memory"}
    assert any(one["why"][2] and "on the link" in one["why"][2] for one in expected)
    assert sum(max(one["pending"]) > 1 for one in expected) > 20


def test_orders_that_readers_make_have_the_library_s_numbers(core):
    programs = [program for program in broken(900, seed=5) if is_valid(program)]
    assert len(programs) > 100
    compare(core, programs, seed=6)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ({"F": 0.5}, "Cost.F must be a whole number, got 0.5; scale all costs to whole ticks"),
        ({"latency": -1}, "Cost.latency must not be negative, got -1"),
        ({"W": [1, 2, 3]}, "Cost.W lists 3 stages, the program has 2; give one per stage"),
    ],
)
def test_costs_that_are_not_exact_are_refused(core, costs, words):
    unit = {"F": 1, "I": 1, "W": 1, "B": None, "overlap": None, "latency": 0, "transfer": 0}
    said = core.evaluate(
        "([rows, costs]) => { try { measures(parseProgram(rows), costs); } catch ({ message }) { return message; } }",
        [["0F0 0B0", "1F0 1B0"], unit | costs],
    )
    assert said.startswith(words)


def test_an_invalid_schedule_has_no_numbers_but_says_its_problems(core):
    said = core.evaluate("() => { try { measures(parseProgram('0F0'), {}); } catch (error) { return error.message; } }")
    assert said == "program 'schedule' has 1 problem:\n  - stage 0, microbatch 0: F without a backward"
