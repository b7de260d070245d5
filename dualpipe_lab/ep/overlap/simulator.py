"""The calls of the host thread that execute an order, and the exact simulation of their two streams.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.  In: an `Order`, ticks by kind.  Out: all `Call`s of
one thread, in order; `StreamSpans`: spans of both rows, a makespan.
  issue   as soon as the operation whose result it sends has run: the all-to-all proceeds while the host goes on
  wait    right before the operation that takes its result, no earlier
The comm stream runs in order, so the wait for an all-to-all comes after the waits for those before it.
  start of an operation   max(end of the operation before it in its row, end of the operation whose result it takes)
  makespan                at least max(sum of compute, sum of communication)
All ranks run the same operations at the same time, so one rank is simulated.  Times are whole numbers or fractions.
Elsewhere: `dist.all_to_all_single(..., async_op=True)` and `work.wait()`; on a GPU two streams and events.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dualpipe_lab.ep.overlap.order import InvalidOrder, Op, Order, Ticks
from dualpipe_lab.timeline import COMMUNICATION, WORK, Span, Time, Timeline
from dualpipe_lab.timeline.data import Source, Unit

RUN, ISSUE, WAIT = "run", "issue", "wait"
# the letters of pipeline schedules: F, I, W and the unsplit B
_SPAN_KINDS = {
    f"{part}_{half}": kind for part in "AMSP" for half, kind in zip(("F", "B", "W", "BW"), "FIWB", strict=True)
}


class Call(NamedTuple):
    """One call of the host: run, issue or wait, and the operation."""

    verb: str
    op: Op

    def __str__(self) -> str:
        return f"{self.verb} {self.op}"


def host_calls(order: Order) -> list[Call]:
    """Return the calls that execute an order.

    Raises:
        InvalidOrder: the host would wait for ever; the message names the operation.

    >>> from dualpipe_lab.ep.overlap.order import forward_alone
    >>> ", ".join(map(str, host_calls(forward_alone(1))))
    'run A_F0, issue D_F0, wait D_F0, run M_F0, issue C_F0, wait C_F0'
    """
    return list(_Host(order).calls())


class _Host:
    def __init__(self, order: Order) -> None:
        self.order, self.done = order, set[Op]()  # done: work that has run, all-to-alls that were waited for
        self.issued = self.waited = 0  # numbers of operations of the comm row

    def calls(self) -> Iterator[Call]:
        yield from self.issue()
        for op in self.order.compute:
            for needed in self.missing(op):
                if not needed.is_comm:
                    raise InvalidOrder(f"{self.order.name}: {op} comes before {needed}, whose result it takes")
                yield from self.wait(self.order.comm.index(needed) + 1, str(op))
            yield Call(RUN, op)
            self.done.add(op)
            yield from self.issue()
        yield from self.wait(len(self.order.comm), "the end")

    def issue(self) -> Iterator[Call]:
        """Issue the next operations of the comm row while their operands are ready."""
        for op in self.order.comm[self.issued :]:
            if self.missing(op):
                return
            self.issued += 1
            yield Call(ISSUE, op)

    def missing(self, op: Op) -> list[Op]:
        """Return the operations whose results an operation takes, and which have not ended."""
        return [needed for needed in self.order.operands(op) if needed not in self.done]

    def wait(self, until: int, before: str) -> Iterator[Call]:
        """Wait for the first `until` operations of the comm row, which must have been issued."""
        if until > self.issued:
            following = self.order.comm[self.issued]
            needed = (*self.missing(following), following.needs)[0]
            raise InvalidOrder(
                f"{self.order.name}: nothing goes on before {before}: next on the comm stream is {following}, which "
                f"needs {needed}, and that has not run"
            )
        for op in self.order.comm[self.waited : until]:
            self.done.add(op)
            yield Call(WAIT, op)
        self.waited = max(self.waited, until)


@dataclass(frozen=True)
class StreamSpans:
    """The spans of one rank on two streams, compute and communication, simulated or executed."""

    compute: tuple[Span, ...]
    comm: tuple[Span, ...]

    @property
    def makespan(self) -> Time:
        """The time from 0 to the last end."""
        return max((span.end for span in (*self.compute, *self.comm)), default=0)

    @property
    def idle(self) -> Time:
        """The bubble time of the compute stream: the makespan without its spans."""
        return self.makespan - sum(span.duration for span in self.compute)

    def waits(self) -> list[tuple[str, Time]]:
        """Return the waits of the compute stream: the operation that starts late, and the time."""
        found, now = [], 0 * self.makespan
        for span in self.compute:
            if span.start > now:
                found.append((span.label, span.start - now))
            now = span.end
        return found if self.makespan == now else [*found, ("end", self.makespan - now)]

    def timeline(self, name: str, unit: Unit = "ticks", source: Source = "simulated") -> Timeline:
        """Return a timeline of one rank with two streams, which plays; a run on the virtual clock is in "ns"."""
        return Timeline(name, [[*self.compute, *self.comm]], source=source, unit=unit)


def span_of(order: Order, op: Op, rank: int, start: Time, end: Time) -> Span:
    """Return the span of an operation, as the simulator and the executor record it."""
    stream = COMMUNICATION if op.is_comm else WORK
    return Span(rank, start, end, span_kind(op), op.layer, order.microbatch(op), str(op), stream=stream)


def span_kind(op: Op) -> str:
    """Return F, I, W or B for a compute operation, "collective" for an all-to-all."""
    return _SPAN_KINDS.get(op.kind, "collective")


def simulate(order: Order, ticks: Ticks) -> StreamSpans:
    """Simulate an order and return the spans of both streams.

    Raises:
        InvalidOrder: as `host_calls`.

    >>> from dualpipe_lab.ep.overlap import one_f_one_b_basic, one_f_one_b_overlap, ticks_of
    >>> [simulate(build(4), ticks_of(1, 1)).makespan for build in (one_f_one_b_basic, one_f_one_b_overlap)]
    [40, 24]
    """
    rows: tuple[list[Span], list[Span]] = [], []
    ends: dict[Op, Time] = {}
    for verb, op in host_calls(order):
        if verb == WAIT:
            continue
        row = rows[op.is_comm]
        start = max([row[-1].end if row else 0, *(ends[needed] for needed in order.operands(op))])
        ends[op] = start + ticks[op.kind]
        row.append(span_of(order, op, 0, start, ends[op]))
    return StreamSpans(*(tuple(span for span in row if span.duration) for row in rows))


def stream_totals(order: Order, ticks: Ticks) -> tuple[Time, Time]:
    """Return the total time of compute and of communication."""
    compute, comm = (sum((ticks[op.kind] for op in row), 0) for row in (order.compute, order.comm))
    return compute, comm


def lower_bound(order: Order, ticks: Ticks) -> Time:
    """Return a lower bound of the makespan for every order of these operations: the larger total.

    >>> from dualpipe_lab.ep.overlap import one_f_one_b_overlap, ticks_of
    >>> lower_bound(one_f_one_b_overlap(4), ticks_of(1, 2))
    32
    """
    return max(stream_totals(order, ticks))
