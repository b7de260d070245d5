"""One communication call, described: what the ledger counts, the link delays and the watchdog reports."""

import zlib
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from dualpipe_lab.world.record.traffic import Traffic

# each rank's tensor may have its own size, or there is none
UNEVEN = ("all_to_all", "all_to_all_single", "reduce_scatter", "barrier", "new_group")


class Communicator(NamedTuple):
    """A group as its members know it: two groups of the same ranks differ in torch's name, empty for the world."""

    ranks: tuple[int, ...]
    name: str = ""


@dataclass(slots=True)
class Operation:
    """A call of one rank: a message to or from `peer`, or a collective of the ranks in `group`.

    Attributes:
        name: the public name, e.g. `all_reduce`, `isend`.
        group: global ranks of the members, in group order.
        traffic: bytes sent and received by this rank, latency steps.
        shape, dtype: of this rank's tensor; no dtype for what has no tensor.
        root: global rank of a broadcast, reduce, gather or scatter; None elsewhere.
        peer: global rank of the other side of a message; None for a collective (or a receive from anybody).
        sent_to: for a collective that is no ring in the order of its ranks, the bytes addressed to each rank.
        tag: tag of a message.
        sequence: how many collectives of this communicator came before on this rank.
        tensor_bytes: of the full tensor, which a collective's ranks hold together or each.
        group_name: torch's name of the group, the same on all members; empty for the world.
        sends: for a message, whether it leaves this rank.
        slot: where the operation log keeps it; -1 if it does not.
        label: what the message carries, for the timeline; of a new group, its ranks.
        issued_ns, left_ns, due_ns: when it was called, when its link was free for it (None: at once), when it is over;
            a collective starts when all members have called it and the group's previous one is over.
    """

    name: str
    group: tuple[int, ...]
    traffic: Traffic
    shape: tuple[int, ...]
    peer: int | None = None
    tag: int = 0
    sequence: int = 0
    sends: bool | None = None
    label: str = ""
    issued_ns: int = 0
    left_ns: int | None = None
    due_ns: int = 0
    sent_to: dict[int, int] | None = None
    group_name: str = ""
    tensor_bytes: int = 0
    dtype: str = ""
    root: int | None = None
    slot: int = -1

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
        """The key under which both sides find this operation's stamps: group and tag, or group alone."""
        group = _number(self.group, self.group_name)
        return -1 - group if self.is_collective else (group << 31) | self.tag

    @property
    def signature(self) -> str:
        """What all members of a collective must agree on: `broadcast from rank 0 of 12 elements of float32`."""
        elements = "" if self.name in UNEVEN else f" of {prod(self.shape)} elements"
        return f"{self._rooted}{elements}" + (f" of {self.dtype}" if self.dtype else "")

    def describe(self) -> str:
        """`irecv from rank 3 tag 9 shape (4,) float32` or `all_reduce shape (4,) float32`."""
        shape = f"shape {self.shape} {self.dtype}".rstrip()
        if self.is_collective:
            return f"{self._rooted} {self.label or shape}"
        side = "to" if self.sends else "from"
        return f"{self.name} {side} {'any rank' if self.peer is None else f'rank {self.peer}'} tag {self.tag} {shape}"

    @property
    def _rooted(self) -> str:
        if self.root is None:
            return self.name
        return f"{self.name} {'from' if self.name in ('broadcast', 'scatter') else 'to'} rank {self.root}"


@cache
def _number(ranks: tuple[int, ...], name: str) -> int:
    """A number for a communicator that all its members compute alike."""
    return zlib.crc32(f"{ranks} {name}".encode()) & 0x7FFFFFFF
