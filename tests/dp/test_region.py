"""Regions of tensors as arithmetic, against plain indexing."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.dp.checkpoint.region import ShardRegion, copies_between, full_region


@st.composite
def cuts(draw, shape):
    """A slice along an axis, and of it a flat range."""
    axis = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[axis]))
    stop = draw(st.integers(start, shape[axis]))
    numel = prod((*shape[:axis], stop - start, *shape[axis + 1 :]))
    first = draw(st.integers(0, numel))
    return ShardRegion(shape, axis, start, stop, first, draw(st.integers(first, numel)))


def taken(region):
    """The elements of a region, by numpy's indexing; each element is its own number."""
    grid = np.arange(prod(region.shape)).reshape(region.shape)
    part = np.take(grid, range(region.start, region.stop), axis=region.axis).reshape(-1)
    return part[region.first : region.last].tolist()


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(SHAPES.flatmap(cuts))
def test_runs_are_the_elements_in_order(region):
    assert [start + at for start, length in region.runs() for at in range(length)] == taken(region)
    assert all(length > 0 for _, length in region.runs())


@given(SHAPES.flatmap(lambda shape: st.tuples(cuts(shape), cuts(shape))))
def test_overlaps_are_what_two_regions_have_in_common(pair):
    source, target = pair
    have, want = taken(source), taken(target)
    found = {}
    for copy in copies_between(source, target):
        for at in range(copy.length):
            found[copy.target + at] = have[copy.source + at]
    assert found == {at: element for at, element in enumerate(want) if element in set(have)}


def test_a_number_is_a_vector_of_one():
    assert full_region(()) == ShardRegion((1,), 0, 0, 1, 0, 1)
    assert list(full_region((2, 3)).runs()) == [(0, 6)]
    assert full_region((0, 3)).numel == 0
