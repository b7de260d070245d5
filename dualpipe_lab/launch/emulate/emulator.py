"""The emulator: when a real operation is due on an emulated link, on the wall clock or the virtual clock.

Chapter: book/start/time.  In: operations as they are issued and waited for.  Out: the time at which each is due.
The real bytes move at once; the receiver then waits until the time in the message's timestamp.
  message      leaves at max(sent, link free) + transfer, arrives latency later
  collective   starts when all have called it and the group's previous one is over; takes steps * latency + transfer
A group's collectives follow one another in the order of the calls, as on the stream of an NCCL communicator, in
whatever order they are waited for.  Different groups share no link, not even two groups of the same ranks.
"""

import os
import struct
import time
from collections import Counter, defaultdict, deque
from pathlib import Path

from dualpipe_lab.launch.emulate.clock import Clock
from dualpipe_lab.launch.emulate.link import Link, NodeLink
from dualpipe_lab.launch.record.operation import Operation

_RECORD = struct.Struct("<qqqq")  # stream, key, time in ns, unused
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0001, 0.002  # seconds; the supervisor must not take the polling for work


class Emulator:
    """Writes timestamps for the messages that this rank sends and computes when an operation is due."""

    def __init__(self, rank: int, clock: Clock, link: Link | NodeLink | None, timestamps: "Timestamps") -> None:
        self._rank, self._clock, self._link, self._timestamps = rank, clock, link, timestamps
        self._link_free: dict[int, int] = {}  # by destination
        self._group_free: dict[int, int] = {}  # by stream
        self._unscheduled: defaultdict[int, deque[Operation]] = defaultdict(deque)  # by stream, in call order
        self._early: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # read before they are asked for
        self._num_read: Counter[tuple[int, int]] = Counter()  # by peer and stream, as those above

    def stamp(self, operation: Operation) -> None:
        """Write the timestamp of an operation, before torch starts it."""
        if operation.is_collective:
            self._unscheduled[operation.stream].append(operation)
            self._timestamps.write(operation.stream, operation.sequence, operation.issued_ns)
        elif operation.sends and operation.peer is not None:
            leaves = max(operation.issued_ns, self._link_free.get(operation.peer, 0))
            operation.left_ns = leaves if leaves > operation.issued_ns else None
            operation.due_ns = leaves + self._transfer_ns(operation)
            self._link_free[operation.peer] = operation.due_ns
            self._timestamps.write(operation.stream, operation.peer, operation.due_ns + self._latency_ns(operation))

    def due_ns(self, operation: Operation) -> int:
        """Time at which an operation that torch has completed is due, in nanoseconds of the clock."""
        if operation.is_collective:
            while operation.left_ns is None:  # no wait has scheduled this one or a later one yet
                self._schedule(self._unscheduled[operation.stream].popleft())
            return operation.due_ns
        if operation.sends:
            return operation.due_ns
        assert operation.peer is not None
        stamp = self._arrival_ns(operation.peer, operation.stream, operation.sequence)
        return self._clock.now() if stamp is None else stamp

    def _arrival_ns(self, peer: int, stream: int, number: int) -> int | None:
        """Return the timestamp of message `number` of a rank; a wait may ask for a later one first."""
        early, num_read = self._early[peer, stream], self._num_read
        while number not in early:
            stamp = self._timestamps.take(peer, stream, self._rank)
            num_read[peer, stream] += 1
            if stamp is None:
                return None  # a message sent past `comm` has no stamp
            early[num_read[peer, stream] - 1] = stamp
        return early.pop(number)

    def _schedule(self, operation: Operation) -> None:
        """Compute start and end of a collective; the earlier collectives of its group have theirs already."""
        joined = [self._joined_ns(member, operation) for member in operation.group]
        operation.left_ns = max(self._group_free.get(operation.stream, 0), *joined)
        operation.due_ns = (
            operation.left_ns + operation.traffic.steps * self._latency_ns(operation) + self._transfer_ns(operation)
        )
        self._group_free[operation.stream] = operation.due_ns

    def _joined_ns(self, member: int, operation: Operation) -> int:
        """Time at which a member called the collective; a root may finish before the others call, so it polls."""
        pause = SHORTEST_PAUSE
        while (stamp := self._timestamps.take(member, operation.stream, operation.sequence)) is None:
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
        """Slowest link that an operation uses."""
        if self._link is None:
            return None
        message = [self._rank] if operation.peer is None else [self._rank, operation.peer]
        return self._link.across(operation.group if operation.is_collective else message)


class Timestamps:
    """Times that travel beside the messages: each rank appends to a file of its rank, the other ranks read it.

    The sender writes a timestamp before it starts the real message, so the receiver of a message finds its timestamp.
    A record has 32 bytes, a divisor of the page size, so a reader never sees half a record.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._local_file = os.open(self._path(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._readers: dict[int, _Reader] = {}

    def write(self, stream: int, key: int, time_ns: int) -> None:
        """Publish a time under `(stream, key)`."""
        os.write(self._local_file, _RECORD.pack(stream, key, time_ns, 0))

    def take(self, writer: int, stream: int, key: int) -> int | None:
        """Return the next unread time of rank `writer` under `(stream, key)`; None if there is none yet."""
        if writer not in self._readers:
            if not self._path(writer).exists():
                return None  # that rank has not begun
            self._readers[writer] = _Reader(self._path(writer))
        return self._readers[writer].take(stream, key)

    def _path(self, rank: int) -> Path:
        return self._folder / f"timestamps-{rank}"


class _Reader:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._offset = 0
        self._unread: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)

    def take(self, stream: int, key: int) -> int | None:
        if not self._unread[stream, key]:
            self._read_more()
        queue = self._unread[stream, key]
        time_ns = queue.popleft() if queue else None
        if not queue:
            del self._unread[stream, key]
        return time_ns

    def _read_more(self) -> None:
        while data := os.pread(self._file, 1 << 16, self._offset):
            self._offset += len(data)
            for stream, key, time_ns, _ in _RECORD.iter_unpack(data):
                self._unread[stream, key].append(time_ns)
