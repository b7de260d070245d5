"""What differs between Linux and macOS, in one place: each thing has an answer for a system that lacks it.

  without a fork server   ranks are spawned (`server`)            loopback's name     `lo` or `lo0`
  without /proc, TCP_INFO bytes on the wire are not counted       without prctl       a rank ends with its pipe alone
  without SIGUSR1         a rank that cannot answer shows no line without PSS         memory is counted per process
Run on Linux only; the tests switch each of these off there.  Windows is refused where ranks start.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

NAME = sys.platform  # "linux", "darwin", "win32", or "emscripten" in a browser
PROCESSES = "/proc"  # one folder per process of this host
DESCRIPTORS = "/proc/self/fd"  # one link per open descriptor of this process
STACK_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)  # asks a rank for the stacks of its threads
# end a training behind its step: Ctrl-C, a node that is taken away, a time limit that comes near
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
_IS_RUNNING = 0x40  # of an interface's flags, net/if.h
_SET_PARENT_DEATH_SIGNAL, _SET_TIMER_SLACK, _SET_CHILD_SUBREAPER = 1, 29, 36  # linux/prctl.h


def can_fork() -> bool:
    """Whether ranks can start at all: there are no such processes on Windows."""
    return NAME != "win32"


def in_browser() -> bool:
    """Whether this is a page's Python, which has no processes: the page ends the whole of it."""
    return NAME == "emscripten"


def loopback() -> str:
    """Name of the loopback interface: `lo` on Linux, `lo0` on macOS."""
    import socket  # `import dualpipe_lab` reads this module, and has milliseconds

    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def interface_addresses() -> dict[str, list[str]]:
    """IP addresses of the network interfaces that are running, by name; IPv6 without its scope."""
    import ctypes

    class IfAddrs(ctypes.Structure):  # struct ifaddrs, of which the first fields are the same on Linux and macOS
        pass

    types: dict[str, Any] = {
        "next": ctypes.POINTER(IfAddrs),
        "name": ctypes.c_char_p,
        "flags": ctypes.c_uint,
        "address": ctypes.c_void_p,
    }
    IfAddrs._fields_ = list(types.items())
    library = ctypes.CDLL(None, use_errno=True)
    library.freeifaddrs.argtypes = [ctypes.c_void_p]
    head = ctypes.POINTER(IfAddrs)()
    if library.getifaddrs(ctypes.byref(head)):
        raise OSError(ctypes.get_errno(), "the network interfaces of this host cannot be listed")
    found: dict[str, list[str]] = {}
    entry = head
    while entry:
        address = _address(entry.contents.address) if entry.contents.flags & _IS_RUNNING else None
        if address is not None:
            found.setdefault(entry.contents.name.decode(), []).append(address)
        entry = entry.contents.next
    library.freeifaddrs(head)
    return found


def _address(place: int | None) -> str | None:
    """The IP address in a `struct sockaddr`; None for another family, such as that of hardware addresses."""
    import ctypes
    import socket

    if place is None:
        return None
    family = ctypes.string_at(place, 2)
    kind = family[1] if NAME == "darwin" else int.from_bytes(family, sys.byteorder)  # there the first byte is a length
    if kind == socket.AF_INET:
        return socket.inet_ntop(kind, ctypes.string_at(place + 4, 4))
    return socket.inet_ntop(kind, ctypes.string_at(place + 8, 16)) if kind == socket.AF_INET6 else None


def wire_obstacle() -> str:
    """Reason why the bytes of this process's sockets cannot be read here; empty if they can."""
    if NAME != "linux":
        return f"the wire cannot be read on {NAME}, only on Linux"
    if not os.path.isdir(DESCRIPTORS):
        return f"the wire cannot be read without {DESCRIPTORS}; mount /proc in this container"
    return ""


def socket_names() -> dict[int, str]:
    """The sockets of this process: a name for each descriptor that is one."""
    found = {}
    for descriptor in os.listdir(DESCRIPTORS):
        try:
            name = os.readlink(f"{DESCRIPTORS}/{descriptor}")
        except OSError:  # the descriptor of the listing itself is closed by now
            continue
        if name.startswith("socket:"):
            found[int(descriptor)] = name
    return found


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, even while it holds the interpreter's lock (Linux)."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process adopt every descendant whose parent ends (Linux); `adopt=False` ends that."""
    _prctl(_SET_CHILD_SUBREAPER, int(adopt))


def sharpen_sleep() -> None:
    """Ask to be woken within a microsecond of the end of a sleep (Linux; its default allows 50 of them)."""
    _prctl(_SET_TIMER_SLACK, 1_000)


def memory_bytes(process: Any) -> int:
    """Memory of a `psutil.Process`, whose shared pages are divided among their users (Linux), or all its own pages."""
    full = process.memory_full_info()
    return int(full.pss if hasattr(full, "pss") else full.uss)


def peak_memory_bytes() -> int:
    """Most memory that this process has held at once, shared pages included; 0 where it cannot be read."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if NAME == "darwin" else peak * 1024  # macOS counts bytes, Linux kilobytes


def processes_with(variable: str) -> list[int]:
    """Numbers of the processes whose environment has this `NAME=value`; none without /proc."""
    found = []
    for path in Path(PROCESSES).glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def is_running(pid: int) -> bool:
    """Return whether a process with this number exists, under any user."""
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _prctl(option: int, value: int) -> None:
    if NAME == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
