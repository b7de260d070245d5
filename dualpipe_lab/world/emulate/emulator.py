"""When an operation is due: the emulated link, or model time, applied to real messages.

Chapter: book/start/time.  The real bytes move at once; the receiver then lets the clock run until the stamped time.
  message      leaves at max(sent, link free) + transfer, arrives latency later
  collective   starts when all have called it and the group's previous one is over; takes steps * latency + transfer
A group's collectives follow one another in the order of the calls, as on the stream of an NCCL communicator, in
whatever order they are waited for.  Different groups share no link, not even two groups of the same ranks.
"""

import time
from collections import defaultdict, deque

from dualpipe_lab.world.emulate.clock import Clock
from dualpipe_lab.world.emulate.link import Link, NodeLink
from dualpipe_lab.world.record.operation import Operation
from dualpipe_lab.world.record.timestamps import Stamps

SHORTEST_PAUSE, LONGEST_PAUSE = 0.0001, 0.002  # seconds; the watchdog must not take the polling for work


class Emulator:
    """Stamps what this rank sends and tells when what it waits for is due."""

    def __init__(self, rank: int, clock: Clock, link: Link | NodeLink | None, stamps: Stamps) -> None:
        self._rank, self._clock, self._link, self._stamps = rank, clock, link, stamps
        self._link_free: dict[int, int] = {}  # by destination
        self._group_free: dict[int, int] = {}  # by stream
        self._unplaced: defaultdict[int, deque[Operation]] = defaultdict(deque)  # by stream, in the order of the calls

    def post(self, operation: Operation) -> None:
        """Stamp an operation before its real counterpart starts."""
        if operation.is_collective:
            self._unplaced[operation.stream].append(operation)
            self._stamps.write(operation.stream, operation.sequence, operation.issued_ns)
        elif operation.sends and operation.peer is not None:
            leaves = max(operation.issued_ns, self._link_free.get(operation.peer, 0))
            operation.left_ns = leaves if leaves > operation.issued_ns else None
            operation.due_ns = leaves + self._transfer_ns(operation)
            self._link_free[operation.peer] = operation.due_ns
            self._stamps.write(operation.stream, operation.peer, operation.due_ns + self._latency_ns(operation))

    def due_ns(self, operation: Operation) -> int:
        """When a really finished operation is due, in nanoseconds of the clock."""
        if operation.is_collective:
            while operation.left_ns is None:  # nobody has waited for this one yet, or for one that was called later
                self._place(self._unplaced[operation.stream].popleft())
            return operation.due_ns
        if operation.sends:
            return operation.due_ns
        assert operation.peer is not None
        stamp = self._stamps.take(operation.peer, operation.stream, self._rank)
        return self._clock.now() if stamp is None else stamp  # a message sent past `comm` has no stamp

    def _place(self, operation: Operation) -> None:
        """Give a collective its time on the link; those that its group called before have theirs."""
        joined = [self._joined_ns(member, operation) for member in operation.group]
        operation.left_ns = max(self._group_free.get(operation.stream, 0), *joined)
        operation.due_ns = (
            operation.left_ns + operation.traffic.steps * self._latency_ns(operation) + self._transfer_ns(operation)
        )
        self._group_free[operation.stream] = operation.due_ns

    def _joined_ns(self, member: int, operation: Operation) -> int:
        """When a member joined; a root may really be done before the others have come, so it waits for their stamps."""
        pause = SHORTEST_PAUSE
        while (stamp := self._stamps.take(member, operation.stream, operation.sequence)) is None:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return stamp

    def _transfer_ns(self, operation: Operation) -> int:
        link = self._link_of(operation)
        return link.transfer_ns(operation.traffic.busiest) if link else 0

    def _latency_ns(self, operation: Operation) -> int:
        link = self._link_of(operation)
        return link.latency_ns if link else 0

    def _link_of(self, operation: Operation) -> Link | None:
        """The slowest link that an operation uses."""
        if self._link is None:
            return None
        message = [self._rank] if operation.peer is None else [self._rank, operation.peer]
        return self._link.across(operation.group if operation.is_collective else message)
