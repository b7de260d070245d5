"""The supervisor of one launch: an event loop in the calling thread; and the report of a launch that failed.

  hello -> job -> ready (all ranks) -> go -> results (all ranks)
The loop prints the ranks' output, asks each rank for its status at intervals, detects deadlocks and ends a launch after
its time limit.
"""

import linecache
import os
import re
import selectors
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dualpipe_lab
from dualpipe_lab.launch import operating_system, payload, restricted
from dualpipe_lab.launch.clock import origin_after
from dualpipe_lab.launch.rank import Job
from dualpipe_lab.launch.record.operation import mismatch, read_log
from dualpipe_lab.launch.record.rank_status import RankStatus, StackFrame
from dualpipe_lab.launch.server import RankProcess
from dualpipe_lab.launch.supervise.diagnosis import explain, is_stuck, locate
from dualpipe_lab.launch.supervise.errors import RankError, RankFailure, RankTimeout, StartupError
from dualpipe_lab.launch.supervise.output import Output

STARTUP_SECONDS = 120.0  # the first launch may wait for the fork server's imports on a busy machine
PROBE_SECONDS = 0.7  # between two requests for the ranks' status
STUCK_ROUNDS = 2  # unchanged rounds that count as a deadlock
GRACE_SECONDS = 0.3  # for the other ranks to report after the first failure
_PACKAGE = str(Path(dualpipe_lab.__file__).parent)
_PEER_GONE = (
    "closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Connection timed out", "No route to host"
)  # fmt: skip
_MESSAGES = ("hello", "ready", "where", "result", "failure")


@dataclass
class WatchedRank:
    """State of one rank as the supervisor knows it; `statuses` holds the last two."""

    rank: int
    job: Job
    process: RankProcess
    greeted: bool = False
    ready: bool = False
    result: bytes | None = None
    failure: RankFailure | None = None
    statuses: list[RankStatus] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether the rank has neither returned nor failed."""
        return self.result is None and self.failure is None


class Supervisor:
    """Runs one job on each process and collects the results."""

    def __init__(self, jobs: list[Job], processes: list[RankProcess], output: Output, timeout: float) -> None:
        self.ranks = [WatchedRank(job.rank, job, process) for job, process in zip(jobs, processes, strict=True)]
        self._output, self._timeout = output, timeout
        self._report = FailureReport(jobs[0].folder, set(jobs[0].sources), len(jobs))
        self._selector = selectors.DefaultSelector()
        self._started = time.perf_counter()
        self._went: float | None = None
        self._failed_at: float | None = None
        self._asked_at = 0.0
        self._stuck_rounds = 0
        for watched in self.ranks:
            process = watched.process
            for connection in (process.out, process.err):
                os.set_blocking(connection.fileno(), False)
            for source, handle in (
                (process.channel, self._on_message),
                (process.out, self._on_output),
                (process.err, self._on_output),
                (process.process.sentinel, self._on_death),
            ):
                self._selector.register(source, selectors.EVENT_READ, (handle, watched))

    def run(self) -> list[bytes]:
        """Return the pickled result of each rank.

        Raises:
            RankError, RankTimeout: see `errors.py`.
            StartupError: if the processes cannot be started at all.
            KeyboardInterrupt: it was interrupted; the message says where each rank was.
        """
        __tracebackhide__ = True
        try:
            self._watch()
        except KeyboardInterrupt:
            if self._went is None:
                raise
            self._collect_statuses()
            report = self._report.timeout(self.ranks, "interrupted. Where each rank was:")
            interrupt = KeyboardInterrupt(str(report))
            vars(interrupt)["_render_traceback_"] = lambda: f"KeyboardInterrupt: {report}".splitlines()  # for IPython
            raise interrupt from None
        if self._failed_at is not None:
            raise self._report.error(self.ranks)
        for watched in self.ranks:
            self._finish_output(watched)
        return [watched.result for watched in self.ranks if watched.result is not None]

    def _watch(self) -> None:
        """Handle events until all ranks have returned, or one has failed and the others have had time to say so."""
        __tracebackhide__ = True
        while any(watched.running for watched in self.ranks):
            self._handle_events()
            now = time.perf_counter()
            if self._failed_at is None:
                self._keep_time(now)
            elif now - self._failed_at > GRACE_SECONDS:
                break

    def close(self) -> None:
        """Print the rest of the ranks' output and close the event loop."""
        for watched in self.ranks:
            self._finish_output(watched)
        self._selector.close()

    def _handle_events(self) -> None:
        for key, _ in self._selector.select(0.05):
            handle, watched = key.data
            handle(watched, key.fileobj)

    def _keep_time(self, now: float) -> None:
        if self._went is None:
            if now - self._started > STARTUP_SECONDS:
                late = [watched.rank for watched in self.ranks if not watched.ready]
                headline = f"ranks {late} were not ready after {now - self._started:.0f} s"
                raise self._report.timeout(self.ranks, headline)
            return
        ran = now - self._went
        if now - self._asked_at > PROBE_SECONDS:
            self._compare_rounds()
            self._ask_status(now)
        if self._stuck_rounds >= STUCK_ROUNDS:
            headline = f"no progress; gave up after {ran:.1f} s. Where each rank was:"
            raise self._report.timeout(self.ranks, headline, ran)
        if ran > self._timeout:
            self._collect_statuses()
            headline = f"the time limit of {self._timeout:g} s passed (timeout=). Where each rank was:"
            raise self._report.timeout(self.ranks, headline, ran)

    def _ask_status(self, now: float) -> None:
        self._asked_at = now
        for watched in self.ranks:
            if watched.running:
                self._send(watched, "where")

    def _compare_rounds(self) -> None:
        running = [watched for watched in self.ranks if watched.running]
        if all(len(watched.statuses) > 1 for watched in running):
            before = {watched.rank: watched.statuses[-2] for watched in running}
            after = {watched.rank: watched.statuses[-1] for watched in running}
            stuck = is_stuck(before, after, PROBE_SECONDS) and all(a is not before[r] for r, a in after.items())
            self._stuck_rounds = self._stuck_rounds + 1 if stuck else 0

    def _collect_statuses(self) -> None:
        """Ask once more for the status; after half a second a silent rank gets a signal to dump its stack."""
        known = {watched.rank: watched.statuses for watched in self.ranks}  # an answer makes another list
        self._ask_status(time.perf_counter())
        deadline = time.perf_counter() + 0.5
        while time.perf_counter() < deadline:
            self._handle_events()
            silent = [watched for watched in self.ranks if watched.running and watched.statuses is known[watched.rank]]
            if not silent:
                return
        self._report.force_stacks(silent)

    def _on_message(self, watched: WatchedRank, channel: Any) -> None:
        try:
            self._take(watched, channel)
        except (EOFError, OSError):
            self._on_death(watched, None)

    def _take(self, watched: WatchedRank, channel: Any) -> None:
        kind, *content = payload.receive(channel)
        if kind not in _MESSAGES:  # a rank's code can reach its channel
            raise restricted.Refused(f"a rank sent an unknown message, {str(kind)[:40]!r}")
        getattr(self, f"_on_{kind}")(watched, *content)

    def _on_hello(self, watched: WatchedRank) -> None:
        watched.greeted = True
        self._send(watched, "job", watched.job)

    def _on_ready(self, watched: WatchedRank) -> None:
        watched.ready = True
        if all(other.ready for other in self.ranks):
            self._went = self._asked_at = time.perf_counter()
            origin_ns = origin_after(time.perf_counter_ns(), len(self.ranks))
            for other in self.ranks:
                self._send(other, "go", origin_ns)

    def _on_where(self, watched: WatchedRank, status: RankStatus) -> None:
        watched.statuses = [*watched.statuses[-1:], status]

    def _on_result(self, watched: WatchedRank, result: bytes, status: RankStatus) -> None:
        watched.result = result
        watched.statuses.append(status)
        self._finish_output(watched)

    def _on_failure(
        self, watched: WatchedRank, cause: str, frames: Any, text: str, exception: bytes | None, status: RankStatus
    ) -> None:
        watched.statuses.append(status)
        try:
            error = payload.loads(exception) if exception else None
        except Exception:
            error = None  # its class exists in the rank alone; the text has arrived
        watched.failure = self._report.raised(watched.rank, cause, frames, text, error)
        self._note_failure()

    def _on_death(self, watched: WatchedRank, _: Any) -> None:
        for source in (watched.process.process.sentinel, watched.process.channel):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        with suppress(EOFError, OSError):  # what it sent before
            while watched.process.channel.poll(0):
                self._take(watched, watched.process.channel)
        if not watched.running:
            return
        if not watched.greeted:
            raise StartupError(f"rank {watched.rank} died before it said hello")
        watched.failure = self._report.died(watched)
        self._note_failure()

    def _note_failure(self) -> None:
        if self._failed_at is None:
            self._failed_at = time.perf_counter()
            self._ask_status(self._failed_at)

    def _send(self, watched: WatchedRank, *message: Any) -> None:
        try:
            watched.process.channel.send(message)
        except OSError:
            self._on_death(watched, None)

    def _on_output(self, watched: WatchedRank, connection: Any) -> None:
        try:
            data = os.read(connection.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if data:
            stream = "stdout" if connection is watched.process.out else "stderr"
            self._output.feed(watched.rank, stream, data)
        elif connection in self._selector.get_map():
            self._selector.unregister(connection)

    def _finish_output(self, watched: WatchedRank) -> None:
        """Read the rest of the output; everything written before the last message is in the pipe already."""
        for connection in (watched.process.out, watched.process.err):
            while connection in self._selector.get_map() and connection.poll(0):
                self._on_output(watched, connection)
        self._output.finish(watched.rank)


class FailureReport:
    """Builds the errors of a launch; `cells` are the file names of notebook cells."""

    def __init__(self, folder: Path, cells: set[str], world_size: int) -> None:
        self._folder, self._cells, self._world_size = folder, cells, world_size

    def raised(
        self, rank: int, cause: str, frames: list[StackFrame], text: str, exception: BaseException | None
    ) -> RankFailure:
        """Failure of a rank whose function raised or called `sys.exit`."""
        frame = user_frame(frames, self._cells)
        where = name_frame(frame) if frame else ""
        if frame and (source := linecache.getline(frame.file, frame.line).strip()):
            where += f":  {source}"
        lost = any(phrase in cause for phrase in _PEER_GONE)
        if lost:
            cause = "lost its peer"  # GLOO's own words are in the traceback
        return RankFailure(rank, cause, where, name_cells(text, self._cells), exception, secondary=lost)

    def died(self, observed: WatchedRank) -> RankFailure:
        """Failure of a rank whose process ended without a message: killed, crashed or `os._exit`."""
        observed.process.process.join(1)
        code = observed.process.process.exitcode
        stack = self._stack(observed.rank)
        frame = user_frame(frames_of_dump(stack), self._cells)
        cause = f"died without an exception ({_exit_name(code)})"
        if code == -signal.SIGABRT:
            logs = {rank: read_log(self._folder / f"operations-{rank}") for rank in range(self._world_size)}
            calls = mismatch(logs, observed.rank)
            cause += f": {calls}" if calls else ""
        text = name_cells(stack, self._cells)
        return RankFailure(observed.rank, cause, name_frame(frame) if frame else "", text)

    def error(self, ranks: list[WatchedRank]) -> RankError:
        """Error with all failures of a launch and the status of the other ranks."""
        failures = {observed.rank: observed.failure for observed in ranks if observed.failure}
        others = [observed for observed in ranks if not observed.failure and not observed.result and observed.statuses]
        notes = [f"{locate(observed.statuses[-1], self._line_of)}; stopped by the launcher" for observed in others]
        mismatches = [cause for cause in _causes(ranks) if cause.startswith("collective mismatch")]
        return RankError(failures, len(ranks), mismatches + notes)

    def timeout(self, ranks: list[WatchedRank], headline: str, seconds: float = 0.0) -> RankTimeout:
        """Error with the status of all ranks and the causes of the deadlock."""
        lines = [self._describe(observed) for observed in ranks]
        return RankTimeout(headline, lines + _causes(ranks), seconds)

    def force_stacks(self, silent: list[WatchedRank]) -> None:
        """Make ranks that do not answer dump their stacks by a signal: `faulthandler` needs no GIL."""
        for observed in silent:
            observed.statuses.clear()
            if operating_system.STACK_SIGNAL is not None and observed.process.process.is_alive():
                os.kill(observed.process.process.pid or 0, operating_system.STACK_SIGNAL)
        time.sleep(0.2)

    def _describe(self, observed: WatchedRank) -> str:
        if observed.result is not None:
            return f"rank {observed.rank}: returned"
        if observed.statuses:
            return locate(observed.statuses[-1], self._line_of)
        frame = user_frame(frames_of_dump(self._stack(observed.rank)), self._cells)
        at = f"; at {name_frame(frame)}" if frame else ""
        return f"rank {observed.rank}: holds the interpreter's lock, so it cannot answer{at}"

    def _line_of(self, status: RankStatus) -> str:
        frame = user_frame(status.frames, self._cells)
        return name_frame(frame) if frame else ""

    def _stack(self, rank: int) -> str:
        path = self._folder / f"stack-{rank}"
        return user_stack(path.read_text(errors="replace")) if path.exists() else ""


def _causes(ranks: list[WatchedRank]) -> list[str]:
    latest = {observed.rank: observed.statuses[-1] for observed in ranks if observed.statuses}
    return explain(latest, {observed.rank for observed in ranks if observed.result is not None})


def _exit_name(code: int | None) -> str:
    if code is None:
        return "its process is gone"
    if code >= 0:
        return f"exit code {code}"
    named = {number.value: number.name for number in signal.Signals}  # real-time signals have no names
    return named.get(-code, f"signal {-code}")


def name_file(file: str) -> str:
    """`Cell In[3]` for a notebook cell, otherwise the name of the file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    named = shell.compile.format_code_name(file) if shell and hasattr(shell.compile, "format_code_name") else None
    return " ".join(named) if named else Path(file).name


def name_frame(frame: StackFrame) -> str:
    """`Cell In[3], line 7, in step`."""
    return f"{name_file(frame.file)}, line {frame.line}, in {frame.function}"


def user_frame(frames: Sequence[StackFrame], cells: Collection[str]) -> StackFrame | None:
    """The innermost frame of user code: in a notebook cell, else in a file outside the library, else any."""
    for wanted in (lambda file: file in cells, _is_user_file):
        found = next((frame for frame in reversed(frames) if wanted(frame.file)), None)
        if found:
            return found
    return frames[-1] if frames else None


def name_cells(text: str, cells: Collection[str]) -> str:
    """Replace the file names of cells in a traceback by their names in the notebook."""
    for file in cells:
        if file in text:
            text = text.replace(f'File "{file}"', name_file(file))
    return text


def frames_of_dump(text: str) -> list[StackFrame]:
    """Frames of a stack dump of `faulthandler`, innermost last."""
    found = re.findall(r'File "(.+?)", line (\d+) in (.+)', text)
    return [StackFrame(file, int(line), function) for file, line, function in reversed(found)]


def user_stack(dump: str) -> str:
    """The part of a dump of all threads that shows the user's function and the calls inside it."""
    headline, _, _ = dump.partition("\n\n")
    rank_file = f'  File "{_PACKAGE}/launch/rank.py"'
    for block in dump.split("\n\n"):
        stack, found, _ = block.partition(rank_file)
        if found and "in _listen" not in block:
            return f"{headline}\n{stack.rstrip()}" if stack not in headline else stack.rstrip()
    return headline


def _is_user_file(file: str) -> bool:
    return not file.startswith((_PACKAGE, sysconfig.get_paths()["stdlib"], *site.getsitepackages(), "<"))
