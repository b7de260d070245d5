"""The grader: distributes submissions to sandboxes, two at a time, and keeps each result in a folder.

An interrupted run continues with the submissions that have no result.  A result is signed, so that a submission which
writes into the folder of results changes no mark.
What a submission may have lost to a neighbour, or to a machine out of memory, is evaluated once more at the end, alone.
In: a folder of submissions, the folder of exercises.  Out: one `Graded` per submission.
"""

import hmac
import json
import os
import queue
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from dualpipe_course.grading import pristine, process_tree
from dualpipe_course.grading.guard import KEY
from dualpipe_course.grading.limits import Limits
from dualpipe_course.grading.notebook import Task
from dualpipe_course.grading.replay import Replayed, shows_nothing
from dualpipe_course.grading.submissions import Submission
from dualpipe_course.own.runs import find as find_check
from dualpipe_lab._optional import extra
from dualpipe_lab.launch.folder import private_folder, sweep

with extra("grading", "grading"):
    import psutil

ENDING_SECONDS = 60.0
UNWATCHED = "the process that watches this submission was ended from inside it"
TOUCHED = "files of the course changed while it ran; it runs with a copy of them, which nothing else changes"
# how an exercise ends whose processes somebody else has killed, or the kernel for want of memory
_VICTIM = re.compile(
    r"ended from inside|killed from inside|broke what runs it|SIGKILL|SIGTERM|SIGSTOP|exit code (255|-\d+)|"
    r"Connection (refused|reset|closed)|Cannot allocate memory|" + re.escape(TOUCHED)
)


@dataclass(frozen=True)
class Mark:
    """One exercise of one submission: status is right, wrong, error, stopped, not started, missing or unreadable."""

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


@dataclass
class Run:
    """A submission that is evaluated: its neighbours meanwhile, and what came out."""

    submission: Submission
    neighbours: set[str] = field(default_factory=set)
    graded: Graded | None = None
    error: Exception | None = None


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
        self._library = pristine.digest()
        self._copy: pristine.Copy | None = None
        self._copying = threading.Lock()
        self._running: list[Run] = []
        self.warnings: list[str] = []
        self._sandboxes: list[subprocess.Popen[str]] = []
        self._changing = threading.Lock()  # the list of sandboxes
        self._open = ExitStack()
        self._stopping = False

    def __enter__(self) -> "Grader":
        self._results.mkdir(parents=True, exist_ok=True)
        self._key = _key_in(self._results.parent)
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
            GradingStopped: the results cannot be written.
        """
        assert len({submission.key for submission in submissions}) == len(submissions)
        done: dict[str, Graded] = {}
        for submission in submissions:
            if (known := self._known(submission)) is not None:
                done[submission.key] = known
                report(known)
        waiting = [submission for submission in submissions if submission.key not in done]
        try:
            victims = []
            for run in self._evaluate([Run(submission) for submission in waiting], at_once):
                if _lost(run.graded):
                    victims.append(run)
                else:
                    done[run.submission.key] = self._finish(run, report)
            for victim in victims:
                for run in self._evaluate([Run(victim.submission)], 1, _lost(victim.graded)):
                    run.graded = _again(victim, run.graded)
                    done[run.submission.key] = self._finish(run, report)
        finally:
            self.warnings += [warning for each in submissions if (warning := self._kept_apart(each))]
        return [done[submission.key] for submission in submissions]

    def _evaluate(self, runs: list[Run], at_once: int, only: frozenset[str] = frozenset()) -> Iterator[Run]:
        """Evaluate submissions in threads; yield each run when it is over."""
        todo: queue.SimpleQueue[Run] = queue.SimpleQueue()
        finished: queue.SimpleQueue[Run] = queue.SimpleQueue()
        for run in runs:
            todo.put(run)
        places = [(number, todo, finished, only) for number in range(min(at_once, len(runs)))]
        threads = [threading.Thread(target=self._serve, args=place, daemon=True) for place in places]
        for thread in threads:
            thread.start()
        for _ in runs:
            yield finished.get()
        for thread in threads:
            thread.join()

    def _finish(self, run: Run, report: Callable[[Graded], None]) -> Graded:
        key = run.submission.key
        if run.graded is None:
            raise GradingStopped(f"grading stopped at {key}: {run.error}") from run.error
        if not self.warnings and pristine.digest() != self._library:
            beside = f", or beside it {', '.join(sorted(run.neighbours))}," * bool(run.neighbours)
            self.warnings.append(
                f"files of the course in {pristine.HERE} changed while {key}{beside} ran; marks come from a copy that "
                "was made before: restore the files (git status) before you grade again"
            )
        try:
            self._keep(run.submission, run.graded)
        except OSError as error:
            raise GradingStopped(f"grading stopped at {key}: {error}") from error
        report(run.graded)
        return run.graded

    def _serve(
        self, number: int, todo: "queue.SimpleQueue[Run]", finished: "queue.SimpleQueue[Run]", only: frozenset[str]
    ) -> None:
        sandbox: subprocess.Popen[str] | None = None
        while not self._stopping:
            try:
                run = todo.get_nowait()
            except queue.Empty:
                break
            with self._changing:
                for other in self._running:
                    other.neighbours.add(run.submission.key)
                    run.neighbours.add(other.submission.key)
                self._running.append(run)
            try:
                if self._needs_running(run.submission) and (sandbox is None or sandbox.poll() is not None):
                    sandbox = self._start(number)
                run.graded = self._one(sandbox, run.submission, only)
                if sandbox and self._copy and not self._copy.is_at(self._course_of(number)):
                    sandbox.kill()
                    sandbox.wait()
                    run.graded = replace(run.graded, marks=[_touched(mark) for mark in run.graded.marks])
            except Exception as error:
                run.error = error
            with self._changing:
                self._running.remove(run)
            finished.put(run)
        if sandbox is not None and sandbox.stdin is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                sandbox.stdin.close()  # it ends
                sandbox.wait(ENDING_SECONDS)

    def _course_of(self, number: int) -> Path:
        """The copy of library and course that the sandbox of this number runs with."""
        return self._scratch / f"course-{number}"

    def _start(self, number: int) -> "subprocess.Popen[str]":
        """Start a sandbox; first remove the files and processes that an earlier one left."""
        with self._copying:
            self._copy = self._copy or pristine.Copy(self._scratch / "course")
        self._copy.restore(self._course_of(number))
        folder = self._scratch / str(number)
        code = "from dualpipe_course.grading.sandbox import main; main()"
        command = [sys.executable, "-B", "-P", "-c", code, str(folder)]
        with self._changing:
            spared = self._earlier_children | {sandbox.pid for sandbox in self._sandboxes}
            process_tree.kill_descendants(spared, subtrees=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            sandbox = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=pristine.environment(self._course_of(number)),
                cwd=folder,
            )
            self._sandboxes.append(sandbox)
        return sandbox

    def _needs_running(self, submission: Submission) -> bool:
        needs_replay = self._nbval and not self._replayed_without_running(submission)
        return needs_replay or any(not _without_running(submission, task) for task in submission.overlay.tasks)

    def _one(self, sandbox: "subprocess.Popen[str] | None", submission: Submission, only: frozenset[str]) -> Graded:
        tasks = [task for task in submission.overlay.tasks if not only or task.name in only]
        marks = {task.name: mark for task in tasks if (mark := _without_running(submission, task))}
        replayed = self._replayed_without_running(submission)
        refused = []
        job: dict[str, Any] = {
            "tasks": [asdict(task) for task in tasks if task.name not in marks],
            "limits": self._limits.to_dict(),
            "replay": submission.source.decode("utf-8-sig", errors="replace") if self._nbval and not replayed else "",
            "replay_seconds": self._limits.seconds * (len(tasks) + 1),
        }
        if sandbox and (job["tasks"] or job["replay"]):
            try:
                for verdict in _verdicts(sandbox, job):
                    if "replayed" in verdict:
                        replayed = Replayed(**verdict["replayed"])
                    else:
                        marks[verdict["name"]] = _mark(verdict)
                        refused += [
                            f"answer-{verdict['name']}: {what} was refused" for what in verdict.get("refused", ())
                        ]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                sandbox.kill()
                sandbox.wait()
        for task in tasks:
            marks.setdefault(task.name, _mark({"name": task.name, "status": "stopped", "message": UNWATCHED}))
        notes = [submission.problem] if submission.problem else [*submission.overlay.notes, *refused]
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
            stored = json.loads((self._results / f"{submission.key}.json").read_text(encoding="utf-8"))
            data = stored["graded"]
            replayed = Replayed(**data["replayed"]) if data.get("replayed") else None
            graded = Graded(**data | {"marks": [Mark(**mark) for mark in data["marks"]], "replayed": replayed})
            is_ours = hmac.compare_digest(stored["signature"], self._signature(submission, graded))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        complete = graded.replayed is not None or not self._nbval
        return graded if is_ours and graded.digest == submission.digest and complete else None

    def _keep(self, submission: Submission, graded: Graded) -> None:
        target = self._results / f"{submission.key}.json"
        temporary = target.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}")
        stored = {"graded": asdict(graded), "signature": self._signature(submission, graded)}
        temporary.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        temporary.replace(target)

    def _signature(self, submission: Submission, graded: Graded) -> str:
        text = json.dumps([submission.key, asdict(graded)], sort_keys=True)
        return hmac.new(self._key, text.encode(), sha256).hexdigest()

    def _kept_apart(self, submission: Submission) -> str:
        """Keep a submission whose file has changed since it was read; say so."""
        try:
            if not submission.source or submission.path.read_bytes() == submission.source:
                return ""
        except OSError:
            pass
        kept = self._results / f"{submission.key}.ipynb"
        with suppress(OSError):
            kept.write_bytes(submission.source)
        return f"{submission.path} changed while submissions ran; {kept} is what was graded"


def _key_in(folder: Path) -> bytes:
    """The key that signs results: made once, and closed to answers by the guard."""
    with (
        suppress(FileExistsError),
        open(os.open(folder / KEY, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as new,
    ):
        new.write(secrets.token_bytes(32))
    return (folder / KEY).read_bytes()


def _lost(graded: Graded | None) -> frozenset[str]:
    """The exercises that may have lost their points to somebody else."""
    marks = graded.marks if graded else []
    return frozenset(
        mark.name for mark in marks if mark.status in ("stopped", "error", "wrong") and _VICTIM.search(mark.message)
    )


def _again(first: Run, second: Graded | None) -> Graded | None:
    """Put the marks of a second evaluation in their places."""
    if first.graded is None or second is None:
        return None
    marks = {mark.name: mark for mark in second.marks}
    old = [mark for mark in first.graded.marks if mark.name in marks]
    beside = f"beside {', '.join(sorted(first.neighbours))}" if first.neighbours else "the first time"
    notes = [
        f"{mark.name} was evaluated once more, alone: {beside} it was {mark.status}: {mark.message}" for mark in old
    ]
    replayed = second.replayed or first.graded.replayed
    merged = [marks.get(mark.name, mark) for mark in first.graded.marks]
    return replace(first.graded, marks=merged, notes=[*first.graded.notes, *notes], replayed=replayed)


def _touched(mark: Mark) -> Mark:
    """The mark of an exercise that ran while files of its own copy of the course changed."""
    return replace(mark, points=0.0, status="stopped", message=TOUCHED) if mark.seconds else mark


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
        return _mark({"name": task.name, "status": "missing", "message": task.lacks})
    if task.untouched:
        return _mark({"name": task.name, "status": "not started", "message": "the answer cell is unchanged"})
    return None


def _mark(verdict: dict[str, Any]) -> Mark:
    check = find_check(verdict["name"])
    assert check is not None, f"no check is named {verdict['name']}"
    out_of = check.about.points
    points = round(out_of * min(1.0, max(0.0, float(verdict.get("score", 0)))), 2)
    return Mark(check.name, points, out_of, verdict["status"], verdict["message"], verdict.get("seconds", 0.0))
