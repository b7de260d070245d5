"""The processes beside a rank, on its node: how one ended, where one hangs, and whether a distant one lives.

In: `Member`s.  Out: exit codes, stacks, and the addresses at which a kernel still answers for a process.
An exit code is the parent's to know; a handle on the process tells when it ends, and for a moment /proc tells the code.
A process that holds the interpreter's lock, or that a signal has stopped, has a kernel that accepts its connections.
Elsewhere: the table that torchrun's agent prints, of the ranks of its own node.
"""

import os
import selectors
import shutil
import signal
import socket
import time
import zlib
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import dualpipe_lab
from dualpipe_lab.world import operating_system
from dualpipe_lab.world.cluster.status_store import STOPPED, Death, Member
from dualpipe_lab.world.folder import remove_of

STACK_FILE, LOG_FILE = "stack", "operations"
_BACKLOG = 128  # connections that nobody accepts
_DUMP_SECONDS = 0.3  # for a process to write its stacks
_FIRST_FRAMES = tuple(
    f'  File "{Path(dualpipe_lab.__file__).parent}/world/{file}"' for file in ("torchrun.py", "rank.py")
)


class OpenPort:
    """A socket on which this process listens and accepts nothing: others see whether the process lives."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(_BACKLOG)
        self.address, self.port = address, int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def answering(members: Iterable[Member], seconds: float) -> set[int]:
    """Ranks whose kernels accept a connection within so many seconds; the others have ended or cannot be reached."""
    found: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for member in members:
            family = socket.AF_INET6 if ":" in member.address else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            connection.connect_ex((member.address, member.port))
            selector.register(connection, selectors.EVENT_WRITE, member.rank)
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                opened = key.fileobj
                assert isinstance(opened, socket.socket)
                if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.add(key.data)
                selector.unregister(opened)
                opened.close()
        for key in list(selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return found


class Neighbours:
    """The other ranks of this node, and the agent that started them.

    Args:
        members: the other ranks.
        agent: process number of the starter; None if its end means nothing.
    """

    def __init__(self, members: list[Member], agent: int | None) -> None:
        self.members = {member.rank: member for member in members}
        opened = {member.rank: operating_system.process_handle(member.pid) for member in members}
        self.handles = {handle: rank for rank, handle in opened.items() if handle is not None}
        self.agent_handle = None if agent is None else operating_system.process_handle(agent)
        self._ended: set[int] = set()

    def death(self, handle: int) -> tuple[int, Death]:
        """The rank whose process has ended, and how."""
        rank = self.handles[handle]
        self._ended.add(rank)
        member = self.members[rank]
        code = operating_system.exit_code(member.pid, handle)
        return rank, Death(code, stack_of(member), packed_log(Path(member.folder)))

    def has_left(self, rank: int) -> bool:
        """Whether a rank whose process has ended took its folder with it: it left by itself, and did not die."""
        return not Path(self.members[rank].folder).exists()

    def ask_stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """The stacks of ranks that answer nothing, by a signal: `faulthandler` needs no lock; STOPPED if it cannot."""
        asked = [self.members[rank] for rank in ranks if rank in self.members]
        stopped = {member.rank for member in asked if operating_system.is_stopped(member.pid)}
        number = operating_system.CLUSTER_STACK_SIGNAL
        if number is None or not asked:
            return dict.fromkeys((member.rank for member in asked), "")
        for member in asked:
            if member.rank not in stopped:
                self._signal(member.rank, number)
        time.sleep(_DUMP_SECONDS)
        return {member.rank: STOPPED if member.rank in stopped else stack_of(member) for member in asked}

    def kill(self, ranks: Collection[int]) -> None:
        """End ranks of this node that cannot end by themselves."""
        for rank in ranks:
            self._signal(rank, signal.SIGKILL)
            if rank in self.members:
                self._ended.add(rank)

    def close(self) -> None:
        """Close the handles, and remove the folders of processes that have ended."""
        for handle in (*self.handles, *(() if self.agent_handle is None else (self.agent_handle,))):
            os.close(handle)
        for rank in self._ended:
            folder = Path(self.members[rank].folder)
            shutil.rmtree(folder, ignore_errors=True)  # a child that the rank has forked may hold its lock
            remove_of(self.members[rank].pid, folder.parent)

    def _signal(self, rank: int, number: int) -> None:
        for handle in (handle for handle, other in self.handles.items() if other == rank):
            with suppress(OSError):
                signal.pidfd_send_signal(handle, number)


def stack_of(member: Member) -> str:
    """The part of the member's newest stack dump that shows the user's function and the calls inside of it."""
    path = Path(member.folder) / STACK_FILE
    return user_part(path.read_text(errors="replace")) if path.exists() else ""


def user_part(dump: str) -> str:
    """As `failure_report.user_stack`, for a function that `torchrun.run` called.

    >>> user_part("Fatal Python error: Aborted") == "Fatal Python error: Aborted"
    True
    """
    headline = dump.partition("\n\n")[0] if dump.startswith("Fatal") else ""
    for block in reversed(dump.split("\n\n")):
        for first in _FIRST_FRAMES:
            stack, found, _ = block.partition(first)
            if found and "in _listen" not in block:
                return f"{headline}\n{stack.rstrip()}".strip()
    return headline


def packed_log(folder: Path) -> bytes:
    """The compressed operation log of a rank; empty if there is none."""
    path = folder / LOG_FILE
    try:
        return zlib.compress(path.read_bytes(), 1)
    except OSError:
        return b""
