"""Compact programs give the numbers of the full simulator, to the last digit, and refuse what the validator refuses."""

import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_grid import SIZES, legal
from slow_judge import mutant
from slow_reference import random_cost, random_program

from dualpipe_lab.pp import CompactProgram, compact_build, compact_simulate, schedules
from dualpipe_lab.pp.compact.order import find_execution
from dualpipe_lab.pp.compact.program import _converted
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.program import Action, F, Overlap, Program, actions_of
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.routes import routes
from dualpipe_lab.pp.validation.validator import InvalidProgram, validate


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


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_has_the_numbers_of_the_full_simulator(name):
    rng = random.Random(name)
    for program in legal(name, [(p, m) for p, m in SIZES if p < 4 or m % 5 == 1]):
        compact = CompactProgram.of(program)
        both = [with_order(compact, wide) for wide in (False, True)]
        for make in COSTS:
            check_numbers(program, make(rng, program.num_stages), *both)
        peaks = [first_peak(steps) for steps in program.ranks]
        assert list(zip(*compact.peaks, strict=True)) == peaks


@pytest.mark.parametrize("name", schedules.names())
def test_uneven_numbers_of_microbatches_have_the_numbers_of_the_full_simulator(name):
    programs = list(legal(name, [(5, 23), (6, 26), (7, 30)]))  # beyond the grid; none is a multiple of the ranks
    assert programs
    for program in programs:
        cost = whole_cost(random.Random(name), program.num_stages)
        check_numbers(program, cost, compact_build(name, program.num_ranks, program.num_microbatches))


@settings(deadline=None, max_examples=120)
@given(st.randoms(use_true_random=False))
def test_random_programs_have_the_numbers_of_the_full_simulator(rng):
    program = random_program(rng)
    compact = CompactProgram.of(program)
    assert compact.to_program() == program
    assert CompactProgram.of(lower(program)) == compact
    cost = rng.choice(COSTS)(rng, program.num_stages)
    check_numbers(program, cost, compact, *(with_order(compact, wide) for wide in (False, True)))


@pytest.mark.parametrize("name", schedules.names())
def test_array_builders_make_the_programs_of_the_registry(name):
    for p, m in SIZES:
        refused = refusal(schedules.build, name, p, m)
        assert refusal(compact_build, name, p, m) == refused
        if refused:
            continue
        program, compact = schedules.build(name, p, m), compact_build(name, p, m)
        assert compact == CompactProgram.of(program)
        assert (compact.to_program(), compact.name) == (program, program.name)
        assert compact.num_directions == program.num_directions
        assert compact.check() is compact


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("interleaved", {"num_virtual_stages": 1}),
        ("interleaved", {"num_virtual_stages": 3, "round_size": 5}),
        ("looped_bfs", {"num_virtual_stages": 3}),
        ("zero_bubble_h1", {"num_virtual_stages": 3}),
        ("zero_bubble_h2", {"in_flight": 5}),
        ("zero_bubble_h2", {"in_flight": 9}),
        ("paired_interleaved", {"num_virtual_stages": 3}),
        ("paired_zero_bubble_h1", {"num_virtual_stages": 2}),
    ],
)
def test_array_builders_take_the_options_of_the_registry(name, options):
    for program in legal(name, **options):
        made = compact_build(name, program.num_ranks, program.num_microbatches, **options)
        assert made.to_program() == program


@pytest.mark.parametrize("name", schedules.names())
def test_a_builder_has_the_options_and_refusals_of_the_registry(name):
    with pytest.raises(TypeError, match="colour"):
        compact_build(name, 2, 4, colour=1)
    for sizes in ((0, 4), (2, 0), (2, 1.5)):
        refused = refusal(schedules.build, name, *sizes)
        assert "at least 1" in refused
        assert refusal(compact_build, name, *sizes) == refused


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="there is no schedule named '2f2b'"):
        compact_build("2f2b", 2, 2)


def agrees(program, rng):
    """Whether the program is right, for the validator, for `of` and for the check alike; checks its numbers."""
    refused = refusal(validate, program)
    assert refusal(CompactProgram.of, program) == refused
    if refused and not program.is_lowered:
        with pytest.raises((InvalidProgram, KeyError)):  # the check by itself; KeyError: an unknown kind
            _converted(program).check()
    elif not refused:
        compact = CompactProgram.of(program)
        cost = rng.choice(COSTS)(rng, program.num_stages)
        check_numbers(program, cost, *(with_order(compact, wide) for wide in (False, True)))
    return not refused


@settings(deadline=None, max_examples=120)
@given(st.randoms(use_true_random=False))
def test_the_check_refuses_what_the_validator_refuses(rng):
    program = random_program(rng)
    directions = rng.choice([None, 1, len(set(routes(program)))])
    program = Program(program.name, program.ranks, program.num_stages, program.num_microbatches, directions)
    for _ in range(rng.randint(0, 3)):
        program = mutant(rng, program)
    agrees(program, rng)


@pytest.mark.parametrize("name", schedules.names())
def test_mutants_of_every_schedule_are_refused_as_by_the_validator(name):
    rng = random.Random(name)
    programs = list(legal(name, [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 8)]))
    verdicts = []
    for _ in range(80):
        program = mutant(rng, rng.choice(programs))
        verdicts.append(
            agrees(lower(program) if rng.random() < 0.2 and not refusal(validate, program) else program, rng)
        )
    assert 3 < sum(verdicts) < 60  # both kinds occur


DEADLOCK = Program.parse("crossed", ["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"])
PAIRS = Program.parse("pairs", ["0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (
            DEADLOCK,
            [
                "ranks 0 and 1 wait for each other",
                "rank 0 stands before 0B0 (position 1), which needs the gradient of 1B0 on rank 1 (position 3)",
                "rank 1 stands before 1F1 (position 0), which needs the activation of 0F1 on rank 0 (position 2)",
            ],
        ),
        (
            PAIRS,
            [
                "rank 0 stands before 0B0 (position 1), which needs the gradient of 1B0 on rank 1 (position 1)",
                "rank 1 stands before 1F1 (position 1), which needs the activation of 0F1 on rank 0 (position 1)",
            ],
        ),
        (Program.parse("alone", ["0F0 1F1 1B1 0F1 1F0 1B0 0B0 0B1"]), ["rank 0 is stuck", "the activation of 0F1 on"]),
    ],
)
def test_a_deadlock_names_the_actions(program, lines, wide):
    compact = _converted(program)
    with pytest.raises(InvalidProgram) as raised:
        find_execution(compact, compact.wiring.source, wide=wide)
    for line in lines:
        assert line in str(raised.value)
    with pytest.raises(InvalidProgram, match="deadlock"):
        compact_simulate(compact)
    with pytest.raises(InvalidProgram, match="fix: "):  # the validator's report
        CompactProgram.of(program)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": {0: 1}}, "stage 0, microbatch 0: no F; every stage runs every microbatch"),
        ({"kind": {0: 7}}, r"rank 0, position 0: the action has kind 7, out of range 0\.\.3"),
        ({"stage": {5: 3}}, r"rank 1, position 1: the action has stage 3, out of range 0\.\.1"),
        ({"microbatch": {5: -1}}, r"rank 1, position 1: the action has microbatch -1"),
        ({"microbatch": {0: 1}}, "stage 0, microbatch 1: F runs again; keep one"),
        ({"kind": {2: 2}}, "stage 0, microbatch 0: I without W; add it"),
        ({"second": {1: True}}, "0F1 must be the B or I of a pair, behind its F"),
        ({"second": {0: True}}, "0F0 must be the B or I of a pair, behind its F"),
        ({"second": {5: True}}, r"1B0 \(rank 1, position 0\) needs 1F0 \(rank 1, position 0\) in an earlier step"),
        ({"kind": {4: 1, 5: 0}}, r"1B0 \(rank 1, position 0\) needs 1F0 \(rank 1, position 1\) in an earlier step"),
        ({"num_microbatches": 3}, r"stage 0, microbatch 2 \(and 1 more\): no F"),
        ({"num_directions": 0}, "take 1 routes through the ranks, num_directions=0"),
        ({"offsets": [0, 4, 4, 8]}, "rank 1 has no actions"),
        ({"offsets": [0, 5, 8]}, r"1B0 \(rank 1, position 0\) needs 1F0 \(rank 0, position 4\)"),
    ],
)
def test_arrays_that_are_no_program_are_explained(change, message):
    compact = compact_build("1f1b", 2, 2)
    with pytest.raises(InvalidProgram, match=message):
        replace(compact, **{name: _changed(getattr(compact, name), value) for name, value in change.items()}).check()


def _changed(old, new):
    if isinstance(new, int):
        return new
    if isinstance(new, list):
        return np.array(new)
    array = old.copy()
    for index, value in new.items():
        array[index] = value
    return array


def test_empty_programs_are_refused():
    for rows in ([], [[]]):
        with pytest.raises(InvalidProgram):
            CompactProgram.of(Program("empty", rows))
    nothing = np.zeros(0, np.int32)
    columns = [nothing, nothing, nothing, nothing.astype(bool)]
    with pytest.raises(InvalidProgram, match="no ranks"):
        CompactProgram("none", 0, 0, np.zeros(1, np.int64), *columns).check()
    with pytest.raises(ValueError, match="offsets that grow from 0"):
        CompactProgram("none", 0, 0, np.array([0, 2]), *columns)


def test_indices_beyond_the_arrays_are_refused_by_the_validator():
    for stage in (10**6, 2**40):
        with pytest.raises(InvalidProgram, match="stage"):
            CompactProgram.of(Program("far", [[Action(0, "F", 0), Action(stage, "B", 0)]]))
    with pytest.raises(InvalidProgram, match="unknown kind"):
        CompactProgram.of(Program("odd", [[Action(0, "X", 0), Action(0, "B", 0)]]))
    with pytest.raises(InvalidProgram, match="must pair"):
        CompactProgram.of(Program("odd", [[Overlap(Action(0, "B", 0), Action(0, "F", 0))]]))


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "dualpipev"])
def test_numbers_that_numpy_does_not_hold_are_exact_too(name):
    program = schedules.build(name, 3, 8)
    waves = with_order(CompactProgram.of(program), wide=True)
    for cost in (
        Cost(F=2**61, I=2**70 + 1, W=3, latency=2**65),
        Cost(F=Fraction(1, 2**40), I=Fraction(1, 3**40), W=1),
        FloatCost(F=0.1, I=2**60 + 1, W=3),
        FloatCost(F=0.1, I=Fraction(1, 3), W=3, latency=Fraction(1, 7)),
        FloatCost(F=float("inf"), I=1.0, W=2),
    ):
        timeline, result = simulate(program, cost), compact_simulate(waves, cost)
        assert result.makespan == timeline.makespan
        if float("inf") != cost.F:
            assert result.busy == tuple(map(timeline.busy_time, range(3)))


@pytest.mark.parametrize("name", schedules.names(pairs=True))
def test_a_price_of_pairs_by_their_stages_is_asked_once_for_each(name):
    asked = []

    def by_stages(pair):
        asked.append((pair.forward.stage, pair.backward.stage, pair.backward.kind))
        return 3 + pair.forward.stage + 5 * pair.backward.stage + (pair.backward.kind == "B")

    for compact in map(CompactProgram.of, legal(name, [(4, 16)])):
        cost = Cost(F=2, I=[*range(compact.num_stages)], W=3, overlap=by_stages, latency=1)
        every = compact_simulate(compact, cost)
        num_pairs = int(compact.second.sum())
        assert len(asked) == num_pairs
        asked.clear()
        assert compact_simulate(compact, cost, by_stages=True) == every
        assert len(asked) == len(set(asked)) <= max(0, num_pairs - 1)
        asked.clear()


@pytest.mark.parametrize("name", schedules.names())
def test_counts_are_those_of_the_actions_in_their_order(name):
    for program in legal(name, [(3, 7), (4, 8)]):
        for rank, counts in enumerate(CompactProgram.of(program).counts):
            found = Counter((action.stage, action.kind) for action in program.actions(rank))
            assert list(counts) == [(*key, count) for key, count in found.items()]


def test_costs_must_fit_the_stages():
    compact = compact_build("gpipe", 2, 1)
    with pytest.raises(ValueError, match=r"Cost\.F lists 3 stages, the program has 2"):
        compact_simulate(compact, Cost(F=[1, 2, 3]))
    pairs = compact_build("dualpipev", 2, 4)
    with pytest.raises(ValueError, match="overlap of"):
        compact_simulate(pairs, Cost(overlap=lambda pair: 2.5))


def test_wide_programs_run_in_waves_and_narrow_ones_in_turn():
    wide, narrow = compact_build("1f1b", 128, 600), compact_build("1f1b", 8, 9000)
    assert wide.execution.waves is not None
    assert narrow.execution.waves is None
    cost = Cost(F=3, I=4, W=2, latency=1, transfer=2)
    assert compact_simulate(wide, cost) == compact_simulate(with_order(wide, wide=False), cost)
    assert compact_simulate(narrow, Cost(F=3, B=4)).makespan == 7 * 9007


def test_the_arrays_of_a_program_do_not_change():
    compact = compact_build("1f1b", 2, 3)
    for array in (compact.offsets, compact.kind, compact.stage, compact.microbatch, compact.second):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_programs_of_other_orders_are_not_equal():
    assert compact_build("1f1b", 2, 3) == compact_build("pipedream", 2, 3)
    assert compact_build("1f1b", 2, 3) != compact_build("gpipe", 2, 3)
    assert compact_build("1f1b", 2, 3) != "1F1B"
    assert repr(compact_build("1f1b", 2, 3)) == "<CompactProgram '1F1B': 2 ranks, 2 stages, 3 microbatches>"


def test_numpy_is_imported_on_first_use_only():
    code = (
        "import sys; from dualpipe_lab.pp import compact_build as b; assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", f"{code}; b('1f1b', 2, 2); assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize("name", ["1f1b", "dualpipev", "zbv"])
def test_a_small_program_is_simulated_at_once(name):
    compact = compact_build(name, 8, 32)

    def seconds():
        before = time.perf_counter()
        compact_simulate(compact, Cost(F=3, I=4, W=2, latency=1, transfer=2))
        return time.perf_counter() - before

    compact_simulate(compact)
    assert min(seconds() for _ in range(50)) < 0.002  # half a millisecond on a quiet machine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble_h1", "dualpipev"])
def test_a_huge_program_has_its_closed_form(name):
    compact = compact_build(name, 512, 1024)
    result = compact_simulate(compact)
    work = {"dualpipev": 2 * 1024 * 3}.get(name, 1024 * 3)
    idle = {"1f1b": 511 * 3, "gpipe": 511 * 3, "zero_bubble_h1": 511, "dualpipev": 511 * 2}[name]
    assert set(result.busy) == {work}
    assert set(result.idle) == {idle}
    assert compact.execution.waves is not None
