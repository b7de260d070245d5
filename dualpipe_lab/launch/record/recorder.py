"""The recorder of one rank: `before` and `after` each operation; ledger, trace and reports read what it kept.

In: operations as they begin and end.  Out: entries in the ledger, the trace, the status and the launcher's log.
  before   numbers the operation, stamps it on an emulated link, logs it, keeps it
  after    waits until it is due on an emulated link, logs its end, keeps it
What is kept is entered into ledger and trace by `flush`, when a reader asks for them: a rank that has just been woken
has cold caches, and entering a small operation costs as much as the operation.
Elsewhere: torch's flight recorder keeps collectives only.
"""

import threading
from collections import Counter, deque
from typing import NamedTuple

from dualpipe_lab.launch.clock import Clock
from dualpipe_lab.launch.emulator import Emulator
from dualpipe_lab.launch.record.ledger import RankLedger
from dualpipe_lab.launch.record.operation import Operation, OperationLog
from dualpipe_lab.launch.record.rank_status import StatusTracker
from dualpipe_lab.launch.record.trace import RankTrace
from dualpipe_lab.timeline import Span

MAX_BUFFERED = 1_024
_UNKNOWN = -1  # number of a receive from any rank, until its message is here


class _Ended(NamedTuple):
    operation: Operation
    end_ns: int


class Recorder:
    """What one rank keeps of its communication.

    Attributes:
        trace: up to the last `flush`.
        status: the operation that the rank waits for now, and its messages up to the last `flush`.
        clock, emulator, log: of the rank; no emulator on the wall clock without a link, no log outside of a launch.
        quiet: True inside a pipeline's step: a wait for a message makes no span, and the log is not written.
        open_spans: the number of spans that the caller has opened, in which a wait makes no span of its own.
    """

    def __init__(
        self, rank: int, clock: Clock, emulator: Emulator | None = None, log: OperationLog | None = None
    ) -> None:
        self.trace, self.status = RankTrace(rank), StatusTracker(rank)
        self.ledger = RankLedger()
        self.clock, self.emulator, self.log = clock, emulator, log
        self.quiet, self.open_spans = False, 0
        self._rank = rank
        self._num_receives: Counter[tuple[int, int]] = Counter()  # by peer and stream
        self._kept: deque[Operation | _Ended | Span] = deque()
        self._lock = threading.Lock()  # the main thread records, the listening thread flushes

    @property
    def ledger(self) -> RankLedger:
        """Calls, bytes and peers of this rank; another ledger may take its place."""
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: RankLedger) -> None:
        ledger.pull = self.flush
        self._ledger = ledger

    def before(self, operation: Operation) -> None:
        """Record an operation that is about to be issued, and stamp it on an emulated link."""
        operation.issued_ns = self.clock.now()
        if operation.sends is None:
            self.status.join(operation)
        elif not operation.sends:
            operation.sequence = _UNKNOWN if operation.peer is None else self._number(operation, operation.peer)
        if self.emulator is not None:
            self.emulator.stamp(operation)
        if self.log is not None and not self.quiet:  # a pipeline's step infers shapes before it begins
            self.log.begin(operation)
        self.keep(operation)
        self.status.wait(operation)  # some back ends block in the call itself

    def after(self, operation: Operation, waited_from: int) -> None:
        """Wait until an operation that torch has completed is due on the emulated link, and record its end."""
        if operation.sequence == _UNKNOWN and operation.peer is not None:
            operation.sequence = self._number(operation, operation.peer)
        due = self.clock.now() if self.emulator is None else self._wait_for(self.emulator.due_ns(operation))
        if not self.open_spans and not (self.quiet and operation.peer is not None):
            end = due if self.emulator is None else self.clock.now()
            if end > waited_from:
                kind = "wait" if operation.sends is not None else "collective"
                self._kept.append(Span(self._rank, waited_from, end, kind, label=operation.name))
        self.status.end()
        if self.log is not None and operation.slot >= 0:
            self.log.end(operation)
        self.keep(_Ended(operation, due))

    def keep(self, event: Operation | _Ended | Span) -> None:
        """Keep what the next `flush` enters into ledger and trace."""
        self._kept.append(event)
        if len(self._kept) > MAX_BUFFERED:
            self.flush()

    def flush(self) -> "Recorder":
        """Enter everything that is kept into ledger, trace and status, and return this recorder."""
        with self._lock:
            while self._kept:
                event = self._kept.popleft()
                if isinstance(event, Span):
                    self.trace.add(event)
                elif isinstance(event, _Ended):
                    self._enter_end(event.operation, event.end_ns)
                else:
                    self._enter(event)
        return self

    def _wait_for(self, due: int) -> int:
        self.status.in_flight = due > self.clock.now()
        self.clock.wait_until(due)
        return due

    def _number(self, receive: Operation, peer: int) -> int:
        """Return the number of a receive: messages are matched in the order of the calls, not of the waits."""
        number = self._num_receives[peer, receive.stream]
        self._num_receives[peer, receive.stream] = number + 1
        return number

    def _enter(self, operation: Operation) -> None:
        peers = {operation.peer} if operation.sends is not None else set(operation.group) - {self._rank}
        moved = operation.traffic
        named = {peer for peer in peers if peer is not None}
        self._ledger.add(operation.name, moved.sent, moved.received, named, operation.sent_to)
        entry = self._ledger.found[operation.name]
        entry.tensor_bytes += operation.tensor_bytes
        operation.enter_destinations(self._rank, entry.sent_to)
        if operation.sends and operation.peer is not None:
            self.trace.send(operation, operation.peer)
            self.status.sent[operation.peer, operation.tag] += 1

    def _enter_end(self, operation: Operation, end_ns: int) -> None:
        if operation.sends is None:
            self.trace.collective(operation, end_ns)
        elif not operation.sends and operation.peer is not None:
            self._ledger.found[operation.name].peers.add(operation.peer)  # known only now for a receive from any rank
            self.trace.receive(operation, operation.peer, end_ns)
            self.status.received[operation.peer, operation.tag] += 1
