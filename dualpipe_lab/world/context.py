"""The rank's context: its number, its clock, its ledger and its trace.

This is the one piece of state that belongs to the process rather than to a caller.  `launch` makes it in every rank;
under `torchrun` it is made on first use.  Everything in `comm` finds it through `rank_context()`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter_ns

from dualpipe_lab.timeline import Span
from dualpipe_lab.timeline.spans import ActionKey
from dualpipe_lab.world.emulate.clock import Clock, WallClock
from dualpipe_lab.world.emulate.emulator import Emulator
from dualpipe_lab.world.record.ledger import RankLedger
from dualpipe_lab.world.record.operation import Operation
from dualpipe_lab.world.record.operation_log import OperationLog
from dualpipe_lab.world.record.rank_status import Whereabouts
from dualpipe_lab.world.record.recorder import Books
from dualpipe_lab.world.record.trace import RankTrace
from dualpipe_lab.world.record.wire import Wire


class RankContext:
    """What one rank knows of itself.

    Attributes:
        rank, world_size: its number and how many there are.
        everyone: the ranks of the world.
        clock: the time it lives by.
        emulator: delays messages; None when the wall clock runs without a link.
        log: the last operations, for the launcher to read after a crash; None under `torchrun`.
        books: what happened so far, and what the watchdog is told.
        wire: counts the bytes that leave; None unless the launch asked for it.
        in_flight: works whose messages may still be under way; they must outlive the caller's interest in them.
        quiet: in the middle of a pipeline's step: waiting for a message is no span but a gap between two of them, and
            messages are written into the books at the end.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        clock: Clock,
        emulator: Emulator | None = None,
        log: OperationLog | None = None,
        wire: Wire | None = None,
    ) -> None:
        self.rank, self.world_size, self.clock, self.emulator = rank, world_size, clock, emulator
        self.log, self.wire = log, wire
        self.everyone = tuple(range(world_size))
        self.books = Books(rank)
        self.in_flight: dict[int, object] = {}
        self.quiet = False
        self._open_spans = 0

    @property
    def ledger(self) -> RankLedger:
        """What this rank communicated so far."""
        return self.books.written().ledger

    @property
    def trace(self) -> RankTrace:
        """What this rank did so far."""
        return self.books.written().trace

    def read_wire(self) -> None:
        """Enter into the ledger what left the sockets; all ranks call this, after their last operation."""
        if self.wire is not None:
            import torch.distributed as dist

            dist.barrier()
            self.ledger.enter_wire(self.wire.sent())

    def answer(self) -> Whereabouts:
        """Say where the main thread of this process is; called from another thread."""
        return self.books.written().progress.answer()

    def begin(self, operation: Operation) -> None:
        """Stamp and note an operation that is about to be issued."""
        operation.issued_ns = self.clock.now()
        if operation.is_collective:
            self.books.progress.join(operation)
        if self.emulator:
            self.emulator.post(operation)
        if self.log and not self.quiet:  # a pipeline's step has agreed on shapes before it began
            self.log.begin(operation)
        self.books.note(operation, later=self.quiet)

    def settle(self, operation: Operation, waited_from: int) -> None:
        """Let time pass until a really finished operation is due, and note its end."""
        progress = self.books.progress
        if self.emulator:
            due = self.emulator.due_ns(operation)
            progress.in_flight = due > self.clock.now()
            self.clock.wait_until(due)
        else:
            due = self.clock.now()
        if not self._open_spans and not (self.quiet and operation.peer is not None):
            kind = "collective" if operation.is_collective else "wait"
            self.books.trace.span(waited_from, self.clock.now(), kind, operation.name)
        progress.end()
        if self.log and operation.slot >= 0:
            self.log.end(operation)
        self.books.note(operation, due, later=self.quiet)

    @contextmanager
    def span(
        self,
        kind: str,
        stage: int | None = None,
        microbatch: int | None = None,
        label: str = "",
        pair: tuple[ActionKey, ActionKey] | None = None,
    ) -> Iterator[None]:
        """Record what happens inside as one span of the timeline; the arguments are those of `Span`."""
        start = self.clock.now()
        self._open_spans += 1
        try:
            yield
        finally:
            self._open_spans -= 1
            self.books.trace.add(Span(self.rank, start, self.clock.now(), kind, stage, microbatch, label, pair))

    def compute(self, ms: float, label: str = "") -> None:
        """Work for `ms` milliseconds of this rank's clock."""
        start = self.clock.now()
        self.clock.wait_until(start + round(ms * 1_000_000))
        if not self._open_spans:
            self.books.trace.span(start, self.clock.now(), "compute", label)


_current: RankContext | None = None


def install(context: RankContext | None) -> None:
    """Make `context` the context of this process."""
    global _current  # the documented exception: one rank, one process, one context
    _current = context


def peek() -> RankContext | None:
    """The context of this process, or None outside of a rank."""
    return _current


def rank_context() -> RankContext:
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
    rank_context().compute(ms, label)


def now() -> int:
    """Nanoseconds of this rank's clock since the ranks were let go.

    Raises:
        RuntimeError: outside of a rank.
    """
    return rank_context().clock.now()


def span(
    kind: str, stage: int | None = None, microbatch: int | None = None, label: str = ""
) -> AbstractContextManager[None]:
    """Name what a rank does inside the `with` block, for the timeline: `with lab.span("F", stage=0, microbatch=2):`.

    Raises:
        RuntimeError: outside of a rank.
    """
    return rank_context().span(kind, stage, microbatch, label)
