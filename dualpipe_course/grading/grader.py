"""The grader: distributes submissions to sandboxes, two at a time, and keeps each result in a folder.

An interrupted run continues with the submissions that have no result.
In: a folder of submissions, the folder of exercises.  Out: one `Graded` per submission.
"""

import json
import os
import queue
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dualpipe_course.grading import process_tree
from dualpipe_course.grading.limits import Limits
from dualpipe_course.grading.notebook import Task
from dualpipe_course.grading.replay import Replayed, shows_nothing
from dualpipe_course.grading.submissions import Submission, library_digest
from dualpipe_course.registry import find as find_check
from dualpipe_lab._optional import extra
from dualpipe_lab.launch.folder import private_folder, sweep

with extra("grading", "grading"):
    import psutil

UNWATCHED = "the process that watches this submission was ended from inside it"


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
    """The marks of one submission, notes on its edited cells, and what nbval found if it was asked for."""

    learner: str
    notebook: str
    digest: str
    marks: list[Mark]
    notes: list[str]
    replayed: Replayed | None = None

    @property
    def points(self) -> float:
        """The points earned."""
        return round(sum(mark.points for mark in self.marks), 2)

    @property
    def out_of(self) -> int:
        """The points available."""
        return sum(mark.out_of for mark in self.marks)

    @property
    def seconds(self) -> float:
        """The seconds taken."""
        return round(sum(mark.seconds for mark in self.marks), 1)


class GradingStopped(Exception):  # noqa: N818
    """Grading ended early; the results before it are kept."""


class Grader:
    """Grades submissions; a context manager, which removes all processes and scratch files at its end.

    While it is open, this process adopts and kills processes that submissions leave running: start no others meanwhile.
    """

    def __init__(
        self,
        out: Path,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        fresh: bool = False,
        nbval: bool = False,
    ) -> None:
        self._results, self._limits, self._fresh, self._nbval = out / "results", limits, fresh, nbval
        self._library = library_digest()
        self._sandboxes: list[subprocess.Popen[str]] = []
        self._changing = threading.Lock()  # the list of sandboxes
        self._open = ExitStack()
        self._stopping = False

    def __enter__(self) -> "Grader":
        self._results.mkdir(parents=True, exist_ok=True)
        sweep()  # of graders that were killed
        self._scratch = self._open.enter_context(private_folder())
        self._earlier_children = frozenset(child.pid for child in psutil.Process().children())
        process_tree.adopt_orphans()
        return self

    def __exit__(self, *details: object) -> None:
        self._stopping = True
        for sandbox in self._sandboxes:
            sandbox.terminate()
        for sandbox in self._sandboxes:
            with sandbox, suppress(BrokenPipeError):  # waits for its end, and closes its pipes
                pass
        process_tree.kill_descendants(self._earlier_children, subtrees=True)
        process_tree.adopt_orphans(False)
        self._open.close()

    def grade(
        self, submissions: list[Submission], at_once: int = 2, report: Callable[[Graded], None] = lambda graded: None
    ) -> list[Graded]:
        """Grade all submissions; call `report` in this thread after each one.

        Raises:
            GradingStopped: the checks changed on disk meanwhile, or the results cannot be written.
        """
        assert len({submission.key for submission in submissions}) == len(submissions)
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
                raise GradingStopped(f"grading stopped at {key}: {graded}") from graded
            done[key] = graded
            report(graded)
        return [done[submission.key] for submission in submissions]

    def _serve(
        self,
        number: int,
        todo: "queue.SimpleQueue[Submission]",
        finished: "queue.SimpleQueue[tuple[str, Graded | Exception]]",
    ) -> None:
        folder = self._scratch / str(number)
        sandbox = self._start(folder)
        while not self._stopping:
            try:
                submission = todo.get_nowait()
            except queue.Empty:
                break
            try:
                if sandbox.poll() is not None:
                    sandbox = self._start(folder)
                graded = self._one(sandbox, submission)
                self._keep(submission, graded)
            except Exception as error:
                finished.put((submission.key, error))
                break
            finished.put((submission.key, graded))

    def _start(self, folder: Path) -> "subprocess.Popen[str]":
        """Start a sandbox; first remove the files and processes that an earlier one left."""
        code = "from dualpipe_course.grading.sandbox import main; main()"
        command = [sys.executable, "-c", code, str(folder)]
        with self._changing:
            spared = self._earlier_children | {sandbox.pid for sandbox in self._sandboxes}
            process_tree.kill_descendants(spared, subtrees=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            sandbox = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._sandboxes.append(sandbox)
        return sandbox

    def _one(self, sandbox: "subprocess.Popen[str]", submission: Submission) -> Graded:
        tasks = submission.overlay.tasks
        marks = {task.name: mark for task in tasks if (mark := _without_running(submission, task))}
        replayed = self._replayed_without_running(submission)
        job: dict[str, Any] = {
            "tasks": [asdict(task) for task in tasks if task.name not in marks],
            "limits": self._limits.to_dict(),
            "replay": submission.source.decode(errors="replace") if self._nbval and not replayed else "",
            "replay_seconds": self._limits.seconds * (len(tasks) + 1),
        }
        if job["tasks"] or job["replay"]:
            try:
                for verdict in _verdicts(sandbox, job):
                    if "replayed" in verdict:
                        replayed = Replayed(**verdict["replayed"])
                    else:
                        marks[verdict["name"]] = _mark(verdict)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                sandbox.kill()
                sandbox.wait()
        for task in tasks:
            marks.setdefault(task.name, _mark({"name": task.name, "status": "stopped", "message": UNWATCHED}))
        if library_digest() != self._library:
            raise GradingStopped("the checks in dualpipe_lab changed on disk meanwhile; grade everything again")
        notes = [submission.problem] if submission.problem else submission.overlay.notes
        ordered = [marks[task.name] for task in tasks]
        if self._nbval and not replayed:
            replayed = Replayed("stopped", UNWATCHED)
        return Graded(submission.learner, submission.notebook, submission.digest, ordered, notes, replayed)

    def _replayed_without_running(self, submission: Submission) -> Replayed | None:
        """Return what nbval would say about a notebook that needs no run, or None."""
        if self._nbval and submission.problem:
            return Replayed("unreadable", submission.problem)
        if self._nbval and shows_nothing(json.loads(submission.source)):
            return Replayed("no outputs", "the notebook was saved without outputs: there is nothing to compare")
        return None

    def _known(self, submission: Submission) -> Graded | None:
        if self._fresh:
            return None
        try:
            data = json.loads((self._results / f"{submission.key}.json").read_text(encoding="utf-8"))
            replayed = Replayed(**data["replayed"]) if data.get("replayed") else None
            graded = Graded(**data | {"marks": [Mark(**mark) for mark in data["marks"]], "replayed": replayed})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        complete = graded.replayed is not None or not self._nbval
        return graded if graded.digest == submission.digest and complete else None

    def _keep(self, submission: Submission, graded: Graded) -> None:
        target = self._results / f"{submission.key}.json"
        temporary = target.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
        temporary.write_text(json.dumps(asdict(graded), indent=1), encoding="utf-8")
        temporary.replace(target)


def _verdicts(sandbox: "subprocess.Popen[str]", job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Send a job to a sandbox and read one verdict per task.

    Raises:
        OSError, ValueError, KeyError, TypeError, RecursionError: it ended, or others wrote the lines.
    """
    assert sandbox.stdin is not None
    assert sandbox.stdout is not None
    token = secrets.token_hex(16)
    sandbox.stdin.write(json.dumps(job | {"token": token}) + "\n")
    sandbox.stdin.flush()
    while True:
        verdict = json.loads(sandbox.stdout.readline())
        if verdict["token"] != token:
            raise ValueError("a verdict that the sandbox did not give")
        if "done" in verdict:
            return
        yield verdict


def _without_running(submission: Submission, task: Task) -> Mark | None:
    """Return the mark of an exercise that needs no evaluation, or None."""
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
