"""Grading end to end: each misbehaviour costs its own points, nothing is left, a second run skips what is done."""

import csv
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import mixed

from dualpipe_course.grading import grader, replay, report, submissions
from dualpipe_course.grading.grader import Grader
from dualpipe_course.grading.limits import Limits

ROOT = Path(__file__).parents[2]
PAGE = "ranks-and-messages"
ESCAPE = "import subprocess\nsubprocess.Popen(['sleep', '321'], start_new_session=True)\n"


def grade(folder, out, nbval=False, **limits):
    found = submissions.find(folder, submissions.exercises(ROOT / "exercises"), out)
    with Grader(out, Limits(**limits), nbval=nbval) as grader:
        scratch = grader._scratch
        results = grader.grade(found)
    assert not scratch.exists()
    return {graded.learner: graded for graded in results}


@pytest.mark.parametrize(("score", "share"), [(7, 1), (1, 1), (0.5, 0.5), (-3, 0)])
def test_a_score_gives_neither_more_points_than_there_are_nor_fewer_than_none(score, share):
    mark = grader._mark({"name": "ranks-1", "score": score, "status": "passed", "message": ""})
    assert mark.out_of > 0
    assert mark.points == share * mark.out_of


def only(shop, page, text):
    """An exercise whose first answer alone is changed, so that nothing else has to run."""
    notebook = shop.notebook(page)
    for cell in notebook["cells"]:
        if mixed.cell_tag(cell) == "answer-ranks-1":
            cell["source"] = text
    return notebook


def test_thirty_submissions_are_made(tmp_path):
    shop = mixed.make(tmp_path)
    assert len(shop.expected) == 30
    found = submissions.find(tmp_path, submissions.exercises(ROOT / "exercises"), tmp_path / "out")
    assert {s.learner for s in found} == set(shop.expected)
    assert all(s.notebook for s in found)


def test_misbehaviour_costs_its_own_points_and_leaves_nothing(tmp_path, amount):
    """Cases of `benchmarks/grading.py`, reduced to one exercise each; with --every all of them."""
    shop = mixed.Shop(tmp_path / "in")
    texts = {label: (text, status) for label, (text, status, _) in mixed.MISBEHAVIOURS.items() if label != "memory"}
    texts |= {label: (text, mixed.WRONG) for label, text in mixed.CHEATS.items()}
    texts = dict(random.Random(3).sample(sorted(texts.items()), amount(len(texts), 4)))
    right = "bytes_sent = [40, 40, 32]"
    texts["right"] = (right, mixed.RIGHT)
    texts["deletes folder"] = (f"import os, shutil\nshutil.rmtree(os.getcwd())\n{right}", mixed.RIGHT)
    texts["leaves a process"] = (ESCAPE + right, mixed.RIGHT)
    for label, (text, _) in texts.items():
        shop.write(label, PAGE, only(shop, PAGE, text), {})
    before = {path: path.read_bytes() for path in shop.folder.rglob("*.ipynb")}
    children = psutil.Process().children()  # other tests' fork server
    results = grade(shop.folder, tmp_path / "out", seconds=10, processes=20)
    found = {label: {mark.name: mark.status for mark in results[label].marks} for label in texts}
    rest = {"ranks-2": mixed.STARTED, "ranks-3": mixed.STARTED}
    messages = {label: results[label].marks[0].message for label in texts}
    assert found == {label: {"ranks-1": status} | rest for label, (_, status) in texts.items()}, messages
    for label, (_, _, message) in mixed.MISBEHAVIOURS.items():
        assert label not in texts or message in results[label].marks[0].message
    assert {path: path.read_bytes() for path in shop.folder.rglob("*.ipynb")} == before
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "321"]]
    assert psutil.Process().children() == children

    (tmp_path / "in" / "right" / f"{PAGE}.ipynb").write_text(json.dumps(only(shop, PAGE, "bytes_sent = [1, 2, 3]")))
    stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "results").iterdir()}
    again = grade(shop.folder, tmp_path / "out", seconds=10)
    changed = {
        path.name for path in (tmp_path / "out" / "results").iterdir() if path.stat().st_mtime_ns != stamps[path.name]
    }
    (name,) = changed
    assert name.startswith(f"right-{PAGE}-")
    assert again["right"].points == 0


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
    "stopped": [cell(f"{ESCAPE}print(1)", "1\n"), cell("while True:\n    pass")],
    "no outputs": [cell("while True:\n    pass")],
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
    assert report.screen(ordered).columns[-1].header == "nbval"


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
