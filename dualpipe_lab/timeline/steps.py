"""A part of a run, moved to time 0: so that one measured step can be laid beside its simulation.

In: the spans and messages of a run.  Out: those of each step, or of one stretch of time.
Every action occurs once in a step.  So on each rank a new step begins with the first span that repeats an action, and
a message belongs to the step whose span made it.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from dualpipe_lab.timeline.spans import Message, Part, Span, Time


class Cut(NamedTuple):
    """The spans of a part, by rank, and its messages."""

    spans_by_rank: list[list[Span]]
    messages: list[Message]


def cut_steps(spans_by_rank: Sequence[Sequence[Span]], messages: Sequence[Message]) -> list[Cut]:
    """Return the steps of a run; spans other than pipeline work are left out."""
    rows = [_rows(spans) for spans in spans_by_rank]
    steps = [Cut([], []) for _ in range(max(map(len, rows), default=0))]
    for number, step in enumerate(steps):
        step.spans_by_rank.extend(row[number] if number < len(row) else [] for row in rows)
    made: defaultdict[tuple[int, str], list[tuple[Time, int]]] = defaultdict(list)
    for number, step in enumerate(steps):
        for rank, spans in enumerate(step.spans_by_rank):
            for span in spans:
                for stage, kind, microbatch in span.parts:
                    made[rank, f"{stage}{kind}{microbatch}"].append((span.end, number))
    for message in messages:
        ends = made.get((message.src, message.label), [])
        position = bisect_right(ends, message.sent, key=lambda end: end[0])
        if position:
            steps[ends[position - 1][1]].messages.append(message)
    starts = [min(span.start for spans in step.spans_by_rank for span in spans) for step in steps]
    return [_moved(step, start) for step, start in zip(steps, starts, strict=True)]


def cut_time(spans_by_rank: Sequence[Sequence[Span]], messages: Sequence[Message], start: Time, end: Time) -> Cut:
    """Return what began at `start` or later and before `end`."""
    rows = [[span for span in spans if start <= span.start < end] for spans in spans_by_rank]
    return _moved(Cut(rows, [message for message in messages if start <= message.sent < end]), start)


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    rows: list[list[Span]] = []
    seen: set[Part] = set()
    for span in spans:
        if span.parts:
            if not rows or not seen.isdisjoint(span.parts):
                rows.append([])
                seen = set()
            rows[-1].append(span)
            seen.update(span.parts)
    return rows


def _moved(part: Cut, zero: Time) -> Cut:
    rows = [[s._replace(start=s.start - zero, end=s.end - zero) for s in spans] for spans in part.spans_by_rank]
    return Cut(rows, [_move(message, zero) for message in part.messages])


def _move(message: Message, zero: Time) -> Message:
    left = None if message.left is None else message.left - zero
    return message._replace(sent=message.sent - zero, arrived=message.arrived - zero, left=left)
