"""The warden: keeps the process that forks judges, watches everything below it, and ends what goes beyond its limits.

In: one submission's tasks per line (JSON, standard input).  Out: one verdict per line, then {"done": true};
each line repeats the token of the job.
An exercise that goes beyond a limit costs its own points: everything is killed, and the next one gets new processes.
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
from pathlib import Path
from typing import Any

from dualpipe_lab.grading import process_tree as tree
from dualpipe_lab.grading.limits import Limits

STARTUP_SECONDS = 180.0  # the fork server imports torch, maybe on a busy machine
LOOK_SECONDS = 0.05
MAX_FILE_BYTES = 512 * 2**20
FORGED = "a verdict that the judge did not give was found"


class Stopped(Exception):  # noqa: N818
    """A limit was exceeded; the message is for the learner."""


class Judge:
    """The process that forks a judge for each task, and the pipes to it."""

    def __init__(self, folder: Path) -> None:
        tasks_read, self._tasks = os.pipe()
        self.verdicts, verdicts_write = os.pipe()
        code = "from dualpipe_lab.grading.evaluator import main; main()"
        environment = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", "DUALPIPE_LAB_START": "forkserver"}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-c", code, str(tasks_read), str(verdicts_write)],
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
        """Hand over a task."""
        line = b"\n" + json.dumps(task).encode() + b"\n"  # what others wrote before it becomes a line of its own
        while line:
            line = line[os.write(self._tasks, line) :]

    def take(self) -> dict[str, Any] | None:
        """The next verdict if its line is complete; EOFError if there will be none."""
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
        """End it and all below it."""
        tree.end(frozenset([self._process.pid]))
        self._process.kill()
        self._process.wait()
        os.close(self._tasks)
        os.close(self.verdicts)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Warden:
    """Judges tasks one after the other, with a fresh fork server after every incident."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._judge: Judge | None = None
        self._parent = os.getppid()
        self._number = 0

    def run(self, task: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """The verdict of one task."""
        self._number += 1
        place = {name: str(self._folder / str(self._number) / name) for name in ("work", "home", "tmp")}
        for folder in place.values():
            Path(folder).mkdir(parents=True)
        started = time.monotonic()
        token = secrets.token_hex(16)
        try:
            judge = self._ready()
            started = time.monotonic()
            judge.send(task | {"place": place, "token": token})
            verdict = self._watch(judge, limits, limits.seconds)
            if verdict.pop("token", None) != token:
                raise Stopped(FORGED)
            tree.end(judge.base)  # what the learner left running
            if verdict.pop("retire", False):
                self.close()
        except (Stopped, EOFError, OSError) as error:
            self.close()
            message = str(error) if isinstance(error, Stopped) else "its processes were killed from inside"
            verdict = {"status": "stopped", "score": 0, "message": message}
        shutil.rmtree(self._folder / str(self._number), ignore_errors=True)
        return verdict | {"name": task["name"], "seconds": round(time.monotonic() - started, 2)}

    def close(self) -> None:
        """End the judge and all below it."""
        if self._judge:
            self._judge.close()
        self._judge = None

    def _ready(self) -> Judge:
        if self._judge is None:
            (self._folder / "t").mkdir(exist_ok=True)
            self._judge = Judge(self._folder / "t")
            self._watch(self._judge, Limits(processes=1000, memory_mib=1 << 20), STARTUP_SECONDS)
            self._judge.base = frozenset(process.pid for process in tree.descendants())
        return self._judge

    def _watch(self, judge: Judge, limits: Limits, seconds: float) -> dict[str, Any]:
        deadline, looked, printed = time.monotonic() + seconds, 0.0, 0
        while True:
            readable, _, _ = select.select([judge.verdicts, judge.output], [], [], LOOK_SECONDS)
            if judge.output in readable:
                data = os.read(judge.output, 1 << 16)
                printed += len(data)
                if not data and judge.verdicts not in readable:
                    raise EOFError
                if printed > limits.output_bytes:
                    raise Stopped(f"it printed more than {limits.output_bytes:,} bytes; remove the print, or the loop")
            if judge.verdicts in readable and (verdict := judge.take()):
                return verdict
            now = time.monotonic()
            if now > deadline:
                raise Stopped(f"it took more than {seconds:g} s; is there a loop that never ends?")
            if now - looked > LOOK_SECONDS:
                looked = now
                self._look(judge, limits)

    def _look(self, judge: Judge, limits: Limits) -> None:
        if os.getppid() != self._parent:
            self.close()
            raise SystemExit  # the grader is gone
        found = tree.descendants()
        if len(found) - len(judge.base) > limits.processes:
            raise Stopped(f"it started more than {limits.processes} processes; is there an endless fork?")
        if tree.resident_mib(found) > limits.memory_mib and tree.memory_mib(found) > limits.memory_mib:
            raise Stopped(f"it used more than {limits.memory_mib} MiB of memory")


def _limit() -> None:
    tree.die_with_the_parent()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Serve submissions until standard input ends; `sys.argv[1]` is the scratch folder."""
    tree.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what follows is cleaned up
    warden = Warden(Path(sys.argv[1]))
    try:
        for line in sys.stdin:
            job = json.loads(line)
            for task in job["tasks"]:
                verdict = warden.run(task, Limits(**job["limits"]))
                print(json.dumps(verdict | {"token": job["token"]}), flush=True)
            print(json.dumps({"done": True, "token": job["token"]}), flush=True)
    finally:
        warden.close()
        tree.end()
        shutil.rmtree(sys.argv[1], ignore_errors=True)
