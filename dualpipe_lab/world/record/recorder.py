"""One rank's books: the ledger, the trace and the table from which it answers where it is.

In: operations as they begin and end.  Out: the books, written up.
In the middle of a pipeline's step a message is noted in a word, and written up at the end or when somebody asks: a rank
that has just been woken pays for every line it runs with cold caches, and the books cost as much as the message.
"""

import threading
from collections import deque

from dualpipe_lab.world.record.ledger import RankLedger
from dualpipe_lab.world.record.operation import Operation
from dualpipe_lab.world.record.rank_status import Progress
from dualpipe_lab.world.record.trace import RankTrace

MAX_NOTES = 1_024


class Books:
    """What one rank did.

    Attributes:
        ledger, trace: messages and collectives, up to the last `written`; spans of work are in the trace at once.
        progress: what the rank waits for at present, and which messages it had, up to the last `written`.
    """

    def __init__(self, rank: int) -> None:
        self.ledger, self.trace, self.progress = RankLedger(), RankTrace(rank), Progress(rank)
        self._rank = rank
        self._notes: deque[tuple[Operation, int | None]] = deque()
        self._writing = threading.Lock()  # the rank itself, or the thread that answers for it

    def note(self, operation: Operation, end_ns: int | None = None, later: bool = False) -> None:
        """Note that an operation has begun or, with a time, that it is over; `later` leaves the writing for later."""
        self._notes.append((operation, end_ns))
        if not later or len(self._notes) > MAX_NOTES:
            self.written()

    def written(self) -> "Books":
        """Write up what was noted, and return the books."""
        with self._writing:
            while self._notes:
                operation, end_ns = self._notes.popleft()
                if end_ns is None:
                    self._write_begin(operation)
                else:
                    self._write_end(operation, end_ns)
        return self

    def _write_begin(self, operation: Operation) -> None:
        peers = {operation.peer} if not operation.is_collective else set(operation.group) - {self._rank}
        self.ledger.add(
            operation.name,
            operation.traffic.sent,
            operation.traffic.received,
            {peer for peer in peers if peer is not None},
            operation.sent_to,
        )
        self.ledger.entries[operation.name].tensor_bytes += operation.tensor_bytes
        if operation.sends and operation.peer is not None:
            self.trace.send(operation, operation.peer)
            self.progress.posted[operation.peer, operation.tag] += 1

    def _write_end(self, operation: Operation, end_ns: int) -> None:
        if operation.is_collective:
            self.trace.collective(operation, end_ns)
        elif not operation.sends and operation.peer is not None:
            self.ledger.entries[operation.name].peers.add(operation.peer)  # known only now if it came from anybody
            self.trace.receive(operation, operation.peer, end_ns)
            self.progress.received[operation.peer, operation.tag] += 1
