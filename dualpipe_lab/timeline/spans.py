"""Spans and messages, the two records of a timeline.

Chapter: book/start/time.  In: times of one rank's work and of one transfer.  Out: named tuples.
"""

from fractions import Fraction
from typing import NamedTuple, TypeAlias

Time: TypeAlias = int | Fraction
ActionKey: TypeAlias = tuple[int, str, int]  # (stage, kind, microbatch), as an Action

PIPELINE_KINDS = ("F", "B", "I", "W", "F&B")
WAIT, COLLECTIVE = "wait", "collective"  # kinds
WORK, COMMUNICATION = "work", "communication"  # streams; a rank may have more of them


class Span(NamedTuple):
    """One rank's work, or wait, from `start` to `end`.

    `kind` is F, B, I, W or F&B for pipeline work, and otherwise a word such as "compute", "collective" or "wait".
    An overlapped pair is one span of kind F&B: `stage` and `microbatch` are the forward's, `pair` holds both actions.
    `stream` names what runs it.  The streams of a rank run side by side; busy and idle time are those of "work".
    """

    rank: int
    start: Time
    end: Time
    kind: str
    stage: int | None = None
    microbatch: int | None = None
    label: str = ""
    pair: tuple[ActionKey, ActionKey] | None = None
    stream: str = WORK

    @property
    def duration(self) -> Time:
        """The time from `start` to `end`."""
        return self.end - self.start

    @property
    def actions(self) -> tuple[ActionKey, ...]:
        """The pipeline actions of the span: two for a pair, one for F, B, I or W, none for other kinds and streams."""
        if self.pair is not None:
            return self.pair
        if self.kind not in PIPELINE_KINDS or self.stream != WORK:
            return ()
        if self.stage is not None and self.microbatch is not None:
            return ((self.stage, self.kind, self.microbatch),)
        return ()

    @property
    def extra_label(self) -> str:
        """The label where it says more than the action; "" for a pair, and for 2F7 on F of stage 2, microbatch 7."""
        is_action = self.pair is not None or self.label == f"{self.stage}{self.kind}{self.microbatch}"
        return "" if is_action else self.label


class Message(NamedTuple):
    """One message from rank `src` to rank `dst`.

    `sent`: the time at which the sender launched it.  `left`: the time at which its link became free (None: at once).
    `arrived`: the time at which the receiver may use it.  For pipeline work `label` is the action whose result it
    carries, such as "0F3".
    """

    src: int
    dst: int
    sent: Time
    arrived: Time
    label: str = ""
    num_bytes: int | None = None
    left: Time | None = None


def feeds(action: ActionKey) -> tuple[str, ...]:
    """Return the labels of the actions whose result this action reads, on the previous or the next stage."""
    stage, kind, microbatch = action
    if kind == "F":
        return (f"{stage - 1}F{microbatch}",)
    return (f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}") if kind in ("B", "I") else ()
