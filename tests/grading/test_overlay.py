"""What of a submission counts: its answer cells, by tag, and nothing else."""

import json

import pytest

from dualpipe_course.grading import notebook, protocol
from dualpipe_course.grading.evaluator import arguments_of
from dualpipe_course.grading.grader import Graded, Mark
from dualpipe_course.grading.notebook import Cell, Unreadable, overlay, read
from dualpipe_course.grading.report import write_csv, write_html
from dualpipe_course.grading.worker import run_cell

OLD_IMPORT = "from dualpipe_lab import checks as check"
PRISTINE = [Cell("", "import x"), Cell("answer-a-1", "raise"), Cell("check-a-1", "check.a.one(one)")]


def test_the_answer_is_taken_and_everything_else_is_pristine():
    found = overlay(
        PRISTINE, [Cell("", "import y"), Cell("answer-a-1", "one = 1"), Cell("check-a-1", "print('solved')")]
    )
    (task,) = found.tasks
    assert (task.given, task.answer, task.check) == (["import x"], "one = 1", "check.a.one(one)")
    assert found.notes == ["check-a-1 was edited: ignored", "1 extra or edited cell: ignored"]


def test_a_notebook_of_the_time_before_the_course_was_a_package_counts_like_any_other(book):
    """Its import would get a sentence; the pristine cell stands in its place."""
    topic = "zero_2"
    pristine = [Cell(tags, source) for tags, source in book.cells["exercises"][topic]]
    saved = [Cell(cell.tag, cell.source.replace("from dualpipe_course import check", OLD_IMPORT)) for cell in pristine]
    saved = [Cell(c.tag, book.answer("zero_2-1")) if c.tag == "answer-zero_2-1" else c for c in saved]
    assert saved != pristine
    task = overlay(pristine, saved).tasks[0]
    assert OLD_IMPORT not in "".join(task.given)
    assert task.answer == book.answer("zero_2-1")
    assert book.verdict("zero_2-1", task.answer).passed


def test_a_split_answer_is_joined_and_a_missing_one_is_none():
    split = overlay(
        PRISTINE, [*PRISTINE[:1], Cell("answer-a-1", "one = 1"), Cell("answer-a-1", "one += 1"), PRISTINE[2]]
    )
    assert split.tasks[0].answer == "one = 1\none += 1"
    assert split.notes == ["answer-a-1 occurs 2 times: joined"]
    assert overlay(PRISTINE, []).tasks[0].answer is None
    assert overlay(PRISTINE, PRISTINE).tasks[0].untouched
    assert overlay(PRISTINE, PRISTINE).notes == []


def test_what_is_no_notebook_is_named(tmp_path, subtests):
    for text in [
        "",
        "no json",
        "[]",
        "3",
        '{"cells": 3}',
        '{"cells": [3]}',
        '{"cells": [{"cell_type": "code"}]}',
        "[" * 100_000,
    ]:
        with subtests.test(text=text[:20]):
            (tmp_path / "a.ipynb").write_text(text)
            with pytest.raises(Unreadable, match="no notebook of format 4"):
                read(tmp_path / "a.ipynb")


def test_binary_and_huge_files_are_no_notebooks(tmp_path, monkeypatch):
    (tmp_path / "a.ipynb").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Unreadable):
        read(tmp_path / "a.ipynb")
    monkeypatch.setattr(notebook, "MAX_BYTES", 2)
    with pytest.raises(Unreadable, match="larger than"):
        read(tmp_path / "a.ipynb")


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = None


def test_plain_answers_arrive_as_they_are(subtests):
    for value in [3, 1.5, "a", True, None, ..., [1, [2]], (1, "b", (...,)), []]:
        with subtests.test(value=value):
            assert protocol.unpack(json.loads(json.dumps(protocol.pack(value)))) == value


@pytest.mark.parametrize("value", [Liar(3), [Liar(3)], {1: 2}, object(), b"x"])
def test_other_answers_arrive_as_strangers(value):
    arrived = protocol.unpack(protocol.pack(value))
    assert type(arrived).__name__ == type(value).__name__
    assert arrived != value


def test_a_function_stays_sealed_in_the_evaluator():
    sealed = protocol.unpack(protocol.pack(lambda: print("run")))
    with pytest.raises(TypeError, match="runs on ranks only"):
        sealed()
    loads, (data,) = sealed.__reduce__()
    assert callable(loads(data))


@pytest.mark.parametrize("packed", [{}, [], 3, {"plain": {"list": 3}}, {"plain": {"what": []}}, {"function": 3}])
def test_forged_answers_are_refused(packed):
    with pytest.raises(ValueError, match="something else"):
        protocol.unpack(packed)


def test_a_cell_runs_as_in_a_notebook():
    names = {}
    assert run_cell("cell", "x = 1\n%timeit x\nif x:\n    !ls\ny = 2", names) == ""
    assert names["y"] == 2
    assert run_cell("cell", "z = 3\nraise ValueError('no')", names) == "cell, line 2: ValueError: no"
    assert names["z"] == 3
    assert run_cell("cell", "import sys; sys.exit()", names) == "cell left with sys.exit()"
    assert "SyntaxError" in run_cell("cell", "a = = 3", names)


def test_every_check_cell_calls_its_own_check(book):
    from dualpipe_course import check as checks
    from dualpipe_course.registry import find

    for cells in book.cells["exercises"].values():
        for tags, source in cells:
            if tags.startswith("check-"):
                assert arguments_of(source)
                called = eval(source.partition("(")[0], {"check": checks})
                assert called is find(tags.removeprefix("check-"))


def test_reports_show_words_as_words(tmp_path):
    mark = Mark("ranks-1", 0, 1, "wrong", "<script>alert(1)</script>", 1.0)
    results = [Graded("=cmd()", "ranks", "d", [mark], ["<b>note</b>"]), Graded("x", "", "d", [], ["no notebook"])]
    write_csv(results, tmp_path / "a.csv")
    write_html(results, tmp_path / "a.html")
    html = (tmp_path / "a.html").read_text()
    assert "<script" not in html
    assert "<b>" not in html
    assert "http" not in html
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert lines[1].startswith("'=cmd(),ranks,ranks-1,0,1,wrong")
    assert len(lines) == 3
