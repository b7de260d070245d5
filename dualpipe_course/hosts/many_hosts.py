"""Exercises of "A run on many hosts": five numbers, the clock of another host.

Chapter: book/hosts/many-hosts.  Times are in ns.  An answer about a clock is right if its bound holds and is no wider
than that of the quickest answer.
"""

import random
from collections.abc import Callable, Iterator
from math import isfinite
from statistics import median
from typing import Any, TypeAlias

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended, needs_function
from dualpipe_course.wrong import Wrong

NAMES = ("RANK", "offset in us", "its bound in us", "us that tell which was first", "seconds of drift")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        11: "ranks are numbered host by host, so that three whole hosts come before: 3 * 4",
        15: "local ranks count from 0, as hosts do",
        10: "hosts count from 0: before host 3 there are three, with 4 ranks each",
        5: "a number of its own in the whole run: the hosts before have ranks as well",
    },
    {
        -4_050: "the other clock is ahead, and the offset is what it shows more than mine",
        4_200: "the other clock was read at some moment after 5,000; half way is the best guess",
        3_900: "the other clock was read before the answer arrived; half way is the best guess",
    },
    {
        300: "s was read between t0 and t1, and the guess is half way: the error is at most half of it",
        75: "half of 300 us, not a quarter",
    },
    {
        150: "the time of the other event has an error too",
        90: "the time of the other event has an error too",
        120: "both may be wrong in opposite directions at once",
        60: "both may be wrong, and in opposite directions: the bounds add up",
        480: "each bound counts once: it is the largest error to either side",
    },
    {
        20: "20 us are added in each second; how many seconds make 1,000 us?",
        50_000: "20 millionths of a second are 20 us, not 20 ns",
        100: "two clocks differ by 20 us per second in all, not each of them",
    },
)

Answers: TypeAlias = list[tuple[int, int, int]]
Reading: TypeAlias = tuple[int, int, int]  # time, offset, bound
US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000


def _pair(value: Any, where: str) -> tuple[float, float]:
    found = plain(value)
    if not isinstance(found, list) or len(found) != 2 or any(type(x) not in (int, float) for x in found):
        raise Wrong(f"{where}: return two numbers, the second one the bound, got {value!r:.80}")
    if not all(isfinite(x) for x in found):
        raise Wrong(f"{where}: return finite numbers, got {value!r:.80}")
    return found[0], found[1]


def _judge_reading(answers: Answers, offset: int, outcome: tuple[bool, Any]) -> None:
    shown = ", ".join(map(str, answers[:3])) + (", ..." if len(answers) > 3 else "")
    where = f"{len(answers)} answer(s): {shown}"
    if not outcome[0]:
        raise Wrong(ended(where, outcome[1]))
    found, bound = _pair(outcome[1], where)
    least = min(t1 - t0 for t0, _, t1 in answers) / 2
    why = next((words for words, value in _slips(answers) if abs(value - found) < 1), "")
    if abs(found - offset) > bound + 1:
        raise Wrong(
            f"{where}: {found:,.1f} within {bound:,.1f} ns, but the other clock was "
            f"{abs(offset):,} ns {'behind' if offset < 0 else 'ahead'}"
            + (f"; {why}" if why else "; the way there and the way back may take unequal times")
        )
    if bound > least + 1:
        raise Wrong(
            f"{where}: a bound of {bound:,.1f} ns, expected at most {least:,.1f}; "
            + (why or "the quickest answer has the smallest bound, half of its time")
        )


def _slips(answers: Answers) -> Iterator[tuple[str, float]]:
    """What typical mistakes return as the offset."""
    offsets = [s - (t0 + t1) / 2 for t0, s, t1 in answers]
    best = min(range(len(answers)), key=lambda i: answers[i][2] - answers[i][0])
    worst = max(range(len(answers)), key=lambda i: answers[i][2] - answers[i][0])
    t0, s, t1 = answers[best]
    yield "this has the opposite sign: the offset is what the other clock shows more", -offsets[best]
    yield "the clock was read between t0 and t1: take the middle", s - t0
    yield "the clock was read between t0 and t1: take the middle", s - t1
    if len(answers) > 1:
        yield (
            "this is the mean of all answers; slow answers are far off, use the quickest one",
            sum(offsets) / len(offsets),
        )
        yield "this is the median of all answers; unequal ways shift all of them, use the quickest one", median(offsets)
        if best != worst:
            yield "this is the slowest answer; the quickest one has the smallest bound", offsets[worst]
        if best != len(answers) - 1:
            yield "this is the last answer; the quickest one has the smallest bound", offsets[-1]
        if best != 0:
            yield "this is the first answer; the quickest one has the smallest bound", offsets[0]


def _judge_time(time: int, first: Reading, second: Reading, true: int, outcome: tuple[bool, Any]) -> None:
    where = f"my time {time:,}, readings {first} and {second}"
    if not outcome[0]:
        raise Wrong(ended(where, outcome[1]))
    found, bound = _pair(outcome[1], where)
    largest = max(first[2], second[2])
    if abs(found - true) > bound + 2:  # readings are whole ns, two of them
        offset = first[1] + (second[1] - first[1]) * (time - first[0]) / (second[0] - first[0])
        slips = {
            "the line is right, but a reading may be wrong by the larger bound": time + offset,
            "this is the offset, not the time of the other clock": offset,
            "the offset is what the other clock shows more: add it": time - offset,
            "this is the first offset alone, and the clocks drift": time + first[1],
            "this is the second offset alone, and the clocks drift": time + second[1],
            "this is the mean of both offsets, and the clocks drift": time + (first[1] + second[1]) / 2,
        }
        why = next((words for words, value in slips.items() if abs(value - found) <= 1), "")
        why = why or "between the readings the offset is a straight line"
        raise Wrong(f"{where}: {found:,.1f} within {bound:,.1f} ns, but the other clock showed {true:,}; {why}")
    if bound > largest + 1:
        raise Wrong(
            f"{where}: a bound of {bound:,.1f} ns; the larger of both bounds, {largest:,}, holds along the line"
        )


def _exchanges() -> Iterator[tuple[Answers, int]]:
    """Answers, and the true offset; the ways take unequal times, up to all of it one way."""
    yield [(1_000, 5_400, 1_800)], 4_000
    yield [(1_000, 5_000, 1_800)], 4_000  # no time at all on the way there
    yield [(2_000, 1_500, 2_900), (5_000, 4_100, 5_200), (8_000, 7_300, 9_400)], -1_000
    yield [(100, 1_180, 180), (300, 1_300, 380)], 1_000  # two equally quick answers, each at its bound
    draw = random.Random(1989)  # noqa: S311 - not for secrets
    for number in range(60):
        offset = draw.choice([-1, 1]) * draw.randrange(10 ** draw.randrange(4, 14))
        now, answers = 10**14 + draw.randrange(10**13), []
        bias = draw.choice([0, 0.1, 0.5, 0.9, 1])  # the share of the way there
        for _ in range(draw.choice([1, 2, 5, 20])):
            took = 2 * draw.randrange(20 * US, 200 * US) + 2 * (draw.random() < 0.3) * draw.randrange(50 * MS)
            share = bias if number % 2 else min(1.0, max(0.0, bias + draw.uniform(-0.5, 0.5)))
            answers.append((now, now + round(share * took) + offset, now + took))
            now += took + draw.randrange(MS)
        yield answers, offset


def _drifts() -> Iterator[tuple[int, Reading, Reading, int]]:
    """A time, two readings of a clock that drifts, and the true time of the other clock."""
    yield 2_000_000, (1_000_000, 500, 10), (3_000_000, 540, 10), 2_000_520
    yield 1_500_000, (1_000_000, -800, 10), (3_000_000, -400, 10), 1_499_300
    draw = random.Random(7)  # noqa: S311 - not for secrets
    for _ in range(60):
        start = 10**14 + draw.randrange(10**13)
        length = draw.randrange(SECOND, 1_000 * SECOND)
        offset, rate = draw.randrange(-(10**11), 10**11), draw.uniform(-50e-6, 50e-6)
        bounds = [draw.randrange(20 * US, 400 * US) for _ in range(2)]
        errors = [round(draw.choice([-1, -0.5, 0, 0.5, 1]) * bound) for bound in bounds]
        times = (start, start + length)
        first, second = (
            (t, offset + round(rate * (t - start)) + e, b) for t, e, b in zip(times, errors, bounds, strict=True)
        )
        time = start + round(draw.choice([0, 0.01, 0.3, 0.5, 0.9, 1]) * length)
        yield time, first, second, time + offset + round(rate * (time - start))


def _judge_clock(read_clock: Callable[..., Any], on_their_clock: Callable[..., Any]) -> str:
    for fn in (read_clock, on_their_clock):
        needs_function(fn)
    asked = list(_exchanges())
    outcomes = call_each(read_clock, [(list(answers),) for answers, _ in asked])
    for (answers, offset), outcome in zip(asked, outcomes, strict=True):
        _judge_reading(answers, offset, outcome)
    times = list(_drifts())
    outcomes = call_each(on_their_clock, [case[:3] for case in times])
    for case, outcome in zip(times, outcomes, strict=True):
        _judge_time(*case, outcome)
    return f"the bounds hold in {len(asked)} readings and for {len(times)} times, also where all travel was one way"


numbers = Predict(
    "many_hosts-1",
    "Ranks and clocks",
    NAMES,
    lambda n, back, says, other, drift: (
        3 * n + 2,
        says - (5000 + back) / 2,
        (back - 5000) / 2,
        (back - 5000) / 2 + other,
        1000 / drift,
    ),
    "starts {n} ranks",
    "arrives at {back:,} us; the answer says {says:,} us",
    "within {other} us",
    "by {drift} millionths",
    minutes=8,
    points=2,
    hints=(
        "Host 3 is the fourth one. How many ranks do the hosts before it have?",
        "The page has the formula of the offset and of its bound.",
        "Two times with an error each: how far apart can they seem if both events were at the same moment?",
    ),
    slips=_SLIPS,
    n=(4, 8, 6),
    back=(5300, 5200, 5400),
    says=(9200, 8900, 9600),
    other=(90, 60, 110),
    drift=(20, 10, 25, 40),
    called={"n": "ranks", "back": "arrives at", "says": "the answer says", "other": "within", "drift": "drift"},
)

clock = Implement(
    "many_hosts-2",
    "The clock of another host",
    "Write `read_clock(answers)` and `on_their_clock(time, first, second)`, each with a bound that holds.",
    judge=_judge_clock,
    minutes=20,
    points=3,
    hints=(
        "Each answer has an offset and a bound. min(answers, key=...) finds the one with the smallest bound.",
        "At the first reading the offset is the first one, at the second the second. How far along is `time`?",
        "offset = first + (second - first) * (time - time of the first) / (time between both readings)",
    ),
)
