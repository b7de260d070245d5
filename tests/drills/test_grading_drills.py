"""Drills of the grader: forged marks, odd names and messages, special files, equal keys, processes killed from inside.

Each submission may cost its own points; the others keep theirs, and the report comes in any case.
"""

import csv
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "grading"))
import mixed  # noqa: E402

from dualpipe_course.grading import evaluator, sandbox, submissions  # noqa: E402
from dualpipe_lab.launch.folder import PREFIX, sweep  # noqa: E402

sys.path.pop(0)

# An object that runs code in whoever unpickles it; the code tells which program that was.
FORGER = """
class Forger:
    def __reduce__(self):
        code = (
            "import dualpipe_course.exercise as e; "
            "e.Check.verdict = lambda self, *answers: e.Verdict(self.name, True, 1.0, 'OWNED'); "
            "open({log!r}, 'a').write(open('/proc/self/cmdline').read() + chr(10))"
        )
        return exec, (code, {})
"""
RETURNS = "def loop_rows(num_ranks, num_microbatches, num_virtual_stages):\n    return Forger()\n"
RAISES = """
class Bad(Exception):
    def __reduce__(self):
        return Forger().__reduce__()
def loop_rows(num_ranks, num_microbatches, num_virtual_stages):
    raise Bad("bad")
"""
SENDS = """
def loop_rows(num_ranks, num_microbatches, num_virtual_stages):
    import gc
    from dualpipe_lab.launch.rank import _Channel
    (channel,) = [found for found in gc.get_objects() if isinstance(found, _Channel)]
    channel.send("where", Forger())
    return []
"""
SECONDS = f"4{os.getpid()}"  # tells what this run left behind
KILLS_SANDBOX = """
import psutil, subprocess
subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)
for process in psutil.Process().parents():
    if "grading.sandbox" in " ".join(process.cmdline()):
        process.kill()
        break
while True:
    pass
"""


def answered(page, **answers):
    """The starter with some answers: {"_1": text}."""
    notebook = mixed.Shop(Path()).notebook(page)
    for cell in notebook["cells"]:
        number = mixed.cell_tag(cell).rpartition("-")[2]
        if mixed.cell_tag(cell).startswith("answer-") and f"_{number}" in answers:
            cell["source"] = answers[f"_{number}"]
    return json.dumps(notebook)


def hand_in(folder, learner, page, **answers):
    os.makedirs(os.path.join(os.fsencode(folder), learner))
    with open(os.path.join(os.fsencode(folder), learner, f"{page}.ipynb".encode()), "w") as file:
        file.write(answered(page, **answers))


def run_grader(folder, out):
    command = [sys.executable, "-m", "dualpipe_lab", "grade", str(folder), "--out", str(out), "--at-once", "1"]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, check=False, env=environment, cwd=ROOT, timeout=200)


def rows_of(out):
    return list(csv.DictReader(io.StringIO((out / "grades.csv").read_text(encoding="utf-8"))))


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """One run over all of them, one submission after the other."""
    folder, out = tmp_path_factory.mktemp("hostile"), tmp_path_factory.mktemp("grades")
    log = str(out / "who-unpickled")
    forger = FORGER.replace("{log!r}", repr(log))
    for learner, text in ((b"a-returns", RETURNS), (b"b-raises", RAISES), (b"c-sends", SENDS)):
        hand_in(folder, learner, "interleaved", _2=forger + text)
    hand_in(folder, b"d-kills", "time", _1=KILLS_SANDBOX.replace("{seconds}", SECONDS))
    hand_in(folder, b"e-victim", "interleaved", _1="makespan, peak, messages, makespan_of_two = 1, 2, 3, 4")
    hand_in(folder, b"f-honest", "interleaved", _1="makespan, peak, messages, makespan_of_two = 234, 5, 264, 78")
    hand_in(folder, b"g-surrogate", "time", _1="raise ValueError('\\ud800 \\x1b[2J')")
    hand_in(folder, b"mar\xeda", "time", _1="makespan_ms = 29")
    return folder, out, run_grader(folder, out)


def status(out, learner, exercise):
    (row,) = [row for row in rows_of(out) if (row["learner"], row["exercise"]) == (learner, exercise)]
    return row["status"], row["message"]


def test_what_ranks_send_is_not_executed_and_marks_stay_their_own(graded):
    _, out, run = graded
    assert run.returncode == 0, run.stderr.decode()
    found, message = status(out, "a-returns", "interleaved-2")
    assert (found, "builtins.exec, which is no data" in message) == ("wrong", True), message
    assert status(out, "b-raises", "interleaved-2")[0] == "wrong"
    assert status(out, "c-sends", "interleaved-2")[0] in ("wrong", "stopped")
    assert status(out, "e-victim", "interleaved-1")[0] == "wrong"
    assert status(out, "f-honest", "interleaved-1")[0] == "right"
    assert "OWNED" not in (out / "grades.csv").read_text()
    log = out / "who-unpickled"  # the rank itself unpickles its exception, to see whether it can travel
    assert "grading.evaluator" not in (log.read_text() if log.exists() else "")


def test_a_killed_sandbox_costs_its_own_submission_and_is_remembered(graded):
    folder, out, run = graded
    found, message = status(out, "d-kills", "time-1")
    assert (found, message) == ("stopped", "the process that watches this submission was ended from inside it")
    assert b"Traceback" not in run.stderr + run.stdout
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", SECONDS]]
    before = {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    assert len(before) == 8
    assert run_grader(folder, out).returncode == 0  # nothing is graded again
    assert {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()} == before


def test_odd_messages_and_names_are_reported(graded):
    _, out, run = graded
    assert run.returncode == 0
    found, message = status(out, "g-surrogate", "time-1")
    assert (found, r"\ud800" in message) == ("error", True)
    assert status(out, r"mar\udceda", "time-1")[0] == "right"
    html = (out / "grades.html").read_text(encoding="utf-8")
    assert r"mar\udceda" in html
    assert html.endswith("</html>\n")
    assert rb"mar\udceda" in run.stdout


def test_special_files_and_links_are_unreadable(tmp_path):
    """Found at once: no pipe is waited for, nothing endless is read, no other learner's notebook is counted."""
    own, other = tmp_path / "in" / "a", tmp_path / "in" / "b"
    own.mkdir(parents=True)
    other.mkdir()
    honest = other / "gpipe.ipynb"
    honest.write_text(answered("interleaved", _1="makespan, peak, messages, makespan_of_two = 234, 5, 264, 78"))
    os.mkfifo(own / "gpipe-pipe.ipynb")
    (own / "gpipe-endless.ipynb").symlink_to("/dev/zero")
    (own / "gpipe-theirs.ipynb").symlink_to(honest)
    (own / "gpipe-loop.ipynb").symlink_to(own / "gpipe-loop.ipynb")
    (own / "gpipe-nowhere.ipynb").symlink_to(own / "nothing")
    (own / "gpipe-folder.ipynb").mkdir()
    (own / "linked").symlink_to(other)  # a linked folder is not searched
    found = submissions.find(tmp_path / "in", submissions.exercises(ROOT / "exercises"), tmp_path / "out")
    assert {submission.learner for submission in found} == {"a", "b"}
    assert len(found) == 7
    for submission in found:
        expected = "" if submission.learner == "b" else "a link, a folder or a special file; submit a copy"
        assert submission.problem.startswith(expected)
        assert bool(submission.problem) == (submission.learner == "a")


def test_the_container_can_grade_and_holds_no_solutions(tmp_path):
    """What the recipe of the page copies is enough to grade, and no answer is in it."""
    recipe = (ROOT / "book" / "graders.md").read_text().partition("FROM python")[2].partition("EOF")[0]
    copied = [words.split() for words in re.findall(r"^COPY (.*)$", recipe, re.MULTILINE)]
    for *sources, target in copied:
        for name in sources:
            source, place = ROOT / name, tmp_path / (target if len(sources) == 1 else name)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
    assert "### BEGIN SOLUTION" not in "".join(path.read_text() for path in tmp_path.rglob("*.md"))
    assert {path.name for path in tmp_path.iterdir()}.isdisjoint({"solutions", "tests", ".git", "."})
    assert {path.parent.name for path in tmp_path.glob("*/__init__.py")} == {"dualpipe_lab", "dualpipe_course"}
    hand_in(tmp_path / "in", b"a", "gpipe")
    command = [sys.executable, "-m", "dualpipe_lab", "grade", "in", "--out", "out"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert {row["status"] for row in rows_of(tmp_path / "out")} == {"not started"}


def test_keys_differ_where_paths_do(tmp_path):
    names = [
        "32/x--gpipe",
        "32--x/gpipe",
        "32-x/gpipe",
        "32/x-gpipe",
        "A/gpipe",
        "a/gpipe",
        "\udced/gpipe",
        "\udcee/gpipe",
    ]
    names.append(f"{'l' * 200}/{'n' * 200}gpipe")
    for name in names:
        path = tmp_path / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(answered("gpipe"))
    found = submissions.find(tmp_path, submissions.exercises(ROOT / "exercises"), tmp_path / "out")
    keys = {submission.key.lower() for submission in found}  # also on a disk that ignores case
    assert len(found) == len(keys) == len(names)
    assert max(map(len, keys)) < 120
    assert all(key.isascii() and "/" not in key for key in keys)


def test_foreign_lines_on_the_pipes_are_no_tasks_and_no_verdicts():
    task = {"name": "interleaved-1", "given": [], "answer": "", "check": "", "folders": {}, "token": "t"}
    junk = ["junk\n", "\n", "[" * 100_000 + "\n", "3\n", '{"name": "interleaved-1"}\n', "\x00\n"]
    assert list(evaluator._tasks(io.StringIO("".join([*junk, json.dumps(task) + "\n"])))) == [task]
    for line in (b"junk\n", b"\xff\n", b"[" * 50_000 + b"\n"):
        read, write = os.pipe()
        os.write(write, line)
        forged = object.__new__(sandbox.EvaluatorProcess)
        forged.verdicts, forged._buffer = read, b""
        with pytest.raises(sandbox.Stopped, match="a verdict that the evaluator did not give"):
            forged.take()
        os.close(read)
        os.close(write)


def test_a_killed_grader_leaves_a_folder_that_the_next_one_removes(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path; from dualpipe_course.grading.grader import Grader\n"
        "with Grader(Path(sys.argv[1])) as grader:\n    print(grader._scratch, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as grader:
        scratch = Path(grader.stdout.readline().strip())
        assert scratch.name.startswith(PREFIX)
        sweep()
        assert scratch.is_dir()
        grader.send_signal(signal.SIGKILL)
    assert scratch.is_dir()
    sweep()
    assert not scratch.exists()


@pytest.mark.parametrize(("code", "is_lost"), [(255, True), (1, False), (-9, False)])
def test_a_worker_whose_fork_server_was_killed_retires_the_evaluator(code, is_lost):
    """Killed a moment ago, the fork server may look alive still; the next exercise must not meet it."""
    near, far = multiprocessing.Pipe()
    far.close()
    ended = types.SimpleNamespace(join=lambda seconds: None, exitcode=code)
    with pytest.raises(EOFError, match=f"exit code {code}") as caught:
        evaluator._receive(near, ended)
    assert isinstance(caught.value, evaluator.ForkServerLostError) is is_lost
