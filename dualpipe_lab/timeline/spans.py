"""Spans and messages: the two kinds of facts a timeline consists of."""

from fractions import Fraction
from typing import NamedTuple, TypeAlias

Time: TypeAlias = int | Fraction
Part: TypeAlias = tuple[int, str, int]  # (stage, kind, microbatch): an Action is one

PIPELINE_KINDS = ("F", "B", "I", "W", "F&B")
WAIT = "wait"


class Span(NamedTuple):
    """What one rank did from `start` to `end`.

    `kind` is F, B, I, W or F&B for pipeline work, and a word such as "compute", "collective" or "wait" otherwise.
    An overlapped pair is one span of kind F&B: `stage` and `microbatch` are the forward's, `pair` holds both actions.
    """

    rank: int
    start: Time
    end: Time
    kind: str
    stage: int | None = None
    microbatch: int | None = None
    label: str = ""
    pair: tuple[Part, Part] | None = None

    @property
    def duration(self) -> Time:
        """How long it took."""
        return self.end - self.start

    @property
    def parts(self) -> tuple[Part, ...]:
        """The pipeline actions inside: two for a pair, one for F, B, I and W, none for anything else."""
        if self.pair is not None:
            return self.pair
        if self.kind in PIPELINE_KINDS and self.stage is not None and self.microbatch is not None:
            return ((self.stage, self.kind, self.microbatch),)
        return ()


class Message(NamedTuple):
    """One message from rank `src` to rank `dst`.

    `sent`: when the sender handed it over.  `left`: when its link was free for it (None: at once).  `arrived`: when the
    receiver could use it.  For pipeline work `label` is the action whose result it carries, such as "0F3".
    """

    src: int
    dst: int
    sent: Time
    arrived: Time
    label: str = ""
    num_bytes: int | None = None
    left: Time | None = None


def feeds(part: Part) -> tuple[str, ...]:
    """Return the labels of the actions whose result this one takes: those of the stage before or after it.

    >>> feeds((2, "F", 0)), feeds((2, "I", 0)), feeds((2, "W", 0))
    (('1F0',), ('3B0', '3I0'), ())
    """
    stage, kind, microbatch = part
    if kind == "F":
        return (f"{stage - 1}F{microbatch}",)
    return (f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}") if kind in ("B", "I") else ()
