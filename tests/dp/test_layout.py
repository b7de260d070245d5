"""Flat buffers as arithmetic: against the oracle, and what every cut must satisfy."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_lab.dp.layout import Layout, reshard
from dualpipe_lab.sharding import shard_slice

ORACLES = Path(__file__).parents[1] / "oracles"
NUMELS = st.lists(st.integers(0, 9), max_size=6)


@given(NUMELS, st.integers(1, 9))
def test_parts_of_all_shards_make_up_every_tensor_once(numels, num_shards):
    layout = Layout(numels, num_shards)
    assert layout.padded_numel % num_shards == 0
    assert 0 <= layout.padded_numel - layout.numel < num_shards
    pieces = [part for shard in range(num_shards) for part in layout.tensors_in(shard)]
    for index, numel in enumerate(numels):
        own = [(part.start, part.stop) for part in pieces if part.tensor == index]
        assert [element for start, stop in own for element in range(start, stop)] == list(range(numel))


def test_spans_equal_torch_chunk_and_leave_a_shard_empty():
    for name, spans in json.loads((ORACLES / "adam.json").read_text())["shards"].items():
        number = int(name.removeprefix("torch_chunk_N"))
        assert [list(Layout([7], number).span(shard)) for shard in range(number)] == spans
    assert Layout([7], 8).span(7) == (7, 7)
    assert Layout([7], 8).tensors_in(7) == []


@pytest.mark.parametrize("name", ["n10_from4_to3", "n7_from2_to8", "n12_from3_to1"])
def test_resharding_equals_the_oracle(name):
    oracle = json.loads((ORACLES / "collectives.json").read_text())["reshard"][name]
    sizes = map(int, re.findall(r"\d+", name))
    assert [[list(overlap) for overlap in target] for target in reshard(*sizes)] == oracle


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 9))
def test_resharding_moves_every_element_once(numel, sources, targets):
    moved = [overlap for target in reshard(numel, sources, targets) for overlap in target]
    assert [element for _, start, stop in moved for element in range(start, stop)] == list(range(numel))
    old = Layout([numel], sources)
    assert all(old.span(source)[0] <= start < stop <= old.span(source)[1] for source, start, stop in moved)


def test_rows_of_a_batch_and_a_bad_count():
    rows = list(range(5))
    assert [rows[shard_slice(5, 4, rank)] for rank in range(4)] == [[0, 1], [2, 3], [4], []]
    with pytest.raises(ValueError, match="at least 1 shard, got 0"):
        Layout([3], 0)
