"""The streams of a rank beside its work: messages as spans of the stream "communication", and spans in lines.

Chapter: book/ep/one-f-one-b-basic.  In: a timeline.  Out: spans by stream and line, to be drawn below the work.
A message occupies the communication stream of its sender from the time its link is free to its arrival.  Messages to
several ranks overlap; spans that overlap stand in several lines of one stream, each in the first that is free.
"""

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TypeAlias

from dualpipe_lab.timeline.data import TimelineData
from dualpipe_lab.timeline.spans import COMMUNICATION, WORK, Message, Span, Time

Lines: TypeAlias = list[list[Span]]  # lines of one stream; spans of one line do not overlap

MOST_LINES = 4  # of one stream; more that overlap share the last ones
MESSAGE = "message"
ACTION = re.compile(r"(\d+)[FBIW](\d+)")
_START = attrgetter("start")


def message_spans(messages: Iterable[Message], num_ranks: int) -> list[list[Span]]:
    """Return by rank the messages that it sends, as spans; messages that take no time are left out.

    >>> message_spans([Message(0, 1, sent=2, arrived=5, label="0F3", left=3)], num_ranks=2)[0][0][1:7]
    (3, 5, 'message', 0, 3, '0F3')
    """
    rows: list[list[Span]] = [[] for _ in range(num_ranks)]
    for message in messages:
        start = message.sent if message.left is None else message.left
        action = ACTION.fullmatch(message.label)
        stage, microbatch = map(int, action.groups()) if action else (None, None)
        if message.arrived > start:
            place = message.src, start, message.arrived, MESSAGE, stage, microbatch
            rows[message.src].append(Span(*place, message.label or f"to rank {message.dst}", stream=COMMUNICATION))
    return [sorted(row, key=_START) for row in rows]


def lines_of(spans: Iterable[Span]) -> Lines:
    """Divide spans, in the order of their starts, into lines of spans that do not overlap.

    >>> [len(line) for line in lines_of([Span(0, 0, 5, "x"), Span(0, 2, 3, "x"), Span(0, 5, 6, "x")])]
    [2, 1]
    """
    lines: Lines = []
    ends: list[Time] = []
    for span in spans:
        line = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        if line == MOST_LINES:
            line = min(range(MOST_LINES), key=ends.__getitem__)
        if line == len(ends):
            lines.append([])
            ends.append(span.end)
        lines[line].append(span)
        ends[line] = span.end
    return lines


def lanes(timeline: TimelineData, with_messages: bool = False) -> list[dict[str, Lines]]:
    """Return by rank the lines of each stream but "work"; `with_messages` adds messages to the communication."""
    sent = message_spans(timeline.messages, timeline.num_ranks) if with_messages else [[]] * timeline.num_ranks
    names = [name for name in timeline.streams if name != WORK]
    if any(sent) and COMMUNICATION not in names:
        names.append(COMMUNICATION)
    return [
        {name: lines_of(_merged(timeline.stream(rank, name), sent[rank], name)) for name in names}
        for rank in range(timeline.num_ranks)
    ]


def _merged(spans: Sequence[Span], sent: list[Span], name: str) -> list[Span]:
    return sorted([*spans, *sent], key=_START) if name == COMMUNICATION else list(spans)


def heights(ranks: list[dict[str, Lines]]) -> dict[str, int]:
    """Return the number of lines of each stream, the same on all ranks."""
    return {name: max(1, *(len(streams[name]) for streams in ranks)) for name in (ranks[0] if ranks else ())}
