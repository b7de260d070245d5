"""What a launch raises: which rank, which line of the cell, and why.

Chapter: book/start/ranks-and-messages.  In: what the supervisor learned about each rank.  Out: one readable message.
Elsewhere: torch raises `ProcessRaisedException` with the whole remote traceback, and hangs on a deadlock.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended when it did not return a value.

    Attributes:
        rank: the failing rank.
        cause: one line: `ValueError: bad shape`, `died (SIGKILL)`, `lost its peer: ...`.
        where: `Cell In[3], line 7, in step`, or an empty string when no line is known.
        traceback: the rank's own traceback, or the interpreter's stack at a crash; may be empty.
        exception: the exception object itself when it could travel between processes.
        secondary: True when the rank failed only because another one had gone.
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
    """One or more ranks raised, died or exited.

    Attributes:
        failures: `{rank: RankFailure}`, the ranks that failed on their own before those that lost a peer.
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
    """The ranks made no progress: a deadlock was found, or the time limit passed.

    Attributes:
        seconds: how long the ranks had run.
        report: where each rank was and who waits for whom, one line each.
    """

    def __init__(self, headline: str, report: list[str], seconds: float) -> None:
        self.headline, self.report, self.seconds = headline, report, seconds
        super().__init__("\n".join([headline, *(f"  {line}" for line in report)]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.headline, self.report, self.seconds)


class StartupError(RuntimeError):
    """A rank died before it said hello: the processes themselves cannot be started."""
