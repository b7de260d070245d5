"""A step of the last run: what was measured is what was simulated, and what was counted is what was derived."""

import pytest

from dualpipe_course.own import finder
from dualpipe_course.own.looked_at import look
from dualpipe_course.own.parts import PARTS


@pytest.fixture(scope="module")
def step():
    return look({part: finder.official(part) for part in PARTS})


def actions(timeline):
    return [[(span.kind, span.stage, span.microbatch) for span in spans] for spans in timeline.spans_by_rank]


def test_what_is_measured_is_what_was_simulated(step):
    assert actions(step.measured) == actions(step.simulated)
    assert step.measured.makespan >= step.simulated.makespan


def test_the_derived_bytes_are_those_of_the_ledger(step):
    shapes = 6 * 80  # six messages of the pipeline, each after ten numbers that say its shape
    assert step.counted == sum(step.derived.values()) + shapes
    assert str(step).splitlines()[-1].split()[:4] == ["82,896", "derived;", "counted", "83,376,"]
