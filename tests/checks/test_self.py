"""Every check is checked: the solution and right answers of another style pass with the full score, the starter fails,
wrong answers and cheats fail and are told why."""

import pytest
from right_answers import RIGHT
from wrong_answers import CHEATS, TYPICAL

from dualpipe_course.registry import TOPICS, all_checks, find, topic

NAMES = [check.name for check in all_checks()]
PARTS = sorted({module.partition(".")[0] for module in TOPICS.values()})
BAD = [(name, label, bad) for table in (TYPICAL, CHEATS) for name in table for label, bad in table[name].items()]
GOOD = [(name, label, answer) for name, answers in RIGHT.items() for label, answer in answers.items()]


def test_every_check_has_two_wrong_answers_and_a_cheat_and_four_at_most():
    """A check without them does not land; each is there for its message.  A part has six at most."""
    assert len(NAMES) == len(set(NAMES)) >= 11
    assert set(TYPICAL) == set(CHEATS) == set(NAMES)
    assert all(len(TYPICAL[name]) >= 2 and CHEATS[name] for name in NAMES)
    for name in NAMES:
        assert len(TYPICAL[name]) + len(CHEATS[name]) <= (6 if find(name).about.kind == "part" else 4), name


def test_every_check_that_runs_an_answer_has_two_right_answers_of_another_style():
    """Numbers have no style; how they may be written is in `test_plain.py`."""
    assert set(RIGHT) <= set(NAMES)
    few = {name for name in NAMES if find(name).about.kind != "predict" and len(RIGHT.get(name, {})) < 2}
    assert not few


def test_an_exercise_says_what_it_is():
    for name in NAMES:
        about = find(name).about
        assert about.kind in ("predict", "implement", "puzzle", "find the bug", "part"), name
        assert 3 <= about.minutes <= (90 if about.kind == "part" else 50), name
        assert 1 <= about.points <= 5, name
        assert len(about.hints) >= 2, name
        assert find(name).__doc__, name


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes_with_the_line_that_its_notebook_shows(book, name):
    """That line was printed by an earlier run: a check says the same every time."""
    verdict = book.verdict(name, book.answer(name))
    assert verdict.passed, verdict.message
    assert verdict.score == 1
    assert book.shown(name) == f"{verdict.name} solved: {verdict.message}\n"


@pytest.mark.parametrize("part", PARTS)
def test_the_starter_fails(book, part):
    for name in [check.name for each, module in TOPICS.items() if module.startswith(part) for check in topic(each)]:
        verdict = book.verdict(name, book.answer(name, "exercises"))
        assert not verdict.passed, name
        assert verdict.score == 0, name
        assert verdict.message, name
        assert "NameError" not in verdict.message, name  # a name that its cells do not import


@pytest.mark.parametrize(("name", "label", "bad"), BAD, ids=[f"{name} {label}" for name, label, _ in BAD])
def test_a_wrong_answer_fails_and_is_told_why(book, name, label, bad):
    verdict = book.verdict(name, book.text_of(name, bad.answer))
    assert not verdict.passed
    assert bad.says in verdict.message
    assert verdict.score < 0.95


@pytest.mark.parametrize(("name", "label", "answer"), GOOD, ids=[f"{name} {label}" for name, label, _ in GOOD])
def test_a_right_answer_of_another_style_passes(book, name, label, answer):
    text = book.text_of(name, answer)
    assert text.split() != book.answer(name).split()
    verdict = book.verdict(name, text)
    assert verdict.passed, verdict.message
    assert verdict.score == 1
