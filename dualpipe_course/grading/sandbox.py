"""The sandbox: starts the evaluator, measures all processes below it, and kills those that exceed their limits.

In: the tasks of one submission per line (JSON, standard input), and its notebook if nbval shall run it.  Out: one
verdict per line, then what nbval found, then {"done": true}; each line repeats the token of the job.
An exercise that exceeds a limit loses its points: its processes are killed, and the next exercise gets new ones.
"""

import json
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dualpipe_course.grading import process_tree
from dualpipe_course.grading.limits import Limits, Stopped
from dualpipe_course.grading.pristine import close_path
from dualpipe_course.grading.replay import Replayed, replay

STARTUP_SECONDS = 180.0  # the fork server imports torch, maybe on a busy machine
LOOK_SECONDS = 0.05
MAX_FILE_BYTES = 512 * 2**20
FORGED = "a verdict that the evaluator did not give was found"


class EvaluatorProcess:
    """The process that forks an evaluator for each task, and the pipes to it."""

    def __init__(self, folder: Path) -> None:
        tasks_read, self._tasks = os.pipe()
        self.verdicts, verdicts_write = os.pipe()
        code = "from dualpipe_course.grading.evaluator import main; main()"
        environment = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", "DUALPIPE_LAB_START": "forkserver"}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-B", "-P", "-c", code, str(tasks_read), str(verdicts_write)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(tasks_read, verdicts_write),
            env=environment,
            cwd="/",
            start_new_session=True,
            preexec_fn=_limit,
        )
        os.close(tasks_read)
        os.close(verdicts_write)
        assert self._process.stdout is not None
        self.output = self._process.stdout.fileno()
        self.base: frozenset[int] = frozenset()
        self._buffer = b""

    def send(self, task: dict[str, Any]) -> None:
        """Send a task."""
        line = b"\n" + json.dumps(task).encode() + b"\n"  # what others wrote before it becomes a line of its own
        while line:
            line = line[os.write(self._tasks, line) :]

    def take(self) -> dict[str, Any] | None:
        """Return the next verdict, or None until its line is complete; EOFError if the pipe is closed."""
        data = os.read(self.verdicts, 1 << 16)
        if not data:
            raise EOFError
        self._buffer += data
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise Stopped(FORGED) from None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Kill the process and all its descendants."""
        process_tree.kill_descendants(frozenset([self._process.pid]))
        self._process.kill()
        self._process.wait()
        os.close(self._tasks)
        os.close(self.verdicts)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Sandbox:
    """Evaluates tasks one after the other under limits, with a new fork server after every violation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._evaluator: EvaluatorProcess | None = None
        self._parent = os.getppid()
        self._number = 0

    def run(self, task: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """Return the verdict of one task."""
        self._number += 1
        folders = {name: str(self._folder / str(self._number) / name) for name in ("work", "home", "tmp")}
        for folder in folders.values():
            Path(folder).mkdir(parents=True)
        started = time.monotonic()
        token = secrets.token_hex(16)
        try:
            evaluator = self._ready()
            started = time.monotonic()
            evaluator.send(task | {"folders": folders, "token": token})
            verdict = self._watch(evaluator, limits, limits.seconds)
            if verdict.pop("token", None) != token:
                raise Stopped(FORGED)
            process_tree.kill_descendants(evaluator.base)  # what the learner left running
            if verdict.pop("retire", False):
                self.close()
        except (Stopped, EOFError, OSError) as error:
            self.close()
            message = str(error) if isinstance(error, Stopped) else "its processes were killed from inside"
            verdict = {"status": "stopped", "score": 0, "message": message}
        shutil.rmtree(self._folder / str(self._number), ignore_errors=True)
        return verdict | {"name": task["name"], "seconds": round(time.monotonic() - started, 2)}

    def replay(self, notebook: str, limits: Limits, seconds: float) -> Replayed:
        """Run a whole notebook by nbval, beside an evaluator that waits."""
        self._number += 1
        folder = self._folder / str(self._number)
        waiting = self._evaluator.base if self._evaluator else frozenset()
        try:
            return replay(notebook, folder, limits, seconds, lambda: self._look(waiting, limits), _limit)
        except OSError as error:
            return Replayed("stopped", f"it broke what runs it: {type(error).__name__}")
        finally:
            process_tree.kill_descendants(waiting)  # the kernel, and what the learner left running
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Kill the evaluator and all its descendants."""
        if self._evaluator:
            self._evaluator.close()
        self._evaluator = None

    def _ready(self) -> EvaluatorProcess:
        if self._evaluator is None:
            (self._folder / "t").mkdir(exist_ok=True)
            self._evaluator = EvaluatorProcess(self._folder / "t")
            self._watch(self._evaluator, Limits(processes=1000, memory_mib=1 << 20), STARTUP_SECONDS)
            self._evaluator.base = frozenset(process.pid for process in process_tree.descendants())
        return self._evaluator

    def _watch(self, evaluator: EvaluatorProcess, limits: Limits, seconds: float) -> dict[str, Any]:
        deadline, looked, printed = time.monotonic() + seconds, 0.0, 0
        while True:
            readable, _, _ = select.select([evaluator.verdicts, evaluator.output], [], [], LOOK_SECONDS)
            if evaluator.output in readable:
                data = os.read(evaluator.output, 1 << 16)
                printed += len(data)
                if not data and evaluator.verdicts not in readable:
                    raise EOFError
                if printed > limits.output_bytes:
                    raise Stopped(f"it printed more than {limits.output_bytes:,} bytes; remove the print, or the loop")
            if evaluator.verdicts in readable and (verdict := evaluator.take()):
                return verdict
            now = time.monotonic()
            if now > deadline:
                raise Stopped(f"it took more than {seconds:g} s; is there a loop that never ends?")
            if now - looked > LOOK_SECONDS:
                looked = now
                self._look(evaluator.base, limits)

    def _look(self, waiting: frozenset[int], limits: Limits) -> None:
        if os.getppid() != self._parent:
            self.close()
            raise SystemExit  # the grader is gone
        found = process_tree.descendants()
        if len(found) - len(waiting) > limits.processes:
            raise Stopped(f"it started more than {limits.processes} processes; is there an endless fork?")
        if process_tree.resident_mib(found) > limits.memory_mib and process_tree.memory_mib(found) > limits.memory_mib:
            raise Stopped(f"it used more than {limits.memory_mib} MiB of memory")


def _limit() -> None:
    process_tree.die_with_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Evaluate submissions until standard input is closed; `sys.argv[1]` is the scratch folder."""
    close_path()
    process_tree.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what follows is cleaned up
    sandbox = Sandbox(Path(sys.argv[1]))
    try:
        for line in sys.stdin:
            job = json.loads(line)
            for task in job["tasks"]:
                verdict = sandbox.run(task, Limits(**job["limits"]))
                print(json.dumps(verdict | {"token": job["token"]}), flush=True)
            if job["replay"]:
                found = sandbox.replay(job["replay"], Limits(**job["limits"]), job["replay_seconds"])
                print(json.dumps({"replayed": asdict(found), "token": job["token"]}), flush=True)
            print(json.dumps({"done": True, "token": job["token"]}), flush=True)
    finally:
        sandbox.close()
        process_tree.kill_descendants()
        shutil.rmtree(sys.argv[1], ignore_errors=True)
