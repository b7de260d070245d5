"""Cuts between layers: against every possible split, and what is refused."""

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.pp.partition import partition

EXACT = st.one_of(st.integers(0, 6), st.fractions(0, 6, max_denominator=6))
LAYERS = st.lists(EXACT, min_size=1, max_size=9)


def every_split(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield [b - a for a, b in pairwise((0, *cuts, num_layers))]


def loads_of(sizes, costs, embedding, head):
    loads, start = [], 0
    for size in sizes:
        loads.append(sum(costs[start : start + size]))
        start += size
    loads[0] += embedding
    loads[-1] += head
    return loads


@given(costs=LAYERS, stages=st.integers(1, 9), embedding=EXACT, head=EXACT)
def test_no_split_is_better(costs, stages, embedding, head):
    stages = min(stages, len(costs))
    found = partition(costs, stages, embedding, head)

    def judged(sizes):
        loads = loads_of(sizes, costs, embedding, head)
        return max(loads), sum(load**2 for load in loads), sizes

    bottleneck, _, sizes = min(map(judged, every_split(len(costs), stages)))
    assert (found.bottleneck, list(found.sizes)) == (bottleneck, sizes)
    assert list(found.loads) == loads_of(sizes, costs, embedding, head)
    assert [layer for stage in found.stages for layer in stage] == list(range(len(costs)))


def test_a_thousand_layers_on_many_stages():
    costs = [1 + layer * layer % 17 for layer in range(1000)]
    found = partition(costs, 64, embedding=30, head=70)
    assert sum(found.loads) == sum(costs) + 100
    assert found.bottleneck < Fraction(sum(found.loads), 64) + 18  # one layer more than the average


def test_the_head_takes_layers_off_the_last_stage():
    # Llama 3 8B has 32 equal layers; its head is about 2.4 of them, its embedding next to nothing.
    found = partition(32, 4, head=Fraction(12, 5))
    assert (found.sizes, found.bottleneck) == ((8, 9, 9, 6), 9)
    assert str(found) == "layers per stage 8 9 9 6; loads 8 9 9 8.4; bottleneck 9"


def test_what_cannot_be_cut_is_refused(subtests):
    for arguments, message in [
        ((3, 4), "partition needs a layer for every stage, got 3 layers for 4 stages; use at most 3 stages"),
        (([], 1), "got 0 layers for 1 stages"),
        ((4, 0), "partition needs num_stages to be an integer of at least 1, got 0"),
        (([1, 0.5], 2), "partition needs exact costs, got 0.5 for layers; use integers or fractions"),
        (([1, -1], 2), "partition needs costs of at least 0, got -1 for layers"),
        ((4, 2, 0.5), "got 0.5 for embedding"),
        ((4, 2, 0, -2), "got -2 for head"),
    ]:
        with subtests.test(arguments=arguments, message=message), pytest.raises(ValueError, match=message):
            partition(*arguments)
