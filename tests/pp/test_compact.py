"""Compact programs give the numbers of the full simulator, to the last digit, and refuse what the validator refuses."""

import random
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
from compact_cases import (
    COSTS,
    FloatCost,
    check_numbers,
    first_peak,
    refusal,
    whole_cost,
    with_order,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_grid import SIZES, legal
from slow_reference import random_program

from dualpipe_lab.pp import CompactProgram, compact_build, compact_simulate, schedules
from dualpipe_lab.pp.compact.builders import placement
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.lowering import lower
from dualpipe_lab.pp.simulator import simulate


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


@pytest.mark.parametrize("name", schedules.names())
def test_a_placement_is_that_of_the_program_and_is_refused_as_it_is(name):
    for num_ranks, num_microbatches in product(range(1, 7), (1, 2, 3, 4, 6, 8, 12)):
        if text := refusal(schedules.build, name, num_ranks, num_microbatches):
            assert refusal(placement, name, num_ranks, num_microbatches) == text
            continue
        program = schedules.build(name, num_ranks, num_microbatches)
        found = placement(name, num_ranks, num_microbatches)
        stages = [tuple(sorted({action.stage for action in program.actions(rank)})) for rank in range(num_ranks)]
        assert (list(found.stages), found.num_stages) == (stages, program.num_stages)
