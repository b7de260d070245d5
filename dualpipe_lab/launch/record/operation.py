"""Description of one communication call: the ledger counts it, the link delays it, the supervisor reports it.

GLOO ends the process (SIGABRT) when more bytes arrive than the tensor holds.  A dead rank cannot report its status, so
each rank logs its calls in the private folder of the launch, and `mismatch` compares the logs.
"""

import marshal
import mmap
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from dualpipe_lab.launch.record.traffic import Traffic

SLOTS, SLOT_BYTES = 64, 1_024  # of the log
BEGUN, ENDED = b"B", b"E"
RULE = "a tensor needs the same shape and dtype on every rank that takes part"
# each rank's tensor may have its own size, or there is none
UNEVEN = ("all_to_all_single", "barrier", "new_group")


class Communicator(NamedTuple):
    """A group of ranks; groups of the same ranks differ in torch's name, which is empty for the world."""

    ranks: tuple[int, ...]
    name: str = ""


class Moved(NamedTuple):
    """Bytes of one call on this rank.

    Attributes:
        traffic: bytes sent and received, latency steps.
        sent_to: bytes sent to each rank; None for a ring in the order of the ranks.
        addressed: bytes sent to each rank where GLOO has no ring and takes another way; None elsewhere.
    """

    traffic: Traffic
    sent_to: dict[int, int] | None = None
    addressed: dict[int, int] | None = None


@dataclass(eq=False)
class Operation:
    """One call on one rank: a message to or from `peer`, or a collective of the ranks in `group`.

    Attributes:
        name: the public name, e.g. `all_reduce`, `isend`.
        group: global ranks of the members, in group order.
        shape, dtype: of this rank's tensor; the dtype of a barrier is empty.
        root: global rank of a broadcast, reduce, gather or scatter; None elsewhere.
        peer: global rank at the other end of a message; None for a collective or a receive from any rank.
        tag: tag of a message.
        sequence: number of earlier collectives of this communicator on this rank; of a receive, number of earlier
            receives from this peer with this group and tag, which is the number of the message that it gets.
        tensor_bytes: bytes of the full tensor.
        derive: computes `moved` from the other fields when somebody reads it; None for an operation of no ledger.
        group_name: torch's name of the group, the same on all members; empty for the world.
        sends: True for a send, False for a receive, None for a collective.
        slot: place in the operation log; -1 if it is not logged.
        label: name of the message in the timeline; the ranks of a new group.
        issued_ns, left_ns, due_ns: times of the call, of the start on the emulated link (None: at once) and of the end;
            a collective starts when all members have called it and the group's previous one has ended.
    """

    name: str
    group: tuple[int, ...]
    shape: tuple[int, ...]
    peer: int | None = None
    tag: int = 0
    sequence: int = 0
    sends: bool | None = None
    label: str = ""
    issued_ns: int = 0
    left_ns: int | None = None
    due_ns: int = 0
    group_name: str = ""
    tensor_bytes: int = 0
    dtype: str = ""
    root: int | None = None
    slot: int = -1
    derive: Callable[[Any], Moved] | None = None

    @cached_property
    def moved(self) -> Moved:
        """Bytes of this call."""
        return Moved(Traffic(0, 0, 0)) if self.derive is None else self.derive(self)

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of the group take part."""
        return self.sends is None

    @property
    def communicator(self) -> Communicator:
        """Ranks and name of the group."""
        return Communicator(self.group, self.group_name)

    @property
    def stream(self) -> int:
        """Key of this operation's timestamps on all ranks: group and tag for a message, group for a collective."""
        group = _number(self.group, self.group_name)
        return -1 - group if self.is_collective else (group << 31) | self.tag

    @property
    def signature(self) -> str:
        """Properties that all members of a collective must share: `broadcast from rank 0 of 12 elements of float32`."""
        return signature_of(self.name, self.root, self.shape, self.dtype)

    def describe(self) -> str:
        """`irecv from rank 3 tag 9 shape (4,) float32` or `all_reduce shape (4,) float32`."""
        shape = f"shape {self.shape} {self.dtype}".rstrip()
        if self.is_collective:
            return f"{_rooted(self.name, self.root)} {self.label or shape}"
        side = "to" if self.sends else "from"
        return f"{self.name} {side} {'any rank' if self.peer is None else f'rank {self.peer}'} tag {self.tag} {shape}"

    def destinations(self, rank: int) -> dict[int, int]:
        """Bytes that this rank sends to each other one."""
        moved = self.moved
        known = moved.sent_to if moved.addressed is None else moved.addressed
        if known is None:
            known = {next_in_ring(self.group, rank) if self.peer is None else self.peer: moved.traffic.sent}
        return {peer: num_bytes for peer, num_bytes in known.items() if num_bytes}


@cache
def signature_of(name: str, root: int | None, shape: tuple[int, ...], dtype: str) -> str:
    """Return `Operation.signature` of these fields."""
    elements = "" if name in UNEVEN else f" of {prod(shape)} elements"
    return f"{_rooted(name, root)}{elements}" + (f" of {dtype}" if dtype else "")


def _rooted(name: str, root: int | None) -> str:
    if root is None:
        return name
    return f"{name} {'from' if name in ('broadcast', 'scatter') else 'to'} rank {root}"


@cache
def next_in_ring(ranks: tuple[int, ...], rank: int) -> int:
    """The rank to which one sends all its bytes in a ring.

    >>> next_in_ring((0, 2, 3), 3)
    0
    """
    return ranks[(ranks.index(rank) + 1) % len(ranks)]


@cache
def _number(ranks: tuple[int, ...], name: str) -> int:
    return zlib.crc32(f"{ranks} {name}".encode()) & 0x7FFFFFFF


_LOGGED = (
    *("name", "group", "group_name", "shape", "dtype", "tensor_bytes"),
    *("root", "peer", "tag", "label", "sends", "sequence"),
)
logged_fields = attrgetter(*_LOGGED)


def open_log(path: Path) -> mmap.mmap:
    """The last `SLOTS` operations of one rank, in a memory-mapped file; the recorder writes it."""
    with open(path, "w+b") as file:
        file.truncate(SLOTS * SLOT_BYTES)
        return mmap.mmap(file.fileno(), SLOTS * SLOT_BYTES)


def read_log(path: Path) -> list[tuple[bool, Operation]]:
    """The operations in a rank's log, and whether each has ended; empty if there is no log."""
    data = path.read_bytes() if path.exists() else b""
    slots = (data[start : start + SLOT_BYTES] for start in range(0, len(data), SLOT_BYTES))
    return [
        (slot[:1] == ENDED, Operation(**dict(zip(_LOGGED, marshal.loads(slot[1:]), strict=True))))  # noqa: S302
        for slot in slots
        if slot[:1] != b"\0"
    ]


def mismatch(logs: dict[int, list[tuple[bool, Operation]]], dead: int) -> str:
    """The call of a rank that GLOO ended and the call that did not fit it; empty if the rank was not communicating."""
    under_way = [operation for has_ended, operation in logs.get(dead, []) if not has_ended]
    for mine in under_way:
        for rank, entries in logs.items():
            theirs = next((other for _, other in entries if rank != dead and _clash(mine, other, dead, rank)), None)
            if theirs:
                return f"rank {dead} called {_call(mine)}, rank {rank} {_call(theirs)}; {RULE}"
    if not under_way:
        return ""
    waited = " and ".join(operation.describe() for operation in under_way[:3])
    return f"more bytes came than its tensor has room for, in {waited}; {RULE}"


def _clash(mine: Operation, theirs: Operation, dead: int, rank: int) -> bool:
    if mine.stream != theirs.stream:
        return False
    if mine.sends is None:
        return mine.sequence == theirs.sequence and mine.signature != theirs.signature
    meant = theirs.peer == dead and mine.peer in (rank, None)
    return bool(meant and mine.sends is False and theirs.sends and theirs.tensor_bytes > mine.tensor_bytes)


def _call(operation: Operation) -> str:
    return operation.signature if operation.sends is None else operation.describe()
