"""Exercises of "Failures": how often to save, a watchdog without clocks.

Chapter: book/hosts/failures.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from dualpipe_course.declared import Predict, Repair
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

NAMES = ("seconds between two saves", "% of the time lost", "seconds with four times the hosts", "first step", "steps")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        509: "twice the seconds of a save are under the root",
        518_400: "the root is missing",
        12: "that is in minutes",
    },
    {
        5: "both terms count: saving, and what a failure throws away",
        15: "a failure throws away half an interval on average, not a whole one",
        20: "a failure throws away half an interval on average, and a save takes 36 s of 720",
    },
    {
        180: "failures come four times as often, and the interval follows the root of that",
        720: "with four times as many hosts a failure comes four times as often",
        1_440: "with more hosts failures come sooner, so the interval is shorter",
    },
    {
        240: "the save of step 240 holds the weights after that step",
        253: "what was done after the last save is lost with the host",
        254: "what was done after the last save is lost with the host",
        281: "step 280 was never reached",
        1: "the last save is there, and the training goes on from it",
    },
    {
        13: "step 253 was not finished, so it is computed to its end only once",
        40: "only the steps since the last save",
        11: "steps 241 to 252, both of them included",
    },
)

Look: TypeAlias = tuple[float, dict[int, tuple[int, float]]]


class Watch(NamedTuple):
    """The looks of an observer: its clock, and the last beat of each rank, (number, time of that rank's clock)."""

    looks: list[Look]
    ranks: list[int]
    limit: float
    words: str


def silent_ranks(looks: Sequence[Look], ranks: Sequence[int], limit: float) -> list[list[int]]:
    """The ranks that are silent at each look.

    >>> silent_ranks([(0.0, {0: (1, 99.0)}), (5.0, {0: (2, 0.0)}), (9.0, {0: (2, 0.0)})], [0, 1], 3.0)
    [[], [1], [0, 1]]
    """
    seen: dict[int, tuple[int | None, float]] = {}
    found = []
    for now, beats in looks:
        for rank in ranks:
            number = beats[rank][0] if rank in beats else None
            if rank not in seen or seen[rank][0] != number:
                seen[rank] = number, now
        found.append(sorted(rank for rank in ranks if now - seen[rank][1] > limit))
    return found


def _history(case: Watch, now: float, rank: int) -> str:
    """What the observer saw of a rank, up to a look."""
    seen = [(at, beats.get(rank)) for at, beats in case.looks if at <= now][-4:]
    words = [f"at {at:.1f} " + ("no beat" if beat is None else f"beat {beat[0]} of {beat[1]:.1f}") for at, beat in seen]
    return f"rank {rank}: {', '.join(words)}"


class Rank(NamedTuple):
    """A rank that beats every half second: how its clock is wrong, and from when to when it is silent."""

    ahead: float = 0.0  # s
    drift: float = 0.0
    jump: float = 0.0  # s, after 10 s of the run
    silent: tuple[float, float] = (1e9, 1e9)
    restarts: bool = False  # its numbers begin again after the silence


def _watches() -> Iterator[Watch]:
    dies, pauses = (6.2, 1e9), (6.2, 12.1)
    for words, ranks in (
        ("right clocks, rank 1 dies", [Rank(), Rank(silent=dies)]),
        ("the clock of rank 1 is 60 s behind", [Rank(), Rank(ahead=-60)]),
        ("the clock of rank 1 is 60 s ahead, and it dies", [Rank(), Rank(ahead=60, silent=dies)]),
        ("the clock of rank 0 jumps back by 30 s", [Rank(jump=-30), Rank()]),
        ("a dead rank, and a clock that jumps ahead", [Rank(silent=dies), Rank(jump=30)]),
        ("rank 1 is silent for some seconds", [Rank(ahead=5), Rank(ahead=-5, silent=pauses)]),
        ("rank 1 is started again and counts from 1", [Rank(), Rank(silent=pauses, restarts=True)]),
        ("rank 1 never beats", [Rank(ahead=-9), Rank(silent=(-1, 1e9))]),
    ):
        yield _watched(words, ranks, 3.0, [0.6 + 0.7 * i for i in range(28)])
    draw = random.Random(30)  # noqa: S311 - not for secrets
    for number in range(20):
        ranks = []
        for _ in range(draw.randrange(2, 9)):
            start = draw.choice([1e9, draw.uniform(1, 15)])
            silence = (start, start + draw.choice([1.0, 2.0, 6.0, 1e9]))
            wrong = draw.uniform(-100, 100), draw.uniform(-0.2, 0.2), draw.choice([0, 0, -20.0, 20.0])
            ranks.append(Rank(*wrong, silence, draw.random() < 0.3))
        times: list[float] = []
        now = draw.uniform(0, 1000)
        while len(times) < 30:
            now += draw.choice([0.3, 0.7, 0.7, 2.1])
            times.append(now)
        begun = times[0] - 0.1
        watch = _watched(f"run {number}, {len(ranks)} ranks", ranks, 3.05, [time - begun for time in times])
        yield watch._replace(looks=[(time, beats) for time, (_, beats) in zip(times, watch.looks, strict=True)])


def _watched(words: str, ranks: Sequence[Rank], limit: float, times: Sequence[float]) -> Watch:
    """What an observer sees that looks at these times after the beginning."""
    looks: list[Look] = []
    for now in times:
        beats = {}
        for number, rank in enumerate(ranks):
            until, again = rank.silent
            before = int(max(0.0, min(now, until)) / 0.5)
            after = int(max(0.0, now - again) / 0.5)
            count = after if rank.restarts and after else before + after
            at = again + after * 0.5 if after else before * 0.5
            if count:
                jump = rank.jump if at > 10 else 0
                beats[number] = count, at * (1 + rank.drift) + rank.ahead + jump
        looks.append((now, beats))
    return Watch(looks, list(range(len(ranks))), limit, words)


def _judge_watchdog(fn: Callable[..., Any]) -> str:
    cases = list(_watches())
    outcomes = call_each(fn, [(case.looks, case.ranks, case.limit) for case in cases])
    for case, (is_fine, value) in zip(cases, outcomes, strict=True):
        if not is_fine:
            raise Wrong(ended(case.words, value))
        expected = silent_ranks(case.looks, case.ranks, case.limit)
        found = plain([list(x) if isinstance(x, set) else x for x in value] if isinstance(value, list) else value)
        if not isinstance(found, list) or len(found) != len(expected) or any(type(x) is not list for x in found):
            raise Wrong(f"{case.words}: return a list of silent ranks for each of {len(expected)} looks")
        for (now, _), ours, theirs in zip(case.looks, expected, found, strict=True):
            if any(type(rank) is not int for rank in theirs) or sorted(theirs) != ours:
                rank = next((r for r in case.ranks if (r in theirs) != (r in ours)), case.ranks[0])
                raise Wrong(
                    f"{case.words}: at {now:.1f} s, limit {case.limit:g} s: got {theirs}, expected {ours}"
                    f"\n  {_history(case, now, rank)}"
                )
    return f"right for {len(cases)} runs, with clocks that are wrong, jump and drift"


numbers = Predict(
    "failures-1",
    "How often to save",
    NAMES,
    lambda save, every, at: (
        120 * math.sqrt(save),
        5 / 3 * math.sqrt(save),
        60 * math.sqrt(save),
        (at - 1) // every * every + 1,
        (at - 1) % every,
    ),
    "A save takes {save} seconds",
    "a save still takes {save} seconds",
    "after every {every}th step",
    "in the middle of step {at}.",
    minutes=8,
    points=2,
    hints=(
        "The page has the formula of the best interval, and the two terms of the share that is lost.",
        "With four times as many hosts a failure comes four times as often. What does the root make of that?",
        "Which multiple of 40 was the last one that was reached, and which steps were finished after it?",
    ),
    slips=_SLIPS,
    save=(36, 9, 81),
    every=(40, 30, 50, 60),
    at=(253, 218, 274, 287),
    called={"save": "seconds of a save", "every": "steps between saves", "at": "step"},
)


watchdog = Repair(
    "failures-3",
    "A watchdog that trusts clocks",
    "Repair `silent(looks, ranks, limit)`, which compares the clocks of two hosts.",
    judge=_judge_watchdog,
    minutes=12,
    points=2,
    hints=(
        "Whose clock wrote the time of a beat, and whose clock is `now`?",
        "A number that differs from the one at the look before says that the rank lives, whatever time it gives.",
        "Keep for each rank the last number and the `now` at which it was first seen. A rank may never have beaten.",
    ),
)
