"""The recorder of one rank: its ledger, its trace and its status.

In: operations as they begin and end.  Out: entries in the ledger, the trace and the status tracker.
Inside a pipeline's step, messages are only buffered; they are recorded at the end of the step, or when a reader calls
`flush`.  Recording costs as much as the message itself, because a rank that has just been woken has cold caches.
"""

import threading
from collections import deque

from dualpipe_lab.world.record.ledger import RankLedger
from dualpipe_lab.world.record.operation import Operation
from dualpipe_lab.world.record.rank_status import StatusTracker
from dualpipe_lab.world.record.trace import RankTrace

MAX_BUFFERED = 1_024


class Recorder:
    """Ledger, trace and status of one rank.

    Attributes:
        ledger, trace: messages and collectives up to the last `flush`; spans are in the trace at once.
        status: the operation that the rank waits for now, and its messages up to the last `flush`.
    """

    def __init__(self, rank: int) -> None:
        self.ledger, self.trace, self.status = RankLedger(), RankTrace(rank), StatusTracker(rank)
        self._rank = rank
        self._buffer: deque[tuple[Operation, int | None]] = deque()
        self._lock = threading.Lock()  # the main thread records, the listening thread flushes

    def record(self, operation: Operation, end_ns: int | None = None, later: bool = False) -> None:
        """Record the begin of an operation, or with `end_ns` its end; `later` only buffers it."""
        self._buffer.append((operation, end_ns))
        if not later or len(self._buffer) > MAX_BUFFERED:
            self.flush()

    def flush(self) -> "Recorder":
        """Record everything that is buffered, and return this recorder."""
        with self._lock:
            while self._buffer:
                operation, end_ns = self._buffer.popleft()
                if end_ns is None:
                    self._record_begin(operation)
                else:
                    self._record_end(operation, end_ns)
        return self

    def _record_begin(self, operation: Operation) -> None:
        peers = {operation.peer} if not operation.is_collective else set(operation.group) - {self._rank}
        self.ledger.add(
            operation.name,
            operation.traffic.sent,
            operation.traffic.received,
            {peer for peer in peers if peer is not None},
            operation.sent_to,
        )
        entry = self.ledger.entries[operation.name]
        entry.tensor_bytes += operation.tensor_bytes
        operation.enter_destinations(self._rank, entry.sent_to)
        if operation.sends and operation.peer is not None:
            self.trace.send(operation, operation.peer)
            self.status.sent[operation.peer, operation.tag] += 1

    def _record_end(self, operation: Operation, end_ns: int) -> None:
        if operation.is_collective:
            self.trace.collective(operation, end_ns)
        elif not operation.sends and operation.peer is not None:
            self.ledger.entries[operation.name].peers.add(operation.peer)  # known only now for a receive from any rank
            self.trace.receive(operation, operation.peer, end_ns)
            self.status.received[operation.peer, operation.tag] += 1
