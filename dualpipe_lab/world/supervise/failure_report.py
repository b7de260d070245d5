"""From what the supervisor saw to the error that the learner reads."""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from dualpipe_lab.world.record import operation_log
from dualpipe_lab.world.record.rank_status import RankStatus, StackFrame
from dualpipe_lab.world.server import RankProcess
from dualpipe_lab.world.supervise import source_lines as places
from dualpipe_lab.world.supervise.diagnosis import explain, locate
from dualpipe_lab.world.supervise.errors import RankError, RankFailure, RankTimeout

_PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")


class Seen(Protocol):
    """What is known of a rank."""

    rank: int
    process: RankProcess
    result: bytes | None
    failure: RankFailure | None
    answers: list[RankStatus]


class Autopsy:
    """Words for the ends of ranks; `cells` are the file names of notebook cells."""

    def __init__(self, folder: Path, cells: set[str], world_size: int) -> None:
        self._folder, self._cells, self._world_size = folder, cells, world_size

    def raised(
        self, rank: int, cause: str, frames: list[StackFrame], text: str, exception: BaseException | None
    ) -> RankFailure:
        """A rank whose function raised, or left with `sys.exit`."""
        frame = places.learners_frame(frames, self._cells)
        where = ""
        if frame:
            source = places.source_line(frame)
            where = places.name_frame(frame) + (f":  {source}" if source else "")
        lost = any(phrase in cause for phrase in _PEER_GONE)
        if lost:
            cause = "lost its peer"  # GLOO's own words are in the traceback
        return RankFailure(rank, cause, where, places.name_cells(text, self._cells), exception, secondary=lost)

    def died(self, seen: Seen) -> RankFailure:
        """A rank that ended without a word: killed, crashed or `os._exit`."""
        seen.process.process.join(1)
        code = seen.process.process.exitcode
        stack = self._stack(seen.rank)
        frame = places.learners_frame(places.frames_of_dump(stack), self._cells)
        cause = f"died without an exception ({_exit_name(code)})"
        if code == -signal.SIGABRT:
            logs = {rank: operation_log.read(self._folder / f"operations-{rank}") for rank in range(self._world_size)}
            mismatch = operation_log.mismatch(logs, seen.rank)
            cause += f": {mismatch}" if mismatch else ""
        text = places.name_cells(stack, self._cells)
        return RankFailure(seen.rank, cause, places.name_frame(frame) if frame else "", text)

    def error(self, ranks: Iterable[Seen]) -> RankError:
        """All failures of a launch, and where the other ranks were."""
        ranks = list(ranks)
        failures = {seen.rank: seen.failure for seen in ranks if seen.failure}
        others = [seen for seen in ranks if not seen.failure and not seen.result and seen.answers]
        notes = [f"{locate(seen.answers[-1], self._place)}; stopped by the launcher" for seen in others]
        causes = explain({seen.rank: seen.answers[-1] for seen in ranks if seen.answers}, _returned(ranks))
        mismatches = [cause for cause in causes if cause.startswith("collective mismatch")]
        return RankError(failures, len(ranks), mismatches + notes)

    def timeout(self, ranks: Iterable[Seen], headline: str, seconds: float = 0.0) -> RankTimeout:
        """Where everybody was, and why nothing moves."""
        ranks = list(ranks)
        lines = [self._describe(seen) for seen in ranks]
        answers = {seen.rank: seen.answers[-1] for seen in ranks if seen.answers}
        return RankTimeout(headline, lines + explain(answers, _returned(ranks)), seconds)

    def force_stacks(self, mute: Iterable[Seen]) -> None:
        """Ask ranks that cannot answer for their stack by signal: the interpreter writes it without the GIL."""
        for seen in mute:
            seen.answers.clear()
            if seen.process.process.is_alive():
                os.kill(seen.process.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.2)

    def _describe(self, seen: Seen) -> str:
        if seen.result is not None:
            return f"rank {seen.rank}: returned"
        if seen.answers:
            return locate(seen.answers[-1], self._place)
        frame = places.learners_frame(places.frames_of_dump(self._stack(seen.rank)), self._cells)
        at = f"; at {places.name_frame(frame)}" if frame else ""
        return f"rank {seen.rank}: holds the interpreter's lock, so it cannot answer{at}"

    def _place(self, answer: RankStatus) -> str:
        frame = places.learners_frame(answer.frames, self._cells)
        return places.name_frame(frame) if frame else ""

    def _stack(self, rank: int) -> str:
        path = self._folder / f"stack-{rank}"
        return places.learners_stack(path.read_text(errors="replace")) if path.exists() else ""


def _returned(ranks: Iterable[Seen]) -> set[int]:
    return {seen.rank for seen in ranks if seen.result is not None}


def _exit_name(code: int | None) -> str:
    if code is None:
        return "its process is gone"
    if code >= 0:
        return f"exit code {code}"
    named = {number.value: number.name for number in signal.Signals}  # real-time signals have no names
    return named.get(-code, f"signal {-code}")
