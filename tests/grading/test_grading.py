"""Grading end to end: each misbehaviour costs its own points, nothing is left, a second run skips what is done."""

import csv
import io
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import mixed

from dualpipe_course.declared import Puzzle
from dualpipe_course.grading import evaluator, grader, pristine, replay, report, submissions
from dualpipe_course.grading.grader import Grader
from dualpipe_course.grading.limits import Limits
from dualpipe_course.trial import on_ranks
from dualpipe_lab.launch import launcher
from dualpipe_lab.launch.supervise.errors import RankTimeout

ROOT = Path(__file__).parents[2]
PAGE = "time"
ESCAPE = "import subprocess\nsubprocess.Popen(['sleep', '321'], start_new_session=True)\n"


def grade(folder, out, nbval=False, at_once=2, **limits):
    found = submissions.find(folder, submissions.exercises(ROOT / "exercises"), out)
    with Grader(out, Limits(**limits), nbval=nbval) as grader:
        scratch = grader._scratch
        results = grader.grade(found, at_once)
    assert not scratch.exists()
    return {graded.learner: graded for graded in results}


@pytest.mark.parametrize(("score", "share"), [(7, 1), (1, 1), (0.5, 0.5), (-3, 0)])
def test_a_score_gives_neither_more_points_than_there_are_nor_fewer_than_none(score, share):
    mark = grader._mark({"name": "time-1", "score": score, "status": "passed", "message": ""})
    assert mark.out_of > 0
    assert mark.points == share * mark.out_of


def only(shop, page, text):
    """An exercise whose first answer alone is changed, so that nothing else has to run."""
    notebook = shop.notebook(page)
    for cell in notebook["cells"]:
        if mixed.cell_tag(cell) == "answer-time-1":
            cell["source"] = text
    return notebook


def test_thirty_submissions_are_made(tmp_path):
    shop = mixed.make(tmp_path)
    assert len(shop.expected) == 30
    found = submissions.find(tmp_path, submissions.exercises(ROOT / "exercises"), tmp_path / "out")
    assert {s.learner for s in found} == set(shop.expected)
    assert all(s.notebook for s in found)


def test_misbehaviour_costs_its_own_points_and_leaves_nothing(tmp_path, amount, monkeypatch):
    """Cases of `benchmarks/grading.py`, reduced to one exercise each; with --every all of them."""
    shop = mixed.Shop(tmp_path / "in")
    texts = {label: (text, status) for label, (text, status, _) in mixed.MISBEHAVIOURS.items() if label != "memory"}
    texts |= {label: (text, mixed.COMES_TO[label]) for label, text in mixed.CHEATS.items()}
    stopped = [(label, text) for label, text in sorted(texts.items()) if text[1] == mixed.STOPPED]  # dear ones
    others = [each for each in sorted(texts.items()) if each not in stopped]
    draw = random.Random(3).sample
    texts = dict(draw(stopped, amount(len(stopped), 1)) + draw(others, amount(len(others), 3)))
    right = "makespan_ms = 29"
    texts["right"] = (right, mixed.RIGHT)
    texts["deletes folder"] = (f"import os, shutil\nshutil.rmtree(os.getcwd())\n{right}", mixed.RIGHT)
    texts["leaves a process"] = (ESCAPE + right, mixed.RIGHT)
    for label, (text, _) in texts.items():
        shop.write(label, PAGE, only(shop, PAGE, text), {})
    before = {path: path.read_bytes() for path in shop.folder.rglob("*.ipynb")}
    children = psutil.Process().children()  # other tests' fork server
    results = grade(shop.folder, tmp_path / "out", at_once=amount(2, 1), seconds=6, processes=20)
    found = {label: {mark.name: mark.status for mark in results[label].marks} for label in texts}
    rest = {"time-3": mixed.STARTED}
    messages = {label: results[label].marks[0].message for label in texts}
    assert found == {label: {"time-1": status} | rest for label, (_, status) in texts.items()}, messages
    for label, (_, _, message) in mixed.MISBEHAVIOURS.items():
        assert label not in texts or message in results[label].marks[0].message
    assert {path: path.read_bytes() for path in shop.folder.rglob("*.ipynb")} == before
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "321"]]
    assert psutil.Process().children() == children

    (tmp_path / "in" / "right" / f"{PAGE}.ipynb").write_text(json.dumps(shop.notebook(PAGE)))
    (forged,) = (tmp_path / "out" / "results").glob("deletes*.json")
    forged.write_text(forged.read_text().replace('"points": ', '"points": 1'))
    monkeypatch.setattr(Grader, "_one", lambda self, sandbox, submission, only: stub(submission))
    monkeypatch.setattr(Grader, "_start", Played._start)
    again = grade(shop.folder, tmp_path / "out", seconds=10)
    assert {name for name, graded in again.items() if graded != results[name]} == {"right", "deletes folder"}
    assert again["right"].points == 0


def stub(submission):
    marks = [
        grader._mark({"name": task.name, "score": 0, "status": "wrong", "message": ""})
        for task in submission.overlay.tasks
    ]
    return grader.Graded(submission.learner, submission.notebook, submission.digest, marks, ["evaluated again"])


PEEKS = {
    "imports": "from dualpipe_course.start.ranks import SENDS as makespan_ms",
    "import function": "makespan_ms = __import__('dualpipe_course.start.ranks', fromlist=['x']).SENDS",
    "importlib": "import importlib\nmakespan_ms = importlib.import_module('dualpipe_course.start.ranks').SENDS",
    "pkgutil": "import pkgutil\nmakespan_ms = pkgutil.resolve_name('dualpipe_course.start.ranks').SENDS",
    "check's constant": "makespan_ms = check.ranks.SENDS",
    "source": "import dualpipe_lab, pathlib\n"
    "path = pathlib.Path(dualpipe_lab.__file__).parents[1] / 'dualpipe_course/start/ranks.py'\n"
    "makespan_ms = eval(path.read_text().partition('SENDS, RECEIVES = ')[2].partition('\\n')[0])[0]",
    "in a launch of its own": "def peek(rank, world_size):\n    import dualpipe_course.start.ranks as key\n"
    "    return key.SENDS\nmakespan_ms = lab.launch(peek, 1)[0]",
    "solution": f"text = open({str(ROOT / 'solutions/start/time/time.md')!r}).read()\n"
    "makespan_ms = eval(text.partition('makespan_ms = ')[2].partition('\\n')[0])",
}
IN_A_RANK = """
def exchange(x):
    import dualpipe_course.start.ranks as key
    raise SystemExit
"""


PEEKED = """
import asyncio, json, sys
import dualpipe_lab as lab
from dualpipe_course import check
from dualpipe_course.grading import guard, worker

guard.close()
worker.seal_calls()
for label, text in json.loads(sys.argv[1]).items():
    names = {"check": check, "lab": lab}
    with asyncio.Runner() as runner:
        error = worker.run_cell("answer-x-1", text, names, runner)
    print(json.dumps([label, names.get("makespan_ms") in (29, ("send", "isend")), error, len(guard.refusals)]))
"""


@pytest.mark.parametrize(("seconds", "status"), [(20.1, mixed.STOPPED), (3.5, mixed.WRONG)])
def test_an_endless_loop_on_ranks_is_stopped_and_a_deadlock_is_wrong(tmp_path, monkeypatch, seconds, status):
    """The check gives up, not the grader: its limit of time is one, too.  A deadlock is noticed before it."""

    def waits(*args, **options):
        raise RankTimeout("where each rank was:", ["rank 0: in f, line 2"], seconds)

    monkeypatch.setattr(launcher, "launch", waits)
    on_two = lambda answer: str(on_ranks(print, 2, case="2 ranks"))  # noqa: E731
    check = Puzzle("x-1", "", "", judge=on_two, minutes=1, points=1, hints=())
    monkeypatch.setattr(evaluator, "find", lambda name: check)
    monkeypatch.setattr(evaluator, "_answers", lambda task, names: ({"answer": 1}, "", []))
    monkeypatch.chdir(tmp_path)
    verdict = evaluator.evaluate({"name": "x-1", "check": "check.x(answer)", "folders": {"work": str(tmp_path)}})
    message = "2 ranks: where each rank was:\n  rank 0: in f, line 2"
    assert verdict == {"status": status, "score": 0, "message": message, "refused": []}


def test_an_answer_reads_neither_checks_nor_solutions():
    """Not by any kind of import, nor from a file, nor in ranks that it launches itself."""
    command = [sys.executable, "-c", PEEKED, json.dumps(PEEKS)]
    environment = os.environ | {"DUALPIPE_LAB_START": "spawn"}  # one rank: no fork server has to be warm
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout
    rows = {label: rest for label, *rest in map(json.loads, shown.splitlines())}
    assert set(rows) == set(PEEKS)
    assert not [label for label, (has_key, _, _) in rows.items() if has_key], rows
    assert [refusals for _, _, refusals in rows.values()] == [1, 2, 3, 4, 5, 6, 6, 7], rows  # a rank's are its own
    assert "an answer cannot import dualpipe_course.start.ranks" in rows["in a launch of its own"][1]


def test_the_copy_of_the_course_is_written_anew_if_anything_in_it_has_changed(tmp_path, monkeypatch):
    for package in pristine.PACKAGES:
        (tmp_path / "here" / package / "__pycache__").mkdir(parents=True)
        (tmp_path / "here" / package / "a.py").write_text("x = 1")
        (tmp_path / "here" / package / "__pycache__" / "a.cpython-311.pyc").write_text("poisoned")
    monkeypatch.setattr(pristine, "HERE", tmp_path / "here")
    known = pristine.digest()
    copy, at = pristine.Copy(tmp_path / "scratch"), tmp_path / "at"
    assert not copy.is_at(at)
    for change in ("dualpipe_lab/b.py", "dualpipe_course/a.py", "dualpipe_lab/__pycache__/a.cpython-311.pyc"):
        copy.restore(at)
        assert copy.is_at(at)
        assert b"poisoned" not in [path.read_bytes() for path in at.rglob("*.pyc")]
        (at / change).write_text("x = 2")
        assert not copy.is_at(at)
    assert pristine.digest() == known
    (tmp_path / "here" / "dualpipe_lab" / "a.py").write_text("x = 2")
    assert pristine.digest() != known


def test_the_table_has_a_note_on_who_looks_and_a_copy_of_the_course_that_an_answer_changes_is_its_own(tmp_path):
    shop = mixed.Shop(tmp_path / "in")
    hints = "check.time.hint()\nmakespan_ms = 29\ncheck.time.two_messages(3)"
    shop.write("a asks for a hint", PAGE, only(shop, PAGE, hints), {})
    changes = "import subprocess, dualpipe_lab\nsubprocess.run(['touch', dualpipe_lab.__file__[:-11] + 'x.pyc'])\n"
    shop.write("d changes files", PAGE, only(shop, PAGE, changes + "makespan_ms = 29"), {})
    shop.write("b looks", PAGE, only(shop, PAGE, PEEKS["imports"]), {})
    page = "ranks-and-messages"
    rank = shop.notebook(page)
    for found in rank["cells"]:
        if mixed.cell_tag(found) == "answer-ranks-3":
            found["source"] = IN_A_RANK
    shop.write("c looks in a rank", page, rank, {})
    results = grade(shop.folder, tmp_path / "out", at_once=1, seconds=30)
    hinted, looking, in_a_rank, changed = (results[name] for name in sorted(results))
    assert [mark.status for mark in hinted.marks] == ["right", "not started"]
    assert hinted.notes == []
    assert (changed.marks[0].status, changed.points) == ("stopped", 0)
    assert "files of the course changed while it ran" in changed.marks[0].message
    assert looking.marks[0].status == "error"
    assert [note.partition(",")[0] for note in looking.notes] == [
        "answer-time-1 names dualpipe_course.start.ranks",
        "answer-time-1: import dualpipe_course.start.ranks was refused",
    ]
    looked = next(mark for mark in in_a_rank.marks if mark.name == "ranks-3")
    assert looked.status == "wrong"
    assert "an answer cannot import dualpipe_course.start.ranks" in looked.message
    assert in_a_rank.notes


class Played(Grader):
    """A grader whose sandboxes are stories: statuses and messages of each evaluation of a submission."""

    def _start(self, number):
        return subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, text=True
        )

    def _one(self, sandbox, submission, only):
        if not only:
            self.barrier.wait(10)
        status, message = self.stories[submission.learner].pop(0)
        verdict = {"name": "time-1", "status": status, "message": message, "score": status == "right"}
        return grader.Graded(submission.learner, "time", submission.digest, [grader._mark(verdict)], [])


@pytest.mark.parametrize("together", [True, False])
def test_a_victim_is_evaluated_once_more_alone(tmp_path, together):
    killed = "the process that evaluated it ended, exit code -9"
    stories = {"victim": [("stopped", killed), ("right", "")], "other": [("wrong", "bytes 1"), ("right", "never")]}
    shop = mixed.Shop(tmp_path / "in")
    for name in stories:
        shop.write(name, PAGE, only(shop, PAGE, name), {})
    found = submissions.find(shop.folder, submissions.exercises(ROOT / "exercises"), tmp_path / "out")
    with Played(tmp_path / "out") as played:
        played.stories, played.barrier = stories, threading.Barrier(2 if together else 1)
        results = {graded.learner: graded for graded in played.grade(found, at_once=2 if together else 1)}
    assert results["other"].points == 0
    assert results["victim"].points > 0
    (note,) = results["victim"].notes
    before = "beside other-" if together else "the first time "
    assert note.startswith(f"time-1 was evaluated once more, alone: {before}")
    assert note.endswith(f"it was stopped: {killed}")


@pytest.mark.parametrize("ending", [KeyboardInterrupt, MemoryError, grader.GradingStopped("the disk is full")])
def test_the_table_is_there_whatever_ends_the_run(tmp_path, monkeypatch, ending):
    from dualpipe_course import commands

    shop = mixed.Shop(tmp_path / "in")
    for name in ("a", "b"):
        shop.write(name, PAGE, only(shop, PAGE, name), {})

    def ends(self, found, at_once, report):
        report(stub(found[0]))
        assert "evaluated again" in (tmp_path / "out" / "grades.csv").read_text()  # also for what no program survives
        raise ending

    monkeypatch.setattr(Grader, "grade", ends)
    with pytest.raises(ValueError, match="1 of 2 submissions are in the table, run the same command for the others"):
        commands.grade(shop.folder, tmp_path / "out", ROOT / "exercises")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "grades.csv").read_text())))
    assert [row["learner"] for row in rows] == ["a"] * 2
    assert (tmp_path / "out" / "gradebook.csv").read_text().splitlines()[1:] == ["a,0,0,0"]


def test_a_submission_that_is_overwritten_meanwhile_is_kept(tmp_path, monkeypatch):
    shop = mixed.Shop(tmp_path / "in")
    shop.write("a", PAGE, only(shop, PAGE, "x"), {})
    path = shop.folder / "a" / f"{PAGE}.ipynb"
    before = path.read_bytes()

    def overwrites(self, sandbox, submission, only):
        path.write_text("gone")
        return stub(submission)

    monkeypatch.setattr(Grader, "_one", overwrites)
    monkeypatch.setattr(Grader, "_start", Played._start)
    found = submissions.find(shop.folder, submissions.exercises(ROOT / "exercises"), tmp_path / "out")
    with Grader(tmp_path / "out") as grades:
        grades.grade(found)
    (warning,) = grades.warnings
    assert "changed while submissions ran" in warning
    assert [kept.read_bytes() for kept in (tmp_path / "out" / "results").glob("*.ipynb")] == [before]


@pytest.mark.parametrize(("code", "status"), [(0, "same"), (-9, "stopped"), (1, "stopped")])
def test_a_report_counts_only_if_pytest_ended_as_it_says(tmp_path, monkeypatch, code, status):
    text = "<testsuites><testsuite><testcase time='0.1' /></testsuite></testsuites>"
    ends = f"import os, sys; open(sys.argv[1], 'w').write({text!r}); {code} < 0 and os.kill(os.getpid(), 9)"
    ends += f"; sys.exit({code})"
    monkeypatch.setattr(replay, "_command", lambda path, report, seconds: [sys.executable, "-c", ends, str(report)])
    found = replay.replay("{}", tmp_path / "x", Limits(), 10, lambda: None, lambda: None)
    assert found.status == status


def cell(source, shown=""):
    outputs = [{"output_type": "stream", "name": "stdout", "text": shown}] if shown else []
    return {
        "cell_type": "code",
        "source": source,
        "metadata": {},
        "outputs": outputs,
        "execution_count": 1,
    }


REPLAYS = {
    "same": [cell("print(6 * 7)", "42\n"), cell("print('took 3 s')", "took 5 s\n")],
    "differs": [cell("print(6 * 7)", "41\n"), cell("print(1)", "1\n")],
    "stopped": [cell(f"{ESCAPE}print(1)", "1\n"), cell("import time\nwhile True:\n    time.sleep(1)")],
    "no outputs": [cell("1 / 0")],
}


def test_nbval_runs_whole_notebooks_in_the_sandbox_and_the_report_has_its_column(tmp_path):
    shop = mixed.Shop(tmp_path / "in")
    for status, cells in REPLAYS.items():
        shop.write(status, PAGE, {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}, {})
    shop.write("unreadable", PAGE, "no notebook", {})
    children = psutil.Process().children()
    results = grade(shop.folder, tmp_path / "out", nbval=True, seconds=6)
    told = {name: graded.replayed.message for name, graded in results.items()}
    assert {name: graded.replayed.status for name, graded in results.items()} == {name: name for name in results}, told
    assert "1 of 2 cells; the first: Notebook cell execution failed\nCell 0" in results["differs"].replayed.message
    assert "a cell took more than 6 s" in results["stopped"].replayed.message
    assert results["same"].replayed.message == ""
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "321"]]
    assert psutil.Process().children() == children

    known = grade(shop.folder, tmp_path / "out", nbval=True)  # from the folder of results: no kernel starts
    assert known == results
    ordered = list(known.values())
    report.write_csv(ordered, tmp_path / "grades.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "grades.csv").read_text())))
    assert {row["learner"]: row["nbval"] for row in rows} == {name: name for name in results}
    report.write_html(ordered, tmp_path / "grades.html")
    assert "<summary>differs</summary>" in (tmp_path / "grades.html").read_text()
    assert report.screen(ordered).renderables[0].columns[-1].header == "nbval"


WORDS = {  # how nbval words a cell, its seconds, and what is said of it
    "KeyboardInterrupt\nTimeout of 6 seconds exceeded executing cell": (6.1, "stopped"),
    "AttributeError: 'IPyNbCell' object has no attribute 'stop'": (11.2, "stopped"),  # its kernel did not get idle
    "Timeout of 5 seconds exceeded waiting for output.": (5.2, "stopped"),
    "Cell outputs differ": (0.2, "differs"),
}


@pytest.mark.parametrize("words", WORDS)
def test_a_cell_that_was_stopped_is_known_by_its_seconds_or_words(words, tmp_path):
    seconds, status = WORDS[words]
    cases = f'<testcase time="0.1" /><testcase time="{seconds}"><failure>{words}</failure></testcase>'
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = replay._read(tmp_path / "report.xml", "", 6.0)
    assert found.status == status
    assert found.message.endswith(f"1 of 2 cells; the first: {words}")
    assert ("a cell took more than 6 s" in found.message) is (seconds >= 6)


def test_a_wrong_folder_is_named(tmp_path):
    command = [sys.executable, "-m", "dualpipe_lab", "grade", str(tmp_path), "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"})
    assert result.returncode == 1
    assert "no notebook (*.ipynb)" in result.stderr
