"""The page computes the same times as the library: every span, message, number and critical path, to the last digit."""

import json

import pytest
from timeline_grid import numbers, same, timelines

from dualpipe_lab import Timeline
from dualpipe_lab.viz.embed import track_spec


@pytest.fixture(scope="module")
def grid():
    return list(timelines())


def test_recomputed_timelines_equal_the_simulator(grid, node):
    specs = [track_spec(timeline) for timeline in grid]
    assert all("rows" in spec for spec in specs)  # the page gets programs, not times
    for timeline, page in zip(grid, node(specs), strict=True):
        assert same(page) == numbers(timeline), timeline.name


def test_recorded_timelines_keep_their_numbers(grid, node):
    records = [Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) for timeline in grid[::5]]
    for record in records:
        record.costs = None
    for record, page in zip(records, node([track_spec(record) for record in records]), strict=True):
        assert same(page) == numbers(record), record.name
