"""Errors of a launch: the rank, the line of the cell and the cause.

Elsewhere: torch raises `ProcessRaisedException` with the remote traceback, and hangs in a deadlock.
"""

from dataclasses import dataclass

MAX_CAUSE, MAX_TRACEBACK = 2_000, 20_000  # characters of a message; the failure itself has them all


def shortened(text: str, limit: int) -> str:
    """Return a text with its middle left out if it is longer than the limit, and say how much that is.

    >>> shortened("a" * 30 + "z" * 30, 20)
    'aaaaaaaaaa [... 40 of 60 characters left out; `RankError.failures` has them ...] zzzzzzzzzz'
    """
    if len(text) <= limit:
        return text
    half, out = limit // 2, f"{len(text) - limit // 2 * 2:,} of {len(text):,} characters left out"
    return f"{text[:half]} [... {out}; `RankError.failures` has them ...] {text[-half:]}"


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
        at = f"; at {shortened(self.where, MAX_CAUSE)}" if self.where else ""
        return f"rank {self.rank}: {shortened(self.cause, MAX_CAUSE)}{at}"


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
        lines = [f"rank {first.rank} of {self.world_size} {shortened(first.cause, MAX_CAUSE)}"]
        if first.where:
            lines.append(f"  at {shortened(first.where, MAX_CAUSE)}")
        lines += [f"  {failure}" for failure in others]
        lines += [f"  {note}" for note in self.notes]
        if first.traceback:
            lines += ["", f"What rank {first.rank} reported:", shortened(first.traceback.rstrip(), MAX_TRACEBACK)]
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
