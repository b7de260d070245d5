"""Two streams, simulated exactly: when each operation of an order starts and ends.

Chapter: book/ep/one-f-one-b-basic.  In: an `Order`, ticks by kind.  Out: `Streams`: spans of both rows, a makespan.
  start of an operation   max(end of the one before it in its row, end of the one that it needs)
  makespan                at least max(sum of the work, sum of the communication)
All ranks do the same at the same time, so one rank stands for all.  Times are whole numbers or fractions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dualpipe_lab.ep.overlap.host import ISSUE, RUN, Call, host_calls
from dualpipe_lab.ep.overlap.operations import Op, Ticks, total
from dualpipe_lab.ep.overlap.order import Order
from dualpipe_lab.timeline import Span, Time, Timeline

# the letters of the pipelines: F, I, W and the whole B
_SPAN_KINDS = {"A_F": "F", "M_F": "F", "M_B": "I", "A_B": "I", "M_W": "W", "A_W": "W", "M_BW": "B", "A_BW": "B"}


@dataclass(frozen=True)
class Streams:
    """What one rank computes, and what travels meanwhile: two rows of spans.

    Equal if their spans are, whether simulated or run.
    """

    compute: tuple[Span, ...]
    comm: tuple[Span, ...]

    @property
    def makespan(self) -> Time:
        """From time 0 to the last end."""
        return max((span.end for span in (*self.compute, *self.comm)), default=0)

    @property
    def idle(self) -> Time:
        """How long the compute stream has nothing to do until the makespan."""
        return self.makespan - sum(span.duration for span in self.compute)

    def rows(self, name: str = "") -> dict[str, tuple[Span, ...]]:
        """Return the two rows by name, for `viz.Lanes`."""
        prefix = f"{name}: " if name else ""
        return {f"{prefix}compute": self.compute, f"{prefix}communication": self.comm}

    def waits(self) -> list[tuple[str, Time]]:
        """Return what the compute stream waited for: the operation that was kept waiting, and for how long."""
        found, now = [], 0 * self.makespan
        for span in self.compute:
            if span.start > now:
                found.append((span.label, span.start - now))
            now = span.end
        return found if self.makespan == now else [*found, ("end", self.makespan - now)]

    def timeline(self, name: str, unit: str = "ticks") -> Timeline:
        """Return a timeline whose row 0 is the compute stream and row 1 the communication stream."""
        rows = [[span._replace(rank=row) for span in spans] for row, spans in enumerate((self.compute, self.comm))]
        return Timeline(name, rows, unit="ns" if unit == "ns" else "ticks")


def span_of(order: Order, op: Op, rank: int, start: Time, end: Time) -> Span:
    """Return the span of an operation, as the simulator and the executor write it."""
    return Span(rank, start, end, span_kind(op), op.layer, order.microbatch(op), str(op))


def span_kind(op: Op) -> str:
    """Return F, I, W or B for work, "collective" for an all-to-all."""
    return _SPAN_KINDS.get(op.kind, "collective")


def simulate(order: Order, ticks: Ticks) -> Streams:
    """Return when everything happens.

    Raises:
        InvalidOrder: as `host_calls`.

    >>> from dualpipe_lab.ep.overlap.builders import one_f_one_b_basic, one_f_one_b_overlap
    >>> from dualpipe_lab.ep.overlap.operations import ticks_of
    >>> [simulate(build(4), ticks_of(1, 1)).makespan for build in (one_f_one_b_basic, one_f_one_b_overlap)]
    [40, 24]
    """
    rows: tuple[list[Span], list[Span]] = [], []
    ends: dict[Op, Time] = {}
    makers = order.makers()
    for op in _operations(host_calls(order)):
        row = rows[op.is_comm]
        free = row[-1].end if row else 0
        needed = makers.get(op.needs)
        start = max(free, ends[needed]) if needed is not None else free
        ends[op] = start + ticks[op.kind]
        row.append(span_of(order, op, 0, start, ends[op]))
    return Streams(*(tuple(span for span in row if span.duration) for row in rows))


def _operations(calls: Sequence[Call]) -> Iterator[Op]:
    return (call.op for call in calls if call.verb in (RUN, ISSUE))


def sums(order: Order, ticks: Ticks) -> tuple[Time, Time]:
    """Return the sum of the work and the sum of the communication.

    >>> from dualpipe_lab.ep.overlap.builders import one_f_one_b_overlap
    >>> from dualpipe_lab.ep.overlap.operations import ticks_of
    >>> sums(one_f_one_b_overlap(4), ticks_of(1, 2))
    (24, 32)
    """
    return total(order.compute, ticks), total(order.comm, ticks)


def bound(order: Order, ticks: Ticks) -> Time:
    """Return what no order of these operations can go below: the longer sum.

    >>> from dualpipe_lab.ep.overlap.builders import one_f_one_b_overlap
    >>> from dualpipe_lab.ep.overlap.operations import ticks_of
    >>> bound(one_f_one_b_overlap(4), ticks_of(1, 2))
    32
    """
    return max(sums(order, ticks))
