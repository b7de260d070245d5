"""Balancing experts: DeepSeek's plans to the slot, and exchanges of replicas beside the rules in plain Python."""

from itertools import permutations, product

import numpy as np
import plain_eplb
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.ep import eplb
from dualpipe_lab.ep.eplb import ExpertPlacement, balance, lower_bound, optimum, rank_loads
from dualpipe_lab.ep.eplb.placement import Slots, lower_max_load, separate_duplicates

PUBLISHED = torch.tensor(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
SIZES = [  # experts, slots, groups, nodes, ranks; nodes that do not divide the groups have one plan for all
    (12, 16, 4, 2, 8),
    (12, 16, 3, 2, 8),
    (8, 8, 1, 1, 1),
    (8, 8, 2, 2, 8),
    (6, 18, 3, 3, 9),
    (16, 20, 8, 2, 4),
    (10, 12, 3, 2, 4),
    (6, 9, 1, 2, 3),
]


def rebalance(weight, *sizes):
    return ExpertPlacement(*eplb.rebalance_experts(weight, *sizes))


def draw(rng, kind, shape):
    if kind == "heavy":
        return rng.pareto(1.1, shape)
    return rng.random(shape) if kind == "uniform" else rng.lognormal(0, 1.5, shape)


def heaviest(weight, plan, num_ranks):
    return rank_loads(weight, plan, num_ranks).max(1).values


def duplicates(row):
    """Slots (rank, position) whose expert is also in an earlier slot of the rank."""
    return [(r, i) for r, rank in enumerate(row) for i, expert in enumerate(rank) if expert in rank[:i]]


def num_duplicates(plan, num_ranks):
    """Of every layer."""
    return torch.tensor([len(duplicates(slots.view(num_ranks, -1).tolist())) for slots in plan.physical_to_logical])


def test_the_published_example():
    plan = rebalance(PUBLISHED, 16, 4, 2, 8)
    assert plan.physical_to_logical.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert [part.dtype for part in plan] == [torch.int64] * 3
    for groups, expected in ((4, (1.21, 1.24)), (3, (1.07, 1.19))):  # 2 nodes do not divide 3 groups: global
        loads = rank_loads(PUBLISHED, rebalance(PUBLISHED, 16, groups, 2, 8), 8)
        assert (loads.max(1).values / loads.mean(1)).numpy().round(2).tolist() == list(expected)


def test_the_greedy_plan_item_by_item(subtests):
    for kind, sizes in product(["uniform", "heavy"], SIZES):
        with subtests.test(kind=kind, sizes=sizes):
            loads = draw(np.random.default_rng(0), kind, (20, sizes[0]))
            plan = rebalance(loads, *sizes[1:])
            assert plan.physical_to_logical.tolist() == [plain_eplb.plan(row.tolist(), *sizes[1:]) for row in loads]


def test_every_plan_is_whole(subtests):
    for build, loads, sizes in product(
        [rebalance, balance], ["random", "one hot", "zero", "equal", "beyond float32"], SIZES
    ):
        with subtests.test(build=build, loads=loads, sizes=sizes):
            num_experts, num_slots, groups, nodes, ranks = sizes
            weight = torch.rand(3, num_experts, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            weight = {"one hot": torch.eye(3, num_experts), "zero": weight * 0, "equal": weight * 0 + 1,
                      "beyond float32": torch.full((3, num_experts), 2**24 + 1)}.get(loads, weight)  # fmt: skip
            plan = build(weight, num_slots, groups, nodes, ranks)
            assert plan.counts.sum(1).tolist() == [num_slots] * 3
            assert plan.counts.min() >= 1
            for slots, where, counts in zip(*(part.tolist() for part in plan), strict=True):
                for expert, (places, count) in enumerate(zip(where, counts, strict=True)):
                    assert places[count:] == [-1] * (len(places) - count)
                    assert sorted(places[:count]) == [slot for slot, found in enumerate(slots) if found == expert]
            assert torch.allclose(rank_loads(weight, plan, ranks).sum(1), weight.double().sum(1), rtol=1e-12)
            if groups % nodes == 0:
                group_nodes = plan.physical_to_logical // (num_experts // groups)
                for row in group_nodes.unflatten(1, (nodes, -1)):
                    homes = [set(node.tolist()) for node in row]
                    assert sum(map(len, homes)) == groups


def test_exchanges_are_made():
    """That they are right is shown below: here that `balance` makes them."""
    rng = np.random.default_rng(3)
    loads, ranks = draw(rng, "lognormal", (60, 24)), 6
    greedy = heaviest(loads, rebalance(loads, 30, 1, 1, ranks), ranks)
    never, free = (balance(loads, 30, 1, 1, ranks, separate=how) for how in ("never", "free"))
    assert (heaviest(loads, free, ranks) < greedy * (1 - 1e-9)).sum() > 20
    assert num_duplicates(never, ranks).sum() > num_duplicates(free, ranks).sum()
    loads, ranks = draw(rng, "heavy", (200, 16)), 10
    free, always = (balance(loads, 20, 1, 1, ranks, separate=how) for how in ("free", "always"))
    possible = (always.counts <= ranks).all(1)
    assert possible.sum() > 50
    assert not num_duplicates(always, ranks)[possible].any()
    assert num_duplicates(free, ranks)[possible].any()
    assert (heaviest(loads, always, ranks) / heaviest(loads, free, ranks)).max() > 1


def test_bounds_and_the_optimum():
    rng = np.random.default_rng(6)
    for _ in range(20):
        loads = rng.lognormal(0, 1, 4)
        best = optimum(loads, 6, 3)
        tried = []
        for counts in ((3, 1, 1, 1), (1, 3, 1, 1), (1, 1, 3, 1), (1, 1, 1, 3), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2),
                       (1, 2, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2)):  # fmt: skip
            shares = [load / n for load, n in zip(loads, counts, strict=True) for _ in range(n)]
            tried += [max(a + b, c + d, e + f) for a, b, c, d, e, f in permutations(shares)]
        assert best == pytest.approx(min(tried))
        plan = balance([loads], 6, num_ranks=3)
        assert lower_bound(loads, 6, 3) <= best * (1 + 1e-12) <= float(heaviest([loads], plan, 3)) * (1 + 1e-9)


def test_loads_of_every_type_give_the_plan_of_their_numbers(subtests):
    numbers = torch.tensor([[600.0, 560, 120, 120, 20, 10, 0, 8]], dtype=torch.float64)
    for build in (rebalance, balance):
        expected = build(numbers, 16, 1, 1, 8)
        loads = {dtype: numbers.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32)}
        loads |= {"a gradient": numbers.clone().requires_grad_(), "a view": numbers.repeat(2, 1).T.contiguous().T[:1]}
        loads |= {"numpy": numbers.numpy(), "a list": numbers.tolist()}
        for kind, weight in loads.items():
            with subtests.test(build=build, kind=kind):
                plan = build(weight, 16, 1, 1, 8)
                assert all(map(torch.equal, plan, expected))
                assert torch.equal(rank_loads(weight, plan, 8), rank_loads(numbers, expected, 8))


def test_what_does_not_fit_is_refused(subtests):
    for arguments, message in [
        (([[1.0, 2]], 1, 1, 1, 1), "1 slots cannot hold 2 experts"),
        (([[1.0, 2]], 3, 1, 1, 2), "num_replicas must be a multiple of num_gpus, got 3 and 2"),
        (([[1.0, 2, 3]], 4, 2, 1, 2), "experts must be a multiple of num_groups, got 3 and 2"),
        (([[1.0, 2]], 3, 2, 2, 3), "num_gpus must be a multiple of num_nodes, got 3 and 2"),
        (([[1.0, -2]], 2, 1, 1, 1), "not negative"),
        (([[1.0, float("nan")]], 2, 1, 1, 1), "finite"),
        (([1.0, 2], 2, 1, 1, 1), r"\[layers, experts\]"),
        (([[1.0, 2]], 2, 0, 1, 1), "num_groups counts from 1"),
    ]:
        with subtests.test(arguments=arguments, message=message), pytest.raises(ValueError, match=message):
            rebalance(*arguments)
    with subtests.test("options"), pytest.raises(ValueError, match="separate is"):
        balance([[1.0]], 1, separate="maybe")
    with subtests.test("slots"), pytest.raises(ValueError, match="at most 12 slots"):
        optimum([1.0], 13, 1)
    plan = rebalance([[1.0, 2]], 2, 1, 1, 1)
    for weight, message in (([[1.0, -2]], "not negative"), ([[torch.nan, 2]], "finite"), ([1.0, 2], "shape")):
        with subtests.test(weight=weight), pytest.raises(ValueError, match=message):
            rank_loads(weight, plan, 1)


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
def test_at_any_cost_duplicates_stay_only_where_no_exchange_is_allowed_and_a_single_one_goes_at_the_least(rows):
    for before, load, found in after(separate_duplicates, rows, at_any_cost=True):
        assert not [slot for slot in duplicates(found) if [*exchanges(found, load, *slot)]]
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
    greedy = rebalance(loads, *sizes)
    plans = {how: balance(loads, *sizes, separate=how) for how in ("never", "free", "always")}
    of_greedy = heaviest(loads, greedy, num_ranks)
    for how, plan in plans.items():
        assert plan.counts.tolist() == greedy.counts.tolist()
        for here, there in zip(*(p[0].unflatten(1, (nodes, -1)).sort(-1).values for p in (plan, greedy)), strict=True):
            assert here.tolist() == there.tolist()
        if how != "always":
            lighter = heaviest(loads, plan, num_ranks) <= of_greedy * (1 + 1e-9)
            assert lighter.all(), how
        assert (num_duplicates(plan, num_ranks) <= num_duplicates(greedy, num_ranks)).all()
