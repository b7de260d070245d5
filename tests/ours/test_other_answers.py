"""Right answers of another style, from the specification alone, as one trainer: the four runs by two such sets, and by
the course's parts with a single one of them in between."""

import importlib.util
from pathlib import Path

import pytest
from scripts import load

from dualpipe_course.own import finder, runs, trainings
from dualpipe_course.own.looked_at import look
from dualpipe_course.own.parts import PARTS

ROOT = Path(__file__).parents[2]
OFFICIAL = {part: finder.official(part) for part in PARTS}
RIGHT = {
    name: list(answers.values())
    for path in sorted((ROOT / "solutions").glob("*/*/right.py"))
    for name, answers in load(path).RIGHT.items()
}


def book():
    """The texts of answers."""
    spec = importlib.util.spec_from_file_location("checks_book", ROOT / "tests" / "checks" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Book()


@pytest.fixture(scope="module")
def others():
    """By part, its answers of another style."""
    texts = book()
    checks = {part: runs.part_check(part).name for part in PARTS}
    return {part: [texts.text_of(name, answer) for answer in RIGHT[name]] for part, name in checks.items()}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", runs.RUNS)
def test_a_set_of_other_answers_trains(others, name, number):
    assert runs.judge(name, {part: texts[number] for part, texts in others.items()}, 2) <= trainings.TOLERANCE


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_of_other_answers_can_be_looked_at(others, number):
    step = look({part: texts[number] for part, texts in others.items()})
    assert [len(spans) for spans in step.measured.spans_by_rank] == [len(s) for s in step.simulated.spans_by_rank]


@pytest.mark.parametrize("part", PARTS)
def test_an_answer_of_another_style_stands_among_the_course_s_parts(others, part):
    name = next(run for run in ("experts", "dense", "pipeline", "together") if part in runs.RUNS[run])
    assert runs.judge(name, OFFICIAL | {part: others[part][0]}, 1) <= trainings.TOLERANCE
