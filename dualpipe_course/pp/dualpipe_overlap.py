"""Exercises of "DualPipe: overlap": a pair with slow all-reduces.

Chapter: book/pp/dualpipe-overlap.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualpipe_course.declared import Predict

if TYPE_CHECKING:
    pass

NAMES = ("one after the other", "forward first", "backward first", "backward alone")
_SLIPS: tuple[dict[int, str], ...] = (
    {54: "that is the work alone; each of the six all-reduces is waited for", 78: "the forward has all-reduces too"},
    {
        54: "that is the work alone; a wait of 8 ms is left at the end, and shorter ones before",
        62: "the forward's 6 ms are shorter than the 8 ms of an all-reduce, so the backward waits in between",
        102: "that is one after the other",
    },
    {
        66: "the forward's all-reduce is the last one now, and it is launched while the backward's is under way",
        62: "the forward's 6 ms are shorter than the 8 ms of an all-reduce, so the backward waits in between",
        54: "that is the work alone",
    },
    {
        60: "that is with W before the launch",
        36: "W is shorter than the all-reduce: 2 ms of each are left to wait for",
        54: "W hides 6 of the 8 ms",
    },
)


def _three_layers(f: int, b: int, travel: int, i: int) -> Sequence[int] | None:
    def in_turn(*pieces: int) -> int:
        free = link = 0
        there = [0, 0]  # when the travel of each half is over
        for _ in range(3):
            for half, ms in enumerate(pieces):
                free = max(free, there[half]) + ms
                there[half] = link = max(link, free) + travel
        return max(there)

    return 3 * (f + b + 2 * travel), in_turn(f, b), in_turn(b, f), 3 * (i + max(travel, b - i))


numbers = Predict(
    "dualpipe_overlap-1",
    "Slow all-reduces",
    NAMES,
    _three_layers,
    "computes {f} ms in the forward and {b} ms in the backward, and an all-reduce takes {travel} ms",
    "I takes {i} of its {b} ms",
    minutes=10,
    points=2,
    hints=(
        "Write two rows for the pair: what the rank computes, and what travels. A piece begins when the travel of its "
        "own half is over.",
        "Forward first: F from 0 to 6, B from 6 to 18, F from 18 to 24, and the second B needs what travels until 26.",
        "Backward first: the forward's travel is launched at 18 and begins at 20, when the backward's is over.",
    ),
    slips=_SLIPS,
    f=(6, 5, 7),
    b=(12, 10, 14),
    travel=(8, 9, 10),
    i=lambda b, **_: b // 2,
    called={"f": "forward", "b": "backward", "travel": "all-reduce", "i": "I"},
)
