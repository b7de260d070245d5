"""Overlapped pairs in the search and in its bound: against every order there is, where all can be tried."""

from fractions import Fraction
from functools import cache
from itertools import product

import pytest

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.optimise import lower_bound, optimise
from dualpipe_lab.pp.program import Action, B, F, I, Overlap, Program, W
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.rules import InvalidProgram
from dualpipe_lab.pp.validation.validator import validate

PLACEMENTS = {
    "a line": schedules.build("1f1b", 2, 2),
    "a longer batch": schedules.build("1f1b", 2, 3),
    "one rank": schedules.build("1f1b", 1, 3),
    "two directions": schedules.build("easy_dualpipe", 2, 2),
}
APART = [Cost(), Cost(F=2, I=3, W=1), Cost(F=1, I=1, W=4, latency=1), Cost(F=3, I=1, W=0), Cost(B=1, I=2, W=2)]
HALVES = [Cost(overlap=Fraction(5, 2)), Cost(overlap=2), Cost(F=2, I=2, W=2, overlap=5, latency=1)]
LOPSIDED = [
    Cost(F=3, I=1, W=2, overlap=3),
    Cost(F=1, I=3, W=1, overlap=Fraction(9, 2), latency=1),
    Cost(F=2, I=2, W=2, overlap=3),
    Cost(F=2, I=1, W=4, overlap=5, transfer=1),
    Cost(F=1, I=2, W=0, overlap=2),
    Cost(F=[1, 3], I=1, W=[2, 1], overlap=Fraction(7, 2)),
]


def orders(chains):
    """Every order of one rank's steps: the actions of each chain in turn, and an F and a B or I at once as a pair."""
    if not any(chains):
        yield ()
    for index, chain in enumerate(chains):
        if not chain:
            continue
        rest = [*chains[:index], chain[1:], *chains[index + 1 :]]
        yield from ((chain[0], *order) for order in orders(rest))
        for other, partner in enumerate(rest):
            if other != index and partner and chain[0].kind == F and partner[0].kind in (B, I):
                after = [*rest[:other], partner[1:], *rest[other + 1 :]]
                yield from ((Overlap(chain[0], partner[0]), *order) for order in orders(after))


def rows(cells, kinds, in_turn):
    """Every row of one rank; `in_turn`: each kind of work takes its microbatches in order."""
    for choice in product(kinds, repeat=len(cells)):
        chains = [[Action(stage, kind, m) for kind in own] for (stage, m), own in zip(cells, choice, strict=True)]
        for order in orders(chains):
            done = list(Program("one row", [order]))
            work = [[a.microbatch for a in done if a.kind in kind] for kind in (F, B + I)]
            if not in_turn or all(microbatches == sorted(microbatches) for microbatches in work):
                yield order


@cache
def every_program(placement):
    """Every order that runs to its end; of 3 microbatches those that go in turn, on 2 ranks with whole backwards."""
    program = PLACEMENTS[placement]
    cells = [[cell for cell, rank in program.placement.items() if rank == own] for own in range(program.num_ranks)]
    kinds = [(F, B)] if placement == "a longer batch" else [(F, B), (F, I, W)]
    found = []
    for ranks in product(*(list(rows(own, kinds, program.num_microbatches > 2)) for own in cells)):
        try:
            found.append(validate(Program("tried", ranks, program.num_stages, program.num_microbatches)))
        except InvalidProgram:
            continue
    return found


def best(placement, cost, limit):
    makespans = []
    for program in every_program(placement):
        timeline = simulate(program, cost)
        if max(map(timeline.peak_activations, range(program.num_ranks))) <= limit:
            makespans.append(timeline.makespan)
    return min(makespans)


def test_a_pair_that_takes_a_fraction_of_a_tick_does_not_round_the_bound_up():
    cost = Cost(overlap=Fraction(5, 2))
    assert lower_bound(schedules.build("1f1b", 1, 2), cost).ticks == Fraction(11, 2)
    assert simulate(schedules.build("paired_1f1b", 1, 2), cost).makespan == Fraction(11, 2)


def test_moves_that_join_and_part_find_orders_quicker_than_dualpipe_with_its_memory():
    cost, dualpipe = Cost(F=2, I=2, W=2, overlap=5), schedules.build("dualpipe", 4, 12)
    found = optimise(dualpipe, cost, in_flight=5, num_moves=300)
    assert found.fixed == (68, dualpipe)
    assert found.bound.ticks == 66 <= found.makespan < 68
    pairs = {step for steps in found.program.ranks for step in steps if isinstance(step, Overlap)}
    assert all(pair.backward.kind == B for pair in pairs)
    assert pairs != {step for steps in dualpipe.ranks for step in steps if isinstance(step, Overlap)}
    validate(found.program, in_flight=5)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_order_beats_the_bound_and_the_search_finds_the_best(placement):
    program, apart = PLACEMENTS[placement], APART if placement == "a line" else []
    cases = [*product(HALVES + LOPSIDED, [2]), *product(apart, [1, 2])]
    for cost, limit in cases:
        if not isinstance(cost.F, list) or program.num_stages == len(cost.F):
            least = best(placement, cost, limit)
            assert lower_bound(program, cost, in_flight=limit).ticks <= least
            if cost not in LOPSIDED[3:]:
                found = optimise(program, cost, in_flight=limit, num_moves=100)
                assert found.bound.ticks <= found.makespan <= least
