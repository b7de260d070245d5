"""What has left the course is known: a record, a submission and a learner's word for it get a page, not a riddle."""

import json
from pathlib import Path

import pytest

from dualpipe_course import record, registry
from dualpipe_course.grading import submissions
from dualpipe_course.progress_page import Progress
from dualpipe_course.retired import RETIRED
from dualpipe_course.workspace.renew import fresh

ROOT = Path(__file__).parents[2]


def test_retired_exercises_are_gone_and_lead_to_pages_of_the_book():
    assert not set(RETIRED) & {check.name for check in registry.all_checks()}
    assert all((ROOT / f"{page}.md").is_file() for page in RETIRED.values())


def test_progress_names_what_was_solved_and_is_no_longer_there():
    name, other, *_ = RETIRED
    summary = Progress({name: record.Entry(solved=True), other: record.Entry(attempts=3)}).summary()
    assert summary.startswith("0 of ")
    assert summary.endswith(f"; solved and no longer in the course: {name}")
    assert "no longer" not in Progress({}).summary()


@pytest.mark.parametrize("cells", [True, False])
def test_a_retired_notebook_that_is_handed_in_is_told_so(tmp_path, cells):
    """By its answer cells, or by its name."""
    name = next(iter(RETIRED))
    topic = name.rpartition("-")[0].replace("_", "-")
    cell = {"cell_type": "code", "source": "x = 1", "metadata": {"tags": [f"answer-{name}"]}, "outputs": []}
    notebook = {"cells": [cell] if cells else [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    folder = tmp_path / "in" / "maria"
    folder.mkdir(parents=True)
    (folder / ("mine.ipynb" if cells else f"{topic}.ipynb")).write_text(json.dumps(notebook))
    (found,) = submissions.find(tmp_path / "in", submissions.exercises(ROOT / "exercises"), tmp_path / "out")
    assert found.notebook == ""
    assert found.problem == f"its exercises are no longer in the course; what they were about is in {RETIRED[name]}"


@pytest.mark.parametrize("chapter", ["moving-experts", "ep/moving-experts", "moving-experts-exercises"])
def test_fresh_says_where_a_retired_page_went(tmp_path, chapter):
    with pytest.raises(ValueError, match=f"'{chapter}' is no longer in the course; .* is in book/ep/eplb"):
        fresh(ROOT, tmp_path, chapter)
