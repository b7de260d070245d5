"""The critical path of a timeline: walk back from the last end to the event that determined each start.

In: spans by rank, messages.  Out: the spans of one critical path.
The event is the previous span on the same rank, or the message that the span waited for, whichever ended later.  A
message that queued for its link waited for the previous message on that link.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

from dualpipe_lab.timeline.spans import WAIT, Message, Span, feeds

SpanIndex: TypeAlias = tuple[int, int]  # rank, position among the rank's spans

_ARRIVED = attrgetter("arrived")
_START = attrgetter("start")


def critical_path(spans_by_rank: Sequence[Sequence[Span]], messages: Sequence[Message]) -> list[Span]:
    """Return the spans of one critical path in order of time."""
    work = [[span for span in spans if span.kind != WAIT] for spans in spans_by_rank]
    last = [(spans[-1].end, -rank) for rank, spans in enumerate(work) if spans]
    if not last:
        return []
    walk = _Walk(work, messages)
    rank = -max(last)[1]
    index: SpanIndex | None = (rank, len(work[rank]) - 1)
    found = []
    while index is not None:
        found.append(work[index[0]][index[1]])
        index = walk.before(*index)
    return found[::-1]


class _Walk:
    def __init__(self, work: Sequence[Sequence[Span]], messages: Sequence[Message]) -> None:
        self.work = work
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
        message = self._awaited(self.work[rank][position])
        if message is not None and (position == 0 or message.arrived > self.work[rank][position - 1].end):
            return self._sender(message)
        return (rank, position - 1) if position else None

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
