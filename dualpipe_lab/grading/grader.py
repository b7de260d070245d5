"""The grader: submissions to wardens, two at a time; results to a folder, so that an interrupted run goes on.

In: a folder of submissions, the folder of exercises.  Out: one `Graded` per submission.
"""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualpipe_lab.checks.registry import find as find_check
from dualpipe_lab.grading.limits import Limits
from dualpipe_lab.grading.notebook import Task
from dualpipe_lab.grading.submissions import Submission, library_digest


@dataclass(frozen=True)
class Mark:
    """One exercise of one submission: status is right, wrong, stopped, not started, missing or unreadable."""

    name: str
    points: float
    out_of: int
    status: str
    message: str
    seconds: float


@dataclass(frozen=True)
class Graded:
    """One submission's marks, and notes on what was edited."""

    learner: str
    notebook: str
    digest: str
    marks: list[Mark]
    notes: list[str]

    @property
    def points(self) -> float:
        """Points earned."""
        return round(sum(mark.points for mark in self.marks), 2)

    @property
    def out_of(self) -> int:
        """Points to be had."""
        return sum(mark.out_of for mark in self.marks)

    @property
    def seconds(self) -> float:
        """Time taken."""
        return round(sum(mark.seconds for mark in self.marks), 1)


class Grader:
    """Grades submissions; use it as a context manager, so that nothing is left behind."""

    def __init__(self, out: Path, limits: Limits = Limits(), fresh: bool = False) -> None:  # noqa: B008 - frozen
        self._results, self._limits, self._fresh = out / "results", limits, fresh
        self._library = library_digest()
        self._wardens: list[subprocess.Popen[str]] = []
        self._stopping = False

    def __enter__(self) -> "Grader":
        self._results.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix="dpl-grade-"))
        return self

    def __exit__(self, *details: object) -> None:
        self._stopping = True
        for warden in self._wardens:
            warden.terminate()
        for warden in self._wardens:
            with warden, suppress(BrokenPipeError):  # waits for its end, and closes its pipes
                pass
        shutil.rmtree(self._scratch, ignore_errors=True)

    def grade(
        self, submissions: list[Submission], at_once: int = 2, report: Callable[[Graded], None] = lambda graded: None
    ) -> list[Graded]:
        """Grade all submissions; `report` is called in this thread as each one is done.

        Raises:
            RuntimeError: the checks changed on disk meanwhile, or a warden died.
        """
        done: dict[str, Graded] = {}
        for submission in submissions:
            if (known := self._known(submission)) is not None:
                done[submission.key] = known
                report(known)
        todo: queue.SimpleQueue[Submission] = queue.SimpleQueue()
        for submission in (waiting := [s for s in submissions if s.key not in done]):
            todo.put(submission)
        finished: queue.SimpleQueue[tuple[str, Graded | Exception]] = queue.SimpleQueue()
        for number in range(min(at_once, len(waiting))):
            threading.Thread(target=self._serve, args=(number, todo, finished), daemon=True).start()
        for _ in waiting:
            key, graded = finished.get()
            if isinstance(graded, Exception):
                raise RuntimeError(f"grading stopped at {key}: {graded}") from graded
            done[key] = graded
            report(graded)
        return [done[submission.key] for submission in submissions]

    def _serve(
        self,
        number: int,
        todo: "queue.SimpleQueue[Submission]",
        finished: "queue.SimpleQueue[tuple[str, Graded | Exception]]",
    ) -> None:
        warden = self._start(self._scratch / str(number))
        while not self._stopping:
            try:
                submission = todo.get_nowait()
            except queue.Empty:
                break
            try:
                graded = self._one(warden, submission)
                self._keep(submission, graded)
            except Exception as error:
                finished.put((submission.key, error))
                break
            finished.put((submission.key, graded))

    def _start(self, folder: Path) -> "subprocess.Popen[str]":
        folder.mkdir()
        code = "from dualpipe_lab.grading.warden import main; main()"
        command = [sys.executable, "-c", code, str(folder)]
        warden = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._wardens.append(warden)
        return warden

    def _one(self, warden: "subprocess.Popen[str]", submission: Submission) -> Graded:
        tasks = submission.paper.tasks
        marks = {task.name: mark for task in tasks if (mark := _without_running(submission, task))}
        job = {"tasks": [asdict(task) for task in tasks if task.name not in marks], "limits": self._limits.to_dict()}
        if job["tasks"]:
            assert warden.stdin is not None
            assert warden.stdout is not None
            warden.stdin.write(json.dumps(job) + "\n")
            warden.stdin.flush()
            while "done" not in (verdict := json.loads(warden.stdout.readline() or "{}")):
                if not verdict:
                    raise RuntimeError("the warden of this submission died")
                marks[verdict["name"]] = _mark(verdict)
        if library_digest() != self._library:
            raise RuntimeError("the checks in dualpipe_lab changed on disk meanwhile; grade everything again")
        notes = [submission.problem] if submission.problem else submission.paper.notes
        ordered = [marks[task.name] for task in tasks]
        return Graded(submission.learner, submission.notebook, submission.digest, ordered, notes)

    def _known(self, submission: Submission) -> Graded | None:
        if self._fresh:
            return None
        try:
            data = json.loads((self._results / f"{submission.key}.json").read_text(encoding="utf-8"))
            graded = Graded(**data | {"marks": [Mark(**mark) for mark in data["marks"]]})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return graded if graded.digest == submission.digest else None

    def _keep(self, submission: Submission, graded: Graded) -> None:
        target = self._results / f"{submission.key}.json"
        temporary = target.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
        temporary.write_text(json.dumps(asdict(graded), indent=1), encoding="utf-8")
        temporary.replace(target)


def _without_running(submission: Submission, task: Task) -> Mark | None:
    """The mark of an exercise that needs no judge."""
    if submission.problem:
        return _mark({"name": task.name, "status": "unreadable", "message": submission.problem})
    if task.answer is None:
        message = f"there is no cell tagged answer-{task.name}; copy the answer into a fresh exercise notebook"
        return _mark({"name": task.name, "status": "missing", "message": message})
    if task.untouched:
        return _mark({"name": task.name, "status": "not started", "message": "the answer cell is unchanged"})
    return None


def _mark(verdict: dict[str, Any]) -> Mark:
    check = find_check(verdict["name"])
    assert check is not None, f"no check is named {verdict['name']}"
    out_of = check.about.points
    points = round(out_of * min(1.0, max(0.0, float(verdict.get("score", 0)))), 2)
    return Mark(check.name, points, out_of, verdict["status"], verdict["message"], verdict.get("seconds", 0.0))
