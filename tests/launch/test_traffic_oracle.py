"""The closed forms of ring traffic against recorded vectors."""

import json
from pathlib import Path

import pytest

from dualpipe_lab.launch.record import traffic

VECTORS = json.loads((Path(__file__).parents[1] / "oracles" / "collectives.json").read_text())["ring_allreduce"]


@pytest.mark.parametrize("name", VECTORS)
def test_elements_sent_by_a_ring_all_reduce(name):
    vector = VECTORS[name]
    chunks = [end - start for start, end in vector["spans"]]
    assert traffic.split(len(vector["result"]), len(chunks)) == chunks
    assert [traffic.all_reduce(chunks, rank).sent for rank in range(len(chunks))] == vector["sent_elements"]
