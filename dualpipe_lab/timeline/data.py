"""`TimelineData`: the spans and messages of a run, and the numbers that follow from them.

Chapter: book/start/time.  In: spans per rank and messages.  Out: makespan, bubble, live activations, critical path.
Busy and idle times are those of the stream "work"; a rank whose communication alone is under way is idle.

  bubble_time(rank)   makespan - busy_time(rank)
  bubble_fraction     sum of bubble times / (num_ranks * makespan)    idle over makespan, not over useful work
  local_bubble(rank)  last end - first start - busy_time(rank)        the zero-bubble papers' bubble
  live activations    from the start of F to the end of B, or of W where the backward is split: W still needs them
  pending W           from the end of I to the end of W; a full backward B leaves none
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any, Literal, TypeAlias

from dualpipe_lab.timeline.spans import WAIT, WORK, Message, Span, Time, feeds

Source: TypeAlias = Literal["simulated", "virtual", "measured"]
Unit: TypeAlias = Literal["ticks", "ns"]


class TimelineData:
    """Spans by rank, messages, and the numbers that follow from them; `Timeline` adds the printed and drawn forms.

    Attributes:
        spans_by_rank: for each rank its spans on all streams, in the order of their starts.
        messages: all messages of the run.
        source, unit: where the times come from, and what they count.
        costs: the costs of a simulation (`Cost.to_dict`), or None.
    """

    def __init__(
        self,
        name: str,
        spans_by_rank: Iterable[Iterable[Span]],
        messages: Iterable[Message] = (),
        source: Source = "simulated",
        unit: Unit = "ticks",
        costs: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.spans_by_rank = tuple(tuple(sorted(spans, key=itemgetter(1))) for spans in spans_by_rank)
        self.messages = tuple(messages)
        self.source: Source = source
        self.unit: Unit = unit
        self.costs = costs

    @property
    def num_ranks(self) -> int:
        """The number of ranks, idle ranks included."""
        return len(self.spans_by_rank)

    @cached_property
    def makespan(self) -> Time:
        """The time from 0 to the end of the last span."""
        return max((span.end for spans in self.spans_by_rank for span in spans), default=0)

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The streams of the timeline: "work", then the others in the order in which they first occur."""
        return tuple(dict.fromkeys([WORK, *(span.stream for spans in self.spans_by_rank for span in spans)]))

    def stream(self, rank: int, name: str = WORK) -> tuple[Span, ...]:
        """Return the spans of one stream of a rank, in the order of their starts."""
        spans = self.spans_by_rank[rank]
        return spans if self.streams == (name,) else tuple(span for span in spans if span.stream == name)

    @cached_property
    def _busy(self) -> tuple[Time, ...]:
        work = (self.stream(rank) for rank in range(self.num_ranks))
        return tuple(_covered(span for span in spans if span.kind != WAIT) for spans in work)

    def busy_time(self, rank: int) -> Time:
        """Return the busy time of a rank; time covered by several spans counts once."""
        return self._busy[rank]

    def bubble_time(self, rank: int) -> Time:
        """Return the idle time of a rank between time 0 and the makespan."""
        return self.makespan - self.busy_time(rank)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time, 0 to 1: idle / (num_ranks * makespan)."""
        total = self.num_ranks * self.makespan
        return float(Fraction(total - sum(self._busy)) / total) if total else 0.0

    def window(self, rank: int) -> tuple[Time, Time]:
        """Return the start of a rank's first busy span and the end of its last; (0, 0) for a rank without any."""
        work = [span for span in self.stream(rank) if span.kind != WAIT]
        return (work[0].start, max(span.end for span in work)) if work else (0, 0)

    def local_bubble(self, rank: int) -> Time:
        """Return the idle time inside a rank's window, the bubble of the zero-bubble papers.

        `bubble_time` also includes the wait for the first input and the wait for the last rank to end.  Only a step
        without a barrier can fill these two (see `dualpipe_lab.pp.repeat`).
        """
        first, last = self.window(rank)
        return last - first - self.busy_time(rank)

    def live_activations(self, rank: int) -> list[tuple[Time, int]]:
        """Return the number of live activations as a step function [(time, count)], starting at time 0.

        The activation of one stage and microbatch is live from the start of its F to the end of its B.  Where the
        backward is split, it is live to the end of its W, which reads it.  A count is valid until the next entry.
        """
        return _step_function(self.stream(rank), _ACTIVATIONS)

    def peak_activations(self, rank: int) -> int:
        """Return the largest number of activations that are live on a rank at one time."""
        return _peak(self.stream(rank), _ACTIVATIONS)

    def pending_weight_grads(self, rank: int) -> list[tuple[Time, int]]:
        """Return the number of pending weight gradients, [(time, count)]: I has ended, W has not.

        Each keeps the input and the output gradient of its microbatch.  A full backward leaves none.
        """
        return _step_function(self.stream(rank), _PENDING_WEIGHT_GRADS)

    def peak_pending_weight_grads(self, rank: int) -> int:
        """Return the largest number of weight gradients that are pending on a rank at one time."""
        return _peak(self.stream(rank), _PENDING_WEIGHT_GRADS)

    def critical_path(self) -> list[Span]:
        """Return the spans of one critical path, in order of time.

        Each span starts when the previous one ends, or when its message arrives.  Shortening a span outside the path
        does not shorten the run.
        """
        return _critical_path(self.spans_by_rank, self.messages)


def _covered(spans: Iterable[Span]) -> Time:
    total: Time = 0
    reached: Time = 0
    for span in spans:  # in order of their starts
        if span.end > reached:
            total += span.end - max(span.start, reached)
            reached = span.end
    return total


Changes: TypeAlias = list[tuple[Time, int]]  # time, +1 or -1
_ACTIVATIONS = ("F", True, "BW")  # what raises a count, whether at its start, and what lowers it at its end
_PENDING_WEIGHT_GRADS = ("I", False, "W")


def _step_function(spans: Sequence[Span], counted: tuple[str, bool, str]) -> list[tuple[Time, int]]:
    before, changes = _changes(spans, counted)
    times = [0, *(time for time, _ in changes)]
    totals = accumulate((delta for _, delta in changes), initial=before)
    counts = list(dict(zip(times, totals, strict=True)).items())  # the last change at a time decides
    return [entry for i, entry in enumerate(counts) if i == 0 or entry[1] != counts[i - 1][1]]


def _peak(spans: Sequence[Span], counted: tuple[str, bool, str]) -> int:
    """Return the largest count, counts of zero duration included."""
    before, changes = _changes(spans, counted)
    return max(accumulate((delta for _, delta in changes), initial=before))


def _changes(spans: Sequence[Span], counted: tuple[str, bool, str]) -> tuple[int, Changes]:
    """Return the changes of a count, and how many were open at time 0: a stretch of a longer run has such ends."""
    opens, at_start, closes = counted
    changes: list[tuple[Time, int, tuple[int, int]]] = []
    for span in spans:
        actions = span.actions
        at = span.start if at_start else span.end
        changes += [(at, 1, (stage, m)) for stage, kind, m in actions if kind == opens]
        changes += [(span.end, -1, (stage, m)) for stage, kind, m in actions if kind in closes]
    # Stable: where one span ends and the next begins, the activation is freed before the next one is made.
    changes.sort(key=itemgetter(0))
    open_now: defaultdict[tuple[int, int], int] = defaultdict(int)
    before = 0
    for _, delta, key in changes:
        if open_now[key] + delta < 0:
            before += 1
        else:
            open_now[key] += delta
    return before, [(time, delta) for time, delta, _ in changes]


# The critical path

SpanIndex: TypeAlias = tuple[int, int]  # rank, position among the rank's spans

_ARRIVED = attrgetter("arrived")
_START = attrgetter("start")


def _critical_path(spans_by_rank: Sequence[Sequence[Span]], messages: Sequence[Message]) -> list[Span]:
    """Walk back from the last end to the event that determined each start.

    The event is the previous span on the same rank, or the message that the span waited for, whichever ended later.  A
    message that queued for its link waited for the previous message on that link.  On a rank with several streams the
    previous span is the one that ended last before the start, and of its own stream where two ended together.
    """
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
