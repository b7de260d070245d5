"""The trace: spans and messages of each rank with their times, and the timeline of all ranks.

Chapter: book/start/time.  In: spans, sends and receives of every rank, in nanoseconds.  Out: a `Timeline`.
Sends and receives are matched by sender, receiver, group and tag, in the order of the calls (the order of delivery).
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from dualpipe_lab.launch.clock import ClockName
from dualpipe_lab.launch.record.operation import Operation
from dualpipe_lab.timeline import COMMUNICATION, Message, Span, Timeline
from dualpipe_lab.timeline.data import Source
from dualpipe_lab.timeline.spans import COLLECTIVE

MAX_EVENTS = 200_000  # per rank and kind: a runaway loop must not fill the memory
Event = TypeVar("Event")


class Sent(NamedTuple):
    """A message that left: its receiver and stream, when it was handed over and when it left, what it is."""

    peer: int
    stream: int
    time_ns: int
    left_ns: int | None
    num_bytes: int
    label: str


class Received(NamedTuple):
    """A message that arrived: its sender and stream, its number among those of this channel, and when."""

    peer: int
    stream: int
    sequence: int
    time_ns: int
    num_bytes: int


@dataclass
class RankTrace:
    """Spans, collectives and messages of one rank; its times are off those of rank 0 by at most `error_ns`.

    It is partial where events beyond `MAX_EVENTS` are missing: a message that it does not tell of may have arrived.
    """

    rank: int
    spans: list[Span] = field(default_factory=list)
    collectives: list[Span] = field(default_factory=list)  # from start to end, also while the rank computes
    sent: list[Sent] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    forgotten: Counter[tuple[int, int]] = field(default_factory=Counter)  # sends by (peer, stream)
    error_ns: int = 0
    is_partial: bool = False
    _unrecorded: Counter[tuple[int, int]] = field(default_factory=Counter)  # sends since `forget` beyond MAX_EVENTS

    def forget(self) -> None:
        """Drop all events until now; what is recorded later is matched as if they were still here.

        Every rank forgets at one point of the program, between the same messages.
        """
        self.forgotten.update((event.peer, event.stream) for event in self.sent)
        self.forgotten.update(self._unrecorded)
        self._unrecorded.clear()
        self.is_partial = False
        del self.spans[:], self.collectives[:], self.sent[:], self.received[:]

    def add(self, span: Span) -> None:
        """Record a span."""
        self._append(self.spans, span)

    def collective(self, operation: Operation, end: int) -> None:
        """Record a completed collective, unless it took no time."""
        start = operation.issued_ns if operation.left_ns is None else operation.left_ns
        if end > start:
            span = Span(self.rank, start, end, COLLECTIVE, label=operation.name, stream=COMMUNICATION)
            self._append(self.collectives, span)

    def send(self, operation: Operation, peer: int) -> None:
        """Record a sent message."""
        left_ns, size = operation.left_ns, operation.tensor_bytes
        self._append(self.sent, Sent(peer, operation.stream, operation.issued_ns, left_ns, size, operation.label))

    def receive(self, operation: Operation, peer: int, time_ns: int) -> None:
        """Record a received message."""
        number, size = operation.sequence, operation.tensor_bytes
        self._append(self.received, Received(peer, operation.stream, number, time_ns, size))

    def move(self, moved: Callable[[int], int]) -> None:
        """Put every time of the trace on another clock."""
        for spans in (self.spans, self.collectives):
            spans[:] = [span._replace(start=moved(int(span.start)), end=moved(int(span.end))) for span in spans]
        self.sent[:] = [
            sent._replace(time_ns=moved(sent.time_ns), left_ns=None if sent.left_ns is None else moved(sent.left_ns))
            for sent in self.sent
        ]
        self.received[:] = [one._replace(time_ns=moved(one.time_ns)) for one in self.received]

    def _append(self, events: list[Event], event: Event) -> None:
        """Keep an event, unless there are too many; sends are counted on, so that later ones keep their numbers."""
        if len(events) < MAX_EVENTS:
            events.append(event)
            return
        self.is_partial = True
        if isinstance(event, Sent):
            self._unrecorded[event.peer, event.stream] += 1


@dataclass
class Matching:
    """Result of matching sends with receives.

    Attributes:
        messages: matched messages, for the timeline.
        lost: one line for each message that was sent through `comm` and never received.
        misfits: by receiving rank, a message whose size differs from that of its tensor.
        early_ns: the most by which a message came before it was sent, beyond the bounds of the two clocks.
    """

    messages: list[Message] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    misfits: dict[int, str] = field(default_factory=dict)
    early_ns: int = 0


def match(traces: list[RankTrace]) -> Matching:
    """Match the nth send of a channel with its nth receive, whenever that was waited for.

    A rank may have several traces, of one stretch after the other.
    Clocks that differ by less than their bounds may tell that a message came before it was sent; it came at once then.
    """
    arrivals = {
        (event.peer, trace.rank, event.stream, event.sequence): event for trace in traces for event in trace.received
    }
    num_sent: defaultdict[tuple[int, int, int], int] = defaultdict(int)
    partial = {trace.rank for trace in traces if trace.is_partial}
    errors = {trace.rank: trace.error_ns for trace in traces}
    found = Matching()
    for trace in traces:
        num_sent.update({(trace.rank, *channel): number for channel, number in trace.forgotten.items()})
        for sent in trace.sent:
            channel = trace.rank, sent.peer, sent.stream
            event = arrivals.get((*channel, num_sent[channel]))
            num_sent[channel] += 1
            if event is None:
                what = sent.label or f"{sent.num_bytes} bytes"
                if sent.peer not in partial:
                    found.lost.append(f"rank {trace.rank} sent {what} to rank {sent.peer}")
                continue
            known = errors[trace.rank] + errors[sent.peer]
            arrived = max(event.time_ns, sent.time_ns) if known else event.time_ns
            found.early_ns = max(found.early_ns, arrived - event.time_ns - known)
            found.messages.append(
                Message(trace.rank, sent.peer, sent.time_ns, arrived, sent.label, sent.num_bytes, sent.left_ns)
            )
            if event.num_bytes != sent.num_bytes:
                found.misfits[sent.peer] = (
                    f"received {sent.num_bytes} bytes from rank {trace.rank} into a tensor of {event.num_bytes}"
                )
    return found


def clock_note(traces: list[RankTrace]) -> str:
    """Return the note behind a timeline's name: how far apart two clocks may be; empty for one clock.

    >>> clock_note([RankTrace(0), RankTrace(1, error_ns=31_000), RankTrace(2, error_ns=4_500)])
    ', clocks within 36 us'
    """
    most = sum(sorted(trace.error_ns for trace in traces)[-2:])
    return f", clocks within {-(-most // 1_000)} us" if most else ""


def to_timeline(traces: list[RankTrace], messages: list[Message], clock: ClockName, name: str) -> Timeline:
    """Build the timeline of all ranks."""
    source: Source = "virtual" if clock == "virtual" else "measured"
    return Timeline(name + clock_note(traces), [trace.spans for trace in traces], messages, source=source, unit="ns")
