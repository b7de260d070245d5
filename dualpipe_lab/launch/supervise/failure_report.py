"""The failure report: the error of a launch, with each rank's line of code, cause and last operation.

In: ranks as the supervisor knows them.  Out: `RankFailure`, `RankError` or `RankTimeout`.
A line of code is named as in the notebook: `Cell In[3], line 7, in step`.
"""

import linecache
import os
import re
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import dualpipe_lab
from dualpipe_lab.launch import operating_system
from dualpipe_lab.launch.record import operation_log
from dualpipe_lab.launch.record.rank_status import RankStatus, StackFrame
from dualpipe_lab.launch.server import RankProcess
from dualpipe_lab.launch.supervise.diagnosis import explain, locate
from dualpipe_lab.launch.supervise.errors import RankError, RankFailure, RankTimeout

_PACKAGE = str(Path(dualpipe_lab.__file__).parent)
_PEER_GONE = (
    "closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Connection timed out", "No route to host"
)  # fmt: skip


class ObservedRank(Protocol):
    """State of a rank as the supervisor knows it."""

    rank: int
    process: RankProcess
    result: bytes | None
    failure: RankFailure | None
    statuses: list[RankStatus]


class FailureReport:
    """Builds the errors of a launch; `cells` are the file names of notebook cells."""

    def __init__(self, folder: Path, cells: set[str], world_size: int) -> None:
        self._folder, self._cells, self._world_size = folder, cells, world_size

    def raised(
        self, rank: int, cause: str, frames: list[StackFrame], text: str, exception: BaseException | None
    ) -> RankFailure:
        """Failure of a rank whose function raised or called `sys.exit`."""
        frame = user_frame(frames, self._cells)
        where = ""
        if frame:
            source = source_line(frame)
            where = name_frame(frame) + (f":  {source}" if source else "")
        lost = any(phrase in cause for phrase in _PEER_GONE)
        if lost:
            cause = "lost its peer"  # GLOO's own words are in the traceback
        return RankFailure(rank, cause, where, name_cells(text, self._cells), exception, secondary=lost)

    def died(self, observed: ObservedRank) -> RankFailure:
        """Failure of a rank whose process ended without a message: killed, crashed or `os._exit`."""
        observed.process.process.join(1)
        code = observed.process.process.exitcode
        stack = self._stack(observed.rank)
        frame = user_frame(frames_of_dump(stack), self._cells)
        cause = f"died without an exception ({_exit_name(code)})"
        if code == -signal.SIGABRT:
            logs = {rank: operation_log.read(self._folder / f"operations-{rank}") for rank in range(self._world_size)}
            mismatch = operation_log.mismatch(logs, observed.rank)
            cause += f": {mismatch}" if mismatch else ""
        text = name_cells(stack, self._cells)
        return RankFailure(observed.rank, cause, name_frame(frame) if frame else "", text)

    def error(self, ranks: Iterable[ObservedRank]) -> RankError:
        """Error with all failures of a launch and the status of the other ranks."""
        ranks = list(ranks)
        failures = {observed.rank: observed.failure for observed in ranks if observed.failure}
        others = [observed for observed in ranks if not observed.failure and not observed.result and observed.statuses]
        notes = [f"{locate(observed.statuses[-1], self._line_of)}; stopped by the launcher" for observed in others]
        causes = explain(_latest(ranks), _returned(ranks))
        mismatches = [cause for cause in causes if cause.startswith("collective mismatch")]
        return RankError(failures, len(ranks), mismatches + notes)

    def timeout(self, ranks: Iterable[ObservedRank], headline: str, seconds: float = 0.0) -> RankTimeout:
        """Error with the status of all ranks and the causes of the deadlock."""
        ranks = list(ranks)
        lines = [self._describe(observed) for observed in ranks]
        return RankTimeout(headline, lines + explain(_latest(ranks), _returned(ranks)), seconds)

    def force_stacks(self, silent: Iterable[ObservedRank]) -> None:
        """Make ranks that do not answer dump their stacks by a signal: `faulthandler` needs no GIL."""
        for observed in silent:
            observed.statuses.clear()
            if operating_system.STACK_SIGNAL is not None and observed.process.process.is_alive():
                os.kill(observed.process.process.pid or 0, operating_system.STACK_SIGNAL)
        time.sleep(0.2)

    def _describe(self, observed: ObservedRank) -> str:
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


def _latest(ranks: Iterable[ObservedRank]) -> dict[int, RankStatus]:
    return {observed.rank: observed.statuses[-1] for observed in ranks if observed.statuses}


def _returned(ranks: Iterable[ObservedRank]) -> set[int]:
    return {observed.rank for observed in ranks if observed.result is not None}


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


def source_line(frame: StackFrame) -> str:
    """Text of the frame's line without indentation; empty if the source is not in this process."""
    return linecache.getline(frame.file, frame.line).strip()


def name_cells(text: str, cells: Collection[str]) -> str:
    """Replace the file names of cells in a traceback by their names in the notebook."""
    named = {file: name_file(file) for file in cells if file in text}
    for file, name in named.items():
        text = text.replace(f'File "{file}"', name)
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
    foreign = (_PACKAGE, sysconfig.get_paths()["stdlib"], *site.getsitepackages(), "<")
    return not file.startswith(foreign)
