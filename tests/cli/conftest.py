"""A schedule with an option, in the registry for one test."""

import pytest

from dualpipe_lab import schedules
from dualpipe_lab.pp.program import Program, check_counts


def with_chunks(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> Program:
    """A schedule that has an option."""
    check_counts("chunky", num_virtual_stages=num_virtual_stages)
    rows = [
        " ".join(f"{r + c * num_ranks}{k}{m}" for m in range(num_microbatches) for k, c in order(num_virtual_stages))
        for r in range(num_ranks)
    ]
    return Program.parse(f"Chunky {num_virtual_stages}", rows)


def order(num_virtual_stages):
    return [("F", c) for c in range(num_virtual_stages)] + [("B", c) for c in reversed(range(num_virtual_stages))]


@pytest.fixture
def chunky(monkeypatch):
    monkeypatch.setitem(schedules._BUILDERS, "chunky", with_chunks)
