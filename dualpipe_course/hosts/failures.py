"""The exercise of "Failures": a watchdog without clocks.

Chapter: book/hosts/failures.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from dualpipe_course.declared import Repair
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

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
