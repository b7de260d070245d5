"""Exchanges of replicas, beside the same rules in plain Python, for arrangements that no greedy plan makes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.ep import eplb
from dualpipe_lab.ep.eplb.placement import Slots, lower_max_load, separate_duplicates


@st.composite
def arrangements(draw):
    """Rows of [ranks, slots of a rank]: the expert in each slot; and the load of each expert's replicas."""
    rows, ranks, size = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 6))
    slot = st.integers(0, num_experts - 1)
    row = st.lists(st.lists(slot, min_size=size, max_size=size), min_size=ranks, max_size=ranks)
    load = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)  # whole: sums are exact
    return draw(st.lists(st.tuples(row, load), min_size=rows, max_size=rows))


def slots_of(rows):
    experts = np.array([row for row, _ in rows])
    loads = np.array([[[load[e] for e in rank] for rank in row] for row, load in rows], np.float64)
    return Slots(experts, loads)


def totals(row, load):
    return [sum(load[e] for e in rank) for rank in row]


def duplicates(row):
    """Slots (rank, position) whose expert is also in an earlier slot of the rank."""
    return [(r, i) for r, rank in enumerate(row) for i, expert in enumerate(rank) if expert in rank[:i]]


def exchanges(row, load, r, i):
    """Loads of all ranks after each exchange of slot i of rank r with another rank's, and of the heavier of both.

    Those that would bring an expert to a rank that has it already are not allowed.
    """
    for q, other in enumerate(row):
        for j, came in enumerate(other):
            if q == r or row[r][i] in other or came in row[r]:
                continue
            changed = [list(rank) for rank in row]
            changed[r][i], changed[q][j] = came, row[r][i]
            after = totals(changed, load)
            yield after, max(after[r], after[q])


def after(function, rows, **options):
    """The rows that a function leaves, with their loads; every slot keeps the load of its expert."""
    slots = slots_of(rows)
    function(slots, **options)
    for (row, load), found, loads in zip(rows, slots.experts.tolist(), slots.loads.tolist(), strict=True):
        assert loads == [[load[e] for e in rank] for rank in found]
        assert sorted(e for rank in found for e in rank) == sorted(e for rank in row for e in rank)
        assert len(duplicates(found)) <= len(duplicates(row))
        yield row, load, found


@given(arrangements())
def test_no_exchange_is_left_that_makes_a_heaviest_rank_lighter(rows):
    for before, load, found in after(lower_max_load, rows):
        heaviest = max(totals(found, load))
        assert heaviest <= max(totals(before, load))
        source = totals(found, load).index(heaviest)
        for i in range(len(found[source])):
            assert all(heavier >= heaviest for _, heavier in exchanges(found, load, source, i))


@given(arrangements())
def test_one_round_makes_the_exchange_whose_heavier_rank_is_lightest(rows):
    for before, load, found in after(lower_max_load, rows, max_rounds=1):
        heaviest = max(totals(before, load))
        source = totals(before, load).index(heaviest)
        possible = [
            (heavier, sorted(each))
            for i in range(len(before[source]))
            for each, heavier in exchanges(before, load, source, i)
            if heavier < heaviest
        ]
        if not possible:
            assert found == before
            continue
        least = min(heavier for heavier, _ in possible)
        assert sorted(totals(found, load)) in [each for heavier, each in possible if heavier == least]


@given(arrangements())
def test_duplicates_stay_only_where_every_exchange_costs(rows):
    for before, load, found in after(separate_duplicates, rows):
        limit = max(totals(found, load))
        assert limit <= max(totals(before, load))
        for slot in duplicates(found):
            assert all(heavier > limit for _, heavier in exchanges(found, load, *slot))


@given(arrangements())
def test_at_any_cost_duplicates_stay_only_where_no_exchange_is_allowed(rows):
    for _, load, found in after(separate_duplicates, rows, at_any_cost=True):
        assert not [slot for slot in duplicates(found) if [*exchanges(found, load, *slot)]]


@given(arrangements())
def test_a_single_duplicate_is_separated_at_the_least_cost(rows):
    for before, load, found in after(separate_duplicates, rows, at_any_cost=True):
        if len(duplicates(before)) == 1 and (possible := [*exchanges(before, load, *duplicates(before)[0])]):
            least = min(heavier for _, heavier in possible)
            assert duplicates(found) == []
            assert sorted(totals(found, load)) in [sorted(each) for each, heavier in possible if heavier == least]


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(0, 3), st.data())
def test_a_plan_has_the_greedy_counts_on_every_node_and_is_never_worse(layers, nodes, ranks, spare, data):
    num_ranks = nodes * ranks
    groups = nodes * data.draw(st.integers(1, 2))
    num_experts = groups * data.draw(st.integers(1, 4))
    num_slots = (-(-num_experts // num_ranks) + spare) * num_ranks
    loads = [[data.draw(st.integers(0, 99)) for _ in range(num_experts)] for _ in range(layers)]
    sizes = num_slots, groups, nodes, num_ranks
    greedy = eplb.ExpertPlacement(*eplb.rebalance_experts(loads, *sizes))
    plans = {how: eplb.balance(loads, *sizes, separate=how) for how in ("never", "free", "always")}
    of_greedy = eplb.rank_loads(loads, greedy, num_ranks)
    for how, plan in plans.items():
        assert plan.counts.tolist() == greedy.counts.tolist()
        for here, there in zip(*(p[0].unflatten(1, (nodes, -1)).sort(-1).values for p in (plan, greedy)), strict=True):
            assert here.tolist() == there.tolist()
        if how != "always":
            lighter = eplb.rank_loads(loads, plan, num_ranks).max(1).values <= of_greedy.max(1).values * (1 + 1e-9)
            assert lighter.all(), how
    for at_first, *rows in zip(greedy[0], *(plan[0] for plan in plans.values()), strict=True):
        most, *found = (len(duplicates(row.view(num_ranks, -1).tolist())) for row in (at_first, *rows))
        assert max(found) <= most
