"""The rank's context: its number, its clock, its ledger and its trace.

This is the one piece of state that belongs to the process rather than to a caller.  `launch` makes it in every rank;
under `torchrun` it is made on first use.  Everything in `comm` finds it through `current()`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns

from dualpipe_lab.timeline import Span
from dualpipe_lab.timeline.spans import Part
from dualpipe_lab.world.clock import Clock, WallClock
from dualpipe_lab.world.emulator import Emulator
from dualpipe_lab.world.ledger import RankLedger
from dualpipe_lab.world.operation import Operation
from dualpipe_lab.world.trace import RankTrace
from dualpipe_lab.world.whereabouts import Progress


class RankContext:
    """What one rank knows of itself.

    Attributes:
        rank, world_size: its number and how many there are.
        clock: the time it lives by.
        emulator: delays messages; None when the wall clock runs without a link.
        progress: what the watchdog is told.
        ledger, trace: what happened so far.
        in_flight: works whose messages may still be under way; they must outlive the caller's interest in them.
        quiet: leave waiting for messages out of the timeline: a pipeline shows it as the gap between its spans.
    """

    def __init__(self, rank: int, world_size: int, clock: Clock, emulator: Emulator | None = None) -> None:
        self.rank, self.world_size, self.clock, self.emulator = rank, world_size, clock, emulator
        self.progress = Progress(rank)
        self.ledger = RankLedger()
        self.trace = RankTrace(rank)
        self.in_flight: dict[int, object] = {}
        self.quiet = False
        self._open_spans = 0

    def begin(self, operation: Operation) -> None:
        """Count, stamp and note an operation that is about to be issued."""
        operation.issued_ns = self.clock.now()
        self.progress.begin(operation)
        peers = {operation.peer} if not operation.is_collective else set(operation.group) - {self.rank}
        self.ledger.add(
            operation.name,
            operation.traffic.sent,
            operation.traffic.received,
            {peer for peer in peers if peer is not None},
            operation.sent_to,
        )
        if self.emulator:
            self.emulator.post(operation)
        if operation.sends and operation.peer is not None:
            self.trace.send(operation, operation.peer)

    def settle(self, operation: Operation, waited_from: int) -> None:
        """Let time pass until a really finished operation is due, and note its end."""
        if self.emulator:
            due = self.emulator.due_ns(operation)
            self.progress.in_flight = due > self.clock.now()
            self.clock.wait_until(due)
        else:
            due = self.clock.now()
        if operation.sends is False and operation.peer is not None:
            self.ledger.entries[operation.name].peers.add(operation.peer)  # known only now if it came from anybody
            self.trace.receive(operation, operation.peer, due)
        if operation.is_collective:
            self.trace.collective(operation, due)
        if not self._open_spans and not (self.quiet and operation.peer is not None):
            kind = "collective" if operation.is_collective else "wait"
            self.trace.span(waited_from, self.clock.now(), kind, operation.name)
        self.progress.end(operation)

    @contextmanager
    def span(
        self,
        kind: str,
        stage: int | None = None,
        microbatch: int | None = None,
        label: str = "",
        pair: tuple[Part, Part] | None = None,
    ) -> Iterator[None]:
        """Record what happens inside as one span of the timeline; the arguments are those of `Span`."""
        start = self.clock.now()
        self._open_spans += 1
        try:
            yield
        finally:
            self._open_spans -= 1
            self.trace.add(Span(self.rank, start, self.clock.now(), kind, stage, microbatch, label, pair))

    def compute(self, ms: float, label: str = "") -> None:
        """Work for `ms` milliseconds of this rank's clock."""
        start = self.clock.now()
        self.clock.wait_until(start + round(ms * 1_000_000))
        if not self._open_spans:
            self.trace.span(start, self.clock.now(), "compute", label)


_current: RankContext | None = None


def install(context: RankContext | None) -> None:
    """Make `context` the context of this process."""
    global _current  # the documented exception: one rank, one process, one context
    _current = context


def peek() -> RankContext | None:
    """The context of this process, or None outside of a rank."""
    return _current


def current() -> RankContext:
    """The context of this rank.

    Raises:
        RuntimeError: outside of a rank.
    """
    if _current is None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RuntimeError("no rank here: call this inside the function that launch(fn, world_size) runs")
        install(RankContext(dist.get_rank(), dist.get_world_size(), WallClock(perf_counter_ns())))
    assert _current is not None
    return _current


def compute(ms: float, label: str = "") -> None:
    """Stand for `ms` milliseconds of work: sleep under the wall clock, count under the virtual one.

    Sleeping ranks share two cores without slowing one another, as ranks on their own devices would.

    Raises:
        RuntimeError: outside of a rank.
        ValueError: if `ms` is negative.
    """
    if ms < 0:
        raise ValueError(f"work takes no less than 0 ms, got {ms}")
    current().compute(ms, label)


def now() -> int:
    """Nanoseconds of this rank's clock since the ranks were let go.

    Raises:
        RuntimeError: outside of a rank.
    """
    return current().clock.now()


def span(
    kind: str, stage: int | None = None, microbatch: int | None = None, label: str = ""
) -> AbstractContextManager[None]:
    """Name what a rank does inside the `with` block, for the timeline: `with lab.span("F", stage=0, microbatch=2):`.

    Raises:
        RuntimeError: outside of a rank.
    """
    return current().span(kind, stage, microbatch, label)
