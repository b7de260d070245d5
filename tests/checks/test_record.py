"""Progress is kept in the learner's folder, survives anything in its file, and never spoils an answer."""

import json

import pytest

from dualpipe_course import check as checks
from dualpipe_course import exercise as exercises
from dualpipe_course import record
from dualpipe_course.declared import Puzzle
from dualpipe_course.exercise import CheckFailed
from dualpipe_course.progress_page import PARTS
from dualpipe_course.trial import smallest_failing
from dualpipe_course.wrong import Wrong


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_attempt_is_counted_and_solved_stays_solved():
    with pytest.raises(CheckFailed):
        checks.time.order_of_messages([0, 1, 2, 3, 4])
    assert record.load() == {"time-3": record.Entry(False, 1, 0)}
    checks.time.order_of_messages([4, 3, 1, 0, 2])
    with pytest.raises(CheckFailed):
        checks.time.order_of_messages([])
    assert record.load() == {"time-3": record.Entry(True, 3, 0)}
    assert [path.name for path in record.path().parent.iterdir()] == ["progress.json"]


def test_an_answer_that_a_check_cannot_read_is_wrong_and_no_traceback():
    odd = Puzzle("odd-1", "", "", judge=lambda answer: str(answer[1]), minutes=3, points=1, hints=())
    assert odd.verdict([1, 2]).passed
    verdict = odd.verdict(7)
    assert (verdict.passed, verdict.score) == (False, 0)
    assert "cannot read this answer (TypeError: 'int' object is not subscriptable)" in verdict.message
    with pytest.raises(CheckFailed, match="the type and the shape"):
        odd([1])


BROKEN = [
    "", "{", "[]", "3", "null", '{"time-3": 3}', '{"time-3": {"attempts": -1}}', '{"time-3": {"attempts": true}}',
    "[" * 99999,
]  # fmt: skip


def test_a_broken_file_counts_as_empty_and_is_replaced():
    record.path().parent.mkdir()
    for text in BROKEN:
        record.path().write_text(text)
        assert record.load() == {}, text[:40]
        record.note("time-1", True)
        assert json.loads(record.path().read_text())["time-1"]["solved"] is True


def test_a_folder_that_cannot_be_written_spoils_nothing(folder, capsys):
    (folder / record.FOLDER).write_text("a file where the folder should be")
    checks.time.two_messages(29)
    assert "time-1 solved" in capsys.readouterr().out


def test_the_file_is_bounded():
    record.path().parent.mkdir()
    record.path().write_text(json.dumps({f"x-{n}": {"attempts": 1} for n in range(5000)}))
    assert len(record.load()) == record.MAX_EXERCISES


def test_hints_come_one_by_one_and_stay_at_the_last(capsys):
    for number in (1, 2, 3, 3):
        checks.gpipe.hint(4)
        assert f"gpipe-4, hint {number} of 3" in capsys.readouterr().out
    checks.gpipe.hint()
    assert capsys.readouterr().out.startswith("gpipe-6, hint 1")  # a part, on the trail
    for number in range(5, 10):
        record.note(f"gpipe-{number}", True)
    checks.gpipe.hint()
    assert capsys.readouterr().out.startswith("gpipe-4, hint 3")
    with pytest.raises(ValueError, match="there is no exercise 19 here"):
        checks.gpipe.hint(19)


def test_a_hint_is_for_the_check_that_failed_last_also_where_the_exercise_is_solved(capsys):
    record.note("interleaved-1", True)
    with pytest.raises(checks.CheckFailed):
        checks.interleaved.numbers((0, 0, 0, 0))
    checks.interleaved.hint()
    assert capsys.readouterr().out.startswith("interleaved-1, hint 1")
    checks.interleaved.numbers((234, 5, 264, 78))
    capsys.readouterr()
    checks.interleaved.hint()
    assert capsys.readouterr().out.startswith("interleaved-2, hint 1")


def test_the_progress_page_counts_points_and_minutes():
    page, everything = checks.progress(), checks.all_checks()
    assert page.summary().startswith(f"0 of {len(everything)} solved, 0 of ")
    checks.time.two_messages(29)
    points = sum(check.about.points for check in everything)
    assert f"1 of {len(everything)} solved, 1 of {points} points" in str(checks.progress())
    html = checks.progress()._repr_html_()
    assert html.count("<tr>") == len(PARTS) + len(everything)
    assert "solved</td>" in html
    assert html.count("<details open>") == 1  # the part that is begun
    assert "\nstart: 1 of " in str(checks.progress())


def test_a_cell_that_cannot_be_read_leaves_no_earlier_answer_to_be_judged(monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setattr(exercises, "in_notebook", lambda: True)
    shell = InteractiveShell.instance()
    try:
        check = "from dualpipe_course import check; check.time.two_messages(makespan)"
        shell.run_cell("makespan = 29")
        assert shell.run_cell(check).success
        shell.run_cell("makespan = = 30")
        for _ in range(2):  # also when the check alone is run again
            error = shell.run_cell(check).error_in_exec
            assert "not judged, because the last cell that you ran has an error (invalid syntax, line 1)" in str(error)
        assert record.load()["time-1"].attempts == 1
        shell.run_cell("makespan = 30")
        assert "not judged" not in str(shell.run_cell(check).error_in_exec)
    finally:
        InteractiveShell.clear_instance()


def test_a_wrong_answer_shows_its_message_and_picture_without_a_traceback():
    with pytest.raises(CheckFailed) as caught:
        checks.time.order_of_messages([0, 1, 2, 3, 4])
    lines = caught.value._render_traceback_()
    assert lines[0].startswith("time-3: legal: 42 ms, the budget is 31")
    assert any(line.startswith("rank 1") for line in lines)


def test_scores_and_lines_come_from_the_judging_function(capsys):
    def one(answer):
        if answer != 1:
            raise Wrong("not 1", score=0.5)
        return "it is 1"

    thing = Puzzle("x-1", "", "", judge=one, minutes=5, points=1, hints=())
    assert thing.verdict(2).score == 0.5
    thing(1)
    assert capsys.readouterr().out == "x-1 solved: it is 1\n"


def test_shrinking_ends_at_a_case_without_a_smaller_failing_one():
    found = smallest_failing(
        (9, 9, 9), lambda c: sum(c) > 7, lambda c: ((*c[:i], n - 1, *c[i + 1 :]) for i, n in enumerate(c))
    )
    assert sum(found) == 8
