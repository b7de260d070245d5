"""`StepLog`: what a rank really held and sent in each step, written down to be drawn.

Chapter: book/cp/ring-all-reduce.  In: one log per rank, as an algorithm filled it.  Out: `viz.steplog.Steps`.
An algorithm takes a log or none; it writes after each step what is in its hands, so that the picture shows what
happened and not what should have.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dualpipe_lab.viz.steplog import Cell, Step, Steps


class Moment(NamedTuple):
    """One step of one rank: cells that it sent to `dst` (a position on the ring), and what it holds afterwards."""

    title: str
    dst: int
    sent: list[Cell]
    holds: list[Cell]


class StepLog:
    """The steps of one rank, in order; a launch may return it."""

    def __init__(self) -> None:
        self.start: list[Cell] = []
        self.moments: list[Moment] = []

    def add(self, title: str, dst: int, sent: Sequence[Cell], holds: Sequence[Cell]) -> None:
        """Write down one step."""
        self.moments.append(Moment(title, dst, list(sent), list(holds)))


def drawing(name: str, logs: Sequence[StepLog], note: str = "") -> Steps:
    """Put the logs of all ranks, in the order of the ring, into one drawing.

    >>> first, second = StepLog(), StepLog()
    >>> first.start, second.start = ["a"], ["b"]
    >>> first.add("turn", 1, ["a"], ["a", "b"]); second.add("turn", 0, ["b"], ["b", "a"])
    >>> print(drawing("two", [first, second]))
    two: 2 ranks, 1 step
    1. turn: 0->1 a, 1->0 b
    rank 0: a b
    rank 1: b a

    Raises:
        ValueError: ranks that took another number of steps.
    """
    counts = [len(log.moments) for log in logs]
    if len(set(counts)) != 1:
        raise ValueError(f"{name}: the ranks took {counts} steps; draw logs of one run, one log per rank")
    steps = [
        Step(
            moments[0].title,
            [(rank, moment.dst, cell) for rank, moment in enumerate(moments) for cell in moment.sent],
            [moment.holds for moment in moments],
        )
        for moments in zip(*(log.moments for log in logs), strict=True)
    ]
    return Steps(name, [log.start for log in logs], steps, note)
