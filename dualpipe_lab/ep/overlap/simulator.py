"""Exact simulation of an order on two streams: the start and end of each operation.

Chapter: book/ep/one-f-one-b-basic.  In: an `Order`, ticks by kind.  Out: `StreamSpans`: spans of both rows, a makespan.
  start of an operation   max(end of the operation before it in its row, end of the operation whose result it takes)
  makespan                at least max(sum of compute, sum of communication)
All ranks run the same operations at the same time, so one rank is simulated.  Times are whole numbers or fractions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dualpipe_lab.ep.overlap.host import ISSUE, RUN, Call, host_calls
from dualpipe_lab.ep.overlap.order import Op, Order, Ticks, total
from dualpipe_lab.timeline import COMMUNICATION, WORK, Span, Time, Timeline
from dualpipe_lab.timeline.data import Source, Unit

# the letters of pipeline schedules: F, I, W and the unsplit B
_SPAN_KINDS = {
    f"{part}_{half}": kind for part in "AMSP" for half, kind in zip(("F", "B", "W", "BW"), "FIWB", strict=True)
}


@dataclass(frozen=True)
class StreamSpans:
    """The spans of one rank on two streams: compute and communication.

    Equal if all spans are equal, whether simulated or executed.
    """

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

    def rows(self, name: str = "") -> dict[str, tuple[Span, ...]]:
        """Return the two rows by name, for `viz.Lanes`."""
        prefix = f"{name}: " if name else ""
        return {f"{prefix}compute": self.compute, f"{prefix}communication": self.comm}

    def waits(self) -> list[tuple[str, Time]]:
        """Return the waits of the compute stream: the operation that starts late, and the waiting time."""
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

    >>> from dualpipe_lab.ep.overlap.builders import one_f_one_b_basic, one_f_one_b_overlap
    >>> from dualpipe_lab.ep.overlap.order import ticks_of
    >>> [simulate(build(4), ticks_of(1, 1)).makespan for build in (one_f_one_b_basic, one_f_one_b_overlap)]
    [40, 24]
    """
    rows: tuple[list[Span], list[Span]] = [], []
    ends: dict[Op, Time] = {}
    makers = order.makers()
    for op in _operations(host_calls(order)):
        row = rows[op.is_comm]
        free = row[-1].end if row else 0
        start = max([free, *(ends[needed] for needed in order.operands(op, makers))])
        ends[op] = start + ticks[op.kind]
        row.append(span_of(order, op, 0, start, ends[op]))
    return StreamSpans(*(tuple(span for span in row if span.duration) for row in rows))


def _operations(calls: Sequence[Call]) -> Iterator[Op]:
    return (call.op for call in calls if call.verb in (RUN, ISSUE))


def stream_totals(order: Order, ticks: Ticks) -> tuple[Time, Time]:
    """Return the total time of compute and of communication.

    >>> from dualpipe_lab.ep.overlap.builders import one_f_one_b_overlap
    >>> from dualpipe_lab.ep.overlap.order import ticks_of
    >>> stream_totals(one_f_one_b_overlap(4), ticks_of(1, 2))
    (24, 32)
    """
    return total(order.compute, ticks), total(order.comm, ticks)


def lower_bound(order: Order, ticks: Ticks) -> Time:
    """Return a lower bound of the makespan for every order of these operations: the larger total.

    >>> from dualpipe_lab.ep.overlap.builders import one_f_one_b_overlap
    >>> from dualpipe_lab.ep.overlap.order import ticks_of
    >>> lower_bound(one_f_one_b_overlap(4), ticks_of(1, 2))
    32
    """
    return max(stream_totals(order, ticks))
