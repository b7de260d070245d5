"""Errors of a launch: the rank, the line of the cell and the cause.

Elsewhere: torch raises `ProcessRaisedException` with the remote traceback, and hangs in a deadlock.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankFailure:
    """End of a rank that returned no value.

    Attributes:
        rank: number of the rank.
        cause: one line: `ValueError: bad shape`, `died (SIGKILL)`, `lost its peer: ...`.
        where: `Cell In[3], line 7, in step`; empty if no line is known.
        traceback: traceback of the rank, or the interpreter's stack at a crash; may be empty.
        exception: the exception object; None if it could not be pickled.
        secondary: True if the rank failed only because another rank had ended.
    """

    rank: int
    cause: str
    where: str = ""
    traceback: str = ""
    exception: BaseException | None = None
    secondary: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.cause}" + (f"; at {self.where}" if self.where else "")


class RankError(RuntimeError):
    """One or more ranks raised an exception, died or exited.

    Attributes:
        failures: `{rank: RankFailure}`; ranks that only lost a peer come last.
    """

    def __init__(self, failures: dict[int, RankFailure], world_size: int, notes: list[str] | None = None) -> None:
        ordered = sorted(failures.values(), key=lambda failure: (failure.secondary, failure.rank))
        self.failures = {failure.rank: failure for failure in ordered}
        self.world_size = world_size
        self.notes = notes or []
        super().__init__(self._message(ordered))

    def _message(self, ordered: list[RankFailure]) -> str:
        first, *others = ordered
        lines = [f"rank {first.rank} of {self.world_size} {first.cause}"]
        if first.where:
            lines.append(f"  at {first.where}")
        lines += [f"  {failure}" for failure in others]
        lines += [f"  {note}" for note in self.notes]
        if first.traceback:
            lines += ["", f"What rank {first.rank} reported:", first.traceback.rstrip()]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.failures, self.world_size, self.notes)


class RankTimeout(RuntimeError):  # noqa: N818  the name says what happened
    """The ranks are in a deadlock, or the time limit of the launch passed.

    Attributes:
        seconds: time for which the ranks ran.
        report: one line per rank with its status, then the causes of the deadlock.
    """

    def __init__(self, headline: str, report: list[str], seconds: float) -> None:
        self.headline, self.report, self.seconds = headline, report, seconds
        super().__init__("\n".join([headline, *(f"  {line}" for line in report)]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.headline, self.report, self.seconds)


class StartupError(RuntimeError):
    """A rank process died before its first message; no processes can be started this way."""
