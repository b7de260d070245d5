"""Flat buffers as arithmetic: against torch.chunk, and what every cut must satisfy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.dp.layout import Layout, reshard
from dualpipe_lab.sharding import shard_slice

NUMELS = st.lists(st.integers(0, 9), max_size=6)


@given(NUMELS, st.integers(1, 9))
def test_parts_of_all_shards_make_up_every_tensor_once(numels, num_shards):
    layout = Layout(numels, num_shards)
    assert layout.padded_numel % num_shards == 0
    assert 0 <= layout.padded_numel - layout.numel < num_shards
    pieces = [part for shard in range(num_shards) for part in layout.tensors_in(shard)]
    assert all(part.start < part.stop for part in pieces)
    for index, numel in enumerate(numels):
        own = [(part.start, part.stop) for part in pieces if part.tensor == index]
        assert [element for start, stop in own for element in range(start, stop)] == list(range(numel))


@given(st.integers(1, 40), st.integers(1, 9))
def test_spans_are_those_of_torch_chunk_and_the_last_shards_may_be_empty(numel, num_shards):
    layout = Layout([numel], num_shards)
    spans = [layout.span(shard) for shard in range(num_shards)]
    chunks = [(int(part[0]), int(part[-1]) + 1) for part in torch.arange(numel).chunk(num_shards)]
    assert spans == chunks + [(numel, numel)] * (num_shards - len(chunks))
    assert spans == [(part.start, part.stop) for part in (shard_slice(numel, num_shards, s) for s in range(num_shards))]


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
def test_resharding_moves_every_element_once(numel, sources, targets):
    """Each in a run from the shard that had it to the one that gets it."""
    moved = [(target, *overlap) for target, found in enumerate(reshard(numel, sources, targets)) for overlap in found]
    assert [element for *_, start, stop in moved for element in range(start, stop)] == list(range(numel))
    old, new = Layout([numel], sources), Layout([numel], targets)
    for target, source, start, stop in moved:
        assert max(old.span(source)[0], new.span(target)[0]) <= start < stop
        assert stop <= min(old.span(source)[1], new.span(target)[1])


def test_a_layout_without_a_shard_is_refused():
    with pytest.raises(ValueError, match="at least 1 shard, got 0"):
        Layout([3], 0)
