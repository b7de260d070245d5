"""The recorder of one rank: `before` and `after` each operation; ledger, trace and reports read what it kept.

In: operations as they begin and end.  Out: entries in the ledger, the trace, the status and the launcher's log.
  before   numbers the operation, writes status and log, keeps it; writes its timestamp if a link is emulated
  after    keeps its end; waits until it is due if a link is emulated
What is kept is entered into ledger and trace by `flush`, when a reader asks for them, and its bytes are derived then: a
rank that has just been woken has cold caches, and entering a small operation costs as much as the operation.
Elsewhere: torch's flight recorder keeps collectives only.
"""

import marshal
import threading
import time
from collections import Counter, deque
from mmap import mmap

from dualpipe_lab.launch.clock import Clock
from dualpipe_lab.launch.emulator import Emulator
from dualpipe_lab.launch.record.ledger import RankLedger
from dualpipe_lab.launch.record.operation import BEGUN, ENDED, SLOT_BYTES, SLOTS, Operation, logged_fields
from dualpipe_lab.launch.record.rank_status import HISTORY_LENGTH, StatusTracker
from dualpipe_lab.launch.record.trace import RankTrace
from dualpipe_lab.timeline import Span

MAX_BUFFERED = 1_024
_UNKNOWN = -1  # number of a receive from any rank, until its message is here


class Recorder:
    """What one rank keeps of its communication.

    Attributes:
        trace: up to the last `flush`.
        status: the operation that the rank waits for now, and its messages up to the last `flush`.
        clock, emulator, log: of the rank; no emulator on the wall clock without a link, no log outside of a launch.
        quiet: True inside a pipeline's step: a wait for a message makes no span, and the log is not written.
        open_spans: the number of spans that the caller has opened, in which a wait makes no span of its own.
    """

    def __init__(self, rank: int, clock: Clock, emulator: Emulator | None = None, log: mmap | None = None) -> None:
        self.trace, self.status = RankTrace(rank), StatusTracker(rank)
        self.ledger = RankLedger()
        self.clock, self.emulator, self.log = clock, emulator, log
        self.quiet, self.open_spans = False, 0
        self._rank = rank
        self._num_logged = 0
        self._num_receives: Counter[tuple[int | None, tuple[int, ...], str, int]] = Counter()
        self._kept: deque[Operation | tuple[Operation, int] | Span] = deque()
        self._lock = threading.Lock()  # the main thread records, the listening thread flushes

    def before(self, operation: Operation) -> None:
        """Record an operation that is about to be issued."""
        operation.issued_ns = self.clock.now()
        if operation.sends is None:
            communicator = operation.group, operation.group_name
            operation.sequence = self.status.joined[communicator]
            self.status.joined[communicator] += 1
            if operation.sequence < HISTORY_LENGTH:
                fields = operation.name, operation.root, operation.shape, operation.dtype
                self.status.history[communicator].append(fields)
        elif not operation.sends:
            operation.sequence = _UNKNOWN if operation.peer is None else self._number(operation)
        self.wait_for(operation)  # some back ends block in the call itself
        if operation.derive is None:
            return  # reported while it runs, and in no ledger
        if self.emulator is not None:
            self.emulator.stamp(operation)
        if self.log is not None and not self.quiet:  # a pipeline's step infers shapes before it begins
            entry = BEGUN + marshal.dumps(logged_fields(operation))
            if len(entry) <= SLOT_BYTES:
                operation.slot = self._num_logged % SLOTS * SLOT_BYTES
                self._num_logged += 1
                self.log[operation.slot : operation.slot + len(entry)] = entry
        self._kept.append(operation)
        if len(self._kept) > MAX_BUFFERED:
            self.flush()

    def after(self, operation: Operation, waited_from: int) -> None:
        """Record the end of an operation that torch has completed."""
        if operation.sequence == _UNKNOWN:
            operation.sequence = self._number(operation)
        due = end = self.clock.now()
        if self.emulator is not None:
            due = self.emulator.due_ns(operation)
            self.status.in_flight = due > end
            self.clock.wait_until(due)
            end = self.clock.now()
        if end > waited_from and not self.open_spans and not (self.quiet and operation.peer is not None):
            kind = "wait" if operation.sends is not None else "collective"
            self._kept.append(Span(self._rank, waited_from, end, kind, label=operation.name))
        self.status.current, self.status.ended, self.status.in_flight = None, operation, False
        self.status.completed += 1
        if self.log is not None and operation.slot >= 0:
            self.log[operation.slot : operation.slot + 1] = ENDED
        self._kept.append((operation, due))

    def wait_for(self, operation: Operation) -> None:
        """Report an operation as the one that the rank waits for."""
        self.status.current = self.status.last = operation
        self.status.since = time.perf_counter()

    def keep(self, span: Span) -> None:
        """Keep a span for the next `flush`."""
        self._kept.append(span)
        if len(self._kept) > MAX_BUFFERED:
            self.flush()

    @property
    def ledger(self) -> RankLedger:
        """Calls, bytes and peers of this rank; another ledger may take its place."""
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: RankLedger) -> None:
        ledger.pull = self.flush
        self._ledger = ledger

    def flush(self) -> "Recorder":
        """Enter everything that is kept into ledger, trace and status, and return this recorder."""
        with self._lock:
            while self._kept:
                event = self._kept.popleft()
                if isinstance(event, Operation):
                    self._enter(event)
                elif isinstance(event, Span):
                    self.trace.add(event)
                else:
                    self._enter_end(*event)
        return self

    def _number(self, receive: Operation) -> int:
        """Return the number of a receive: messages are matched in the order of the calls, not of the waits."""
        channel = receive.peer, receive.group, receive.group_name, receive.tag
        self._num_receives[channel] += 1
        return self._num_receives[channel] - 1

    def _enter(self, operation: Operation) -> None:
        peers = {*operation.group} - {self._rank} if operation.sends is None else set()
        if operation.peer is not None:
            peers.add(operation.peer)
        moved = operation.moved
        self._ledger.add(operation.name, moved.traffic.sent, moved.traffic.received, peers, moved.sent_to)
        entry = self._ledger.found[operation.name]
        entry.tensor_bytes += 0 if operation.sends is False else operation.tensor_bytes
        if moved.traffic.sent:
            entry.sent_to.update(operation.destinations(self._rank))
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
