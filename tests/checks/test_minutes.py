"""What notebooks and the page for learners say of lengths is what the checks say."""

import re
from pathlib import Path

import pytest

from dualpipe_course.check import TOPICS
from dualpipe_course.registry import topic

LEARNERS = Path(__file__).parents[2] / "book" / "learners.md"
KINDS = r"\*(Predict|Implement|Puzzle|Find the bug), (\d+) minutes\.\*"


def minutes_of(name):
    return sum(check.about.minutes for check in topic(name))


@pytest.mark.parametrize("name", TOPICS)
def test_a_notebook_says_how_long_it_takes(book, name):
    text = book.page(name)
    (said,) = re.findall(r"(\d+) minutes in all", text)
    assert int(said) == minutes_of(name)
    assert re.findall(KINDS, text) == [
        (check.about.kind.capitalize(), str(check.about.minutes)) for check in topic(name)
    ]


def test_the_page_for_learners_gives_the_range():
    text = LEARNERS.read_text(encoding="utf-8")
    low, high = map(int, re.search(r"(\d+) to (\d+) minutes long", text).groups())
    lengths = [minutes_of(name) for name in TOPICS]
    assert low <= min(lengths) < low + 10
    assert high - 10 < max(lengths) <= high
