"""The critical path of a timeline: walk back from the last end to the event that determined each start.

In: spans by rank, messages.  Out: the spans of one critical path.
The event is the previous span on the same rank, or the message that the span waited for, whichever ended later.  A
message that queued for its link waited for the previous message on that link.  On a rank with several streams the
previous span is the one that ended last before the start, and of its own stream where two ended together.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

from dualpipe_lab.timeline.spans import WAIT, WORK, Message, Span, Time, feeds

SpanIndex: TypeAlias = tuple[int, int]  # rank, position among the rank's spans

_ARRIVED = attrgetter("arrived")
_START = attrgetter("start")


def critical_path(spans_by_rank: Sequence[Sequence[Span]], messages: Sequence[Message]) -> list[Span]:
    """Return the spans of one critical path in order of time."""
    work = [[span for span in spans if span.kind != WAIT] for spans in spans_by_rank]
    walk = _Walk(work, messages)
    last = [(work[r][i].end, -r, work[r][i].stream == WORK, i) for r, i in map(walk.last, range(len(work))) if i >= 0]
    if not last:
        return []
    _, rank, _, position = max(last)
    index: SpanIndex | None = (-rank, position)
    found = []
    while index is not None:
        found.append(work[index[0]][index[1]])
        index = walk.before(*index)
    return found[::-1]


class _Walk:
    def __init__(self, work: Sequence[Sequence[Span]], messages: Sequence[Message]) -> None:
        self.work = work
        # by rank and stream: (ends, positions) of its spans
        self.streams: list[dict[str, tuple[list[Time], list[int]]]] = [{} for _ in work]
        for streams, spans in zip(self.streams, work, strict=True):
            for position, span in enumerate(spans):
                ends, positions = streams.setdefault(span.stream, ([], []))
                ends.append(span.end)
                positions.append(position)
        self.inbox: defaultdict[int, list[Message]] = defaultdict(list)
        self.link: defaultdict[SpanIndex, list[Message]] = defaultdict(list)
        self.by_label: dict[tuple[int, str], Message] = {}
        for message in sorted(messages, key=_ARRIVED):
            self.inbox[message.dst].append(message)
            self.link[message.src, message.dst].append(message)
            self.by_label[message.dst, message.label] = message
        self.maker = {
            (rank, f"{stage}{kind}{microbatch}"): (rank, position)
            for rank, spans in enumerate(work)
            for position, span in enumerate(spans)
            for stage, kind, microbatch in span.actions
        }

    def before(self, rank: int, position: int) -> SpanIndex | None:
        """Return the index of the span that determined the start of this one; None for the first."""
        message, previous = self._awaited(self.work[rank][position]), self._previous(rank, position)
        if message is not None and (previous < 0 or message.arrived > self.work[rank][previous].end):
            return self._sender(message)
        return (rank, previous) if previous >= 0 else None

    def last(self, rank: int) -> SpanIndex:
        """Return the index of the span of a rank that ends last, one of its work before others; position -1: none."""
        found = [(ends[-1], name == WORK, at[-1]) for name, (ends, at) in self.streams[rank].items()]
        return rank, max(found)[2] if found else -1

    def _previous(self, rank: int, position: int) -> int:
        """Return the position of the span before this one, on its stream or on another of its rank; -1: none."""
        span, streams = self.work[rank][position], self.streams[rank]
        if len(streams) == 1:
            return position - 1
        positions = streams[span.stream][1]
        own = positions[bisect_left(positions, position) - 1] if positions[0] < position else -1
        found = [(self.work[rank][own].end, True, own)] if own >= 0 else []
        for name, (ends, places) in streams.items():
            index = bisect_right(ends, span.start) - 1
            if name != span.stream and index >= 0 and places[index] < position:  # so the walk ends
                found.append((ends[index], False, places[index]))
        return max(found)[2] if found else -1

    def _awaited(self, span: Span) -> Message | None:
        if span.actions:
            candidates = [self.by_label.get((span.rank, label)) for action in span.actions for label in feeds(action)]
            return max((message for message in candidates if message is not None), key=_ARRIVED, default=None)
        inbox = self.inbox[span.rank]  # not pipeline work: the last message that was there when it started
        index = bisect_right(inbox, span.start, key=_ARRIVED) - 1
        return inbox[index] if index >= 0 else None

    def _sender(self, message: Message) -> SpanIndex | None:
        queue = self.link[message.src, message.dst]
        index = bisect_left(queue, message.arrived, key=_ARRIVED)
        while message.left is not None and index > 0:  # it queued behind the message before it
            index -= 1
            message = queue[index]
        if made := self.maker.get((message.src, message.label)):
            return made
        position = bisect_left(self.work[message.src], message.sent, key=_START) - 1
        return (message.src, position) if position >= 0 else None
