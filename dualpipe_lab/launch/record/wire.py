"""Bytes on the wire: the bytes that left the sockets of a rank, for each operation.

Chapter: book/start/ranks-and-messages.  In: the process groups of a launch.  Out: bytes that the peers acknowledged.
Linux counts them for each TCP connection (`TCP_INFO`), and a process may read the counters of its descriptors.
Each kind of operation gets a separate process group with separate connections, so overlapping operations are counted
separately and the order of operations stays the same.  GLOO's headers are counted too: 50 to 5,000 bytes each.
Elsewhere: `ss -ti` shows the same counters; `nload`, `/proc/net/dev` those of a whole interface.
"""

import os
import socket
import struct
import time
from collections.abc import Container, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from dualpipe_lab.launch import operating_system
from dualpipe_lab.launch.record.operation import Communicator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MESSAGES = "isend"  # one kind for all messages: the `send` of one rank meets the `irecv` of another
KINDS = (
    MESSAGES,
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter_single",
    "scatter",
)
_UNACKNOWLEDGED, _ACKNOWLEDGED, _UNSENT = 24, 120, 144  # offsets in struct tcp_info of linux/tcp.h
_LISTENING = 10
_PATIENCE = 2.0  # seconds for the last bytes to be acknowledged


def obstacle(backend: str) -> str:
    """Reason why the wire cannot be read on this platform; empty if it can."""
    if backend != "gloo":
        return f"{backend} does not send through sockets of this process"
    return operating_system.wire_obstacle()


class Wire:
    """Connections of one rank, by kind of operation and group; every rank makes one at the same time."""

    def __init__(self, world_size: int, time_limit: timedelta | None = None) -> None:
        self._time_limit = time_limit
        self._groups: dict[tuple[str, Communicator], ProcessGroup] = {}
        self._sockets: dict[str, list[tuple[socket.socket, int]]] = {kind: [] for kind in KINDS}  # bytes at the start
        self.add(range(world_size), "")

    def add(self, ranks: Sequence[int], name: str, members_only: bool = False) -> None:
        """Make one process group per kind for these ranks; the callers of `new_group` call this too.

        A group of one rank sends nothing and gets none.
        """
        import torch.distributed as dist

        if len(ranks) < 2:
            return
        is_member = dist.get_rank() in ranks
        known = set(operating_system.socket_names().values()) if is_member else set()
        for kind in KINDS:
            group = dist.new_group(list(ranks), timeout=self._time_limit, use_local_synchronization=members_only)
            if is_member:
                found = _connections(known)
                known.update(found)
                self._groups[kind, Communicator(tuple(ranks), name)] = group
                self._sockets[kind] += [(opened, _settled(opened)) for opened in found.values()]

    def group(self, kind: str, ranks: tuple[int, ...], name: str) -> "ProcessGroup | None":
        """Process group for this kind of operation; None if `comm.new_group` has made none of these ranks."""
        return self._groups.get((kind, Communicator(ranks, name)))

    def close(self) -> None:
        """Close the sockets and destroy the groups, for a process that goes on after the launch."""
        import torch.distributed as dist

        for sockets in self._sockets.values():
            for opened, _ in sockets:
                opened.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)

    def sent(self) -> dict[str, int]:
        """Bytes sent so far, by kind, after the peers have acknowledged them."""
        return {
            kind: sum(_settled(opened) - start for opened, start in sockets) for kind, sockets in self._sockets.items()
        }


def _connections(known: Container[str] = ()) -> dict[str, socket.socket]:
    """A duplicate of each TCP connection of this process whose name is not known, by its name.

    A thread may close descriptors at any time: a number may be that of another socket a moment later, and a socket may
    have several.
    """
    found: dict[str, socket.socket] = {}
    for descriptor, name in operating_system.socket_names().items():
        opened = None if name in known or name in found else _duplicate(descriptor, name)
        if opened is not None:
            found[name] = opened
    return found


def _duplicate(descriptor: int, name: str) -> socket.socket | None:
    """A duplicate of a connection; None if the descriptor is no connection, or by now not that of this socket."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    if f"socket:[{os.fstat(copy).st_ino}]" != name:
        os.close(copy)
        return None
    opened = socket.socket(fileno=copy)
    is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
    if is_tcp and _info(opened)[0] != _LISTENING:
        return opened
    opened.close()
    return None


def _info(opened: socket.socket) -> bytes:
    return opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)


def _settled(opened: socket.socket) -> int:
    """Acknowledged bytes, after all bytes are acknowledged or the patience is over."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        info = _info(opened)
        under_way = struct.unpack_from("I", info, _UNACKNOWLEDGED)[0] + struct.unpack_from("I", info, _UNSENT)[0]
        if not under_way or time.monotonic() > deadline:
            return int(struct.unpack_from("Q", info, _ACKNOWLEDGED)[0])
        time.sleep(0.001)
