"""The emulator: when a real operation is due on an emulated link, on the wall clock or the virtual clock.

Chapters: book/start/time; book/dp/hybrid-zero for links of two speeds.
In: links; operations as they are issued and waited for.  Out: the time at which each is due.
The real bytes move at once; the receiver then waits until the time in the message's timestamp.
  transfer     num_bytes * 8 / gbps: the bytes leave one after another
  message      leaves at max(sent, link free) + transfer, arrives latency later; each ordered pair of ranks has a link
  collective   starts when all have called it and the group's previous one is over; takes steps * latency + transfer
A group's collectives follow one another in the order of the calls, as on the stream of an NCCL communicator, in
whatever order they are waited for.  A collective takes the time of the slowest link between two of its ranks.
Different groups share no link, not even two groups of the same ranks.
Elsewhere: `tc netem` and NS-3 delay real packets; here the receiver waits until they are due.
"""

import os
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dualpipe_lab.launch.clock import Clock
from dualpipe_lab.launch.record.operation import Operation

_RECORD = struct.Struct("<qqqq")  # stream, key, time in ns, unused
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0001, 0.002  # seconds; the supervisor must not take the polling for work


@dataclass(frozen=True)
class Link:
    """Bandwidth in Gbit/s and latency in milliseconds of every ordered pair of ranks.

    Use at most 2 Gbit/s on the wall clock: loopback moves about 1 GB/s, so a faster link would show the time of
    loopback.

    >>> Link(gbps=1, latency_ms=0.5).transfer_ns(1_000_000)
    8000000

    Raises:
        ValueError: unless `gbps > 0` and `latency_ms >= 0`.
    """

    gbps: float
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        if not (self.gbps > 0 and self.latency_ms >= 0):
            raise ValueError(
                f"a link needs gbps > 0 and latency_ms >= 0, got gbps={self.gbps}, latency_ms={self.latency_ms}"
            )

    @property
    def latency_ns(self) -> int:
        """Nanoseconds from the departure of the last byte to its arrival."""
        return round(self.latency_ms * 1_000_000)

    def transfer_ns(self, num_bytes: int) -> int:
        """Nanoseconds for which a message of `num_bytes` occupies the link."""
        return round(num_bytes * 8 / self.gbps)

    def across(self, ranks: Sequence[int]) -> "Link":
        """Slowest link between these ranks: all links are equal."""
        return self


@dataclass(frozen=True)
class NodeLink:
    """Two links: one between ranks of the same node, one between ranks of different nodes.

    Args:
        inside: link between ranks of the same node.
        between: link between ranks of different nodes.
        ranks_per_node: number of consecutive ranks on one node.

    >>> link = NodeLink(Link(gbps=8), Link(gbps=1), ranks_per_node=4)
    >>> [link.across(ranks).gbps for ranks in [(0, 3), (3, 4), (0, 1, 4, 5)]]
    [8, 1, 1]

    Raises:
        ValueError: unless `ranks_per_node` is a whole number from 1.
    """

    inside: Link
    between: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ValueError(f"a node holds a whole number of ranks from 1, got ranks_per_node={self.ranks_per_node!r}")

    def across(self, ranks: Sequence[int]) -> Link:
        """Slowest link between these ranks: `inside` if all of them are on one node."""
        return self.inside if len({rank // self.ranks_per_node for rank in ranks}) == 1 else self.between


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
            latency_ns, transfer_ns = self._times_of(operation)
            self._link_free[operation.peer] = operation.due_ns = leaves + transfer_ns
            self._timestamps.write(operation.stream, operation.peer, operation.due_ns + latency_ns)

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
        joined = [self._joined_ns(member, operation) for member in operation.group]
        operation.left_ns = max(self._group_free.get(operation.stream, 0), *joined)
        latency_ns, transfer_ns = self._times_of(operation)
        operation.due_ns = operation.left_ns + operation.moved.traffic.steps * latency_ns + transfer_ns
        self._group_free[operation.stream] = operation.due_ns

    def _joined_ns(self, member: int, operation: Operation) -> int:
        """Time at which a member called the collective; a root may finish before the others call, so it polls."""
        pause = SHORTEST_PAUSE
        while (stamp := self._timestamps.take(member, operation.stream, operation.sequence)) is None:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return stamp

    def _times_of(self, operation: Operation) -> tuple[int, int]:
        """Latency and transfer of an operation on the slowest link that it uses."""
        if self._link is None:
            return 0, 0
        message = [self._rank] if operation.peer is None else [self._rank, operation.peer]
        link = self._link.across(operation.group if operation.is_collective else message)
        return link.latency_ns, link.transfer_ns(operation.moved.traffic.busiest)


class Timestamps:
    """Times that travel beside the messages: each rank appends to a file of its rank, the other ranks read it.

    The sender writes a timestamp before it starts the real message, so the receiver of a message finds its timestamp.
    A record has 32 bytes, a divisor of the page size, so a reader never sees half a record.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._local_file = os.open(self._path(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._readers: dict[int, _StampReader] = {}

    def write(self, stream: int, key: int, time_ns: int) -> None:
        """Publish a time under `(stream, key)`."""
        os.write(self._local_file, _RECORD.pack(stream, key, time_ns, 0))

    def take(self, writer: int, stream: int, key: int) -> int | None:
        """Return the next unread time of rank `writer` under `(stream, key)`; None if there is none yet."""
        if writer not in self._readers:
            if not self._path(writer).exists():
                return None  # that rank has not begun
            self._readers[writer] = _StampReader(self._path(writer))
        return self._readers[writer].take(stream, key)

    def _path(self, rank: int) -> Path:
        return self._folder / f"timestamps-{rank}"


class _StampReader:
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
