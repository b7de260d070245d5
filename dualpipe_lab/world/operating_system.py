"""What differs between Linux and macOS, in one place: each thing has an answer for a system that lacks it.

  without a fork server   ranks are spawned (`server`)            loopback's name     `lo` or `lo0`
  without /proc, TCP_INFO bytes on the wire are not counted       without prctl       a rank ends with its pipe alone
  without SIGUSR1         a rank that cannot answer shows no line without PSS         memory is counted per process
Run on Linux only; the tests switch each of these off there.  Windows is refused where ranks start.
"""

import os
import signal
import sys
from typing import Any

NAME = sys.platform  # "linux", "darwin" or "win32"
DESCRIPTORS = "/proc/self/fd"  # one link per open descriptor of this process
STACK_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)  # asks a rank for the stacks of its threads
_SET_PARENT_DEATH_SIGNAL, _SET_TIMER_SLACK, _SET_CHILD_SUBREAPER = 1, 29, 36  # linux/prctl.h


def can_fork() -> bool:
    """Whether ranks can start at all: there are no such processes on Windows."""
    return NAME != "win32"


def loopback() -> str:
    """Name of the loopback interface: `lo` on Linux, `lo0` on macOS."""
    import socket  # `import dualpipe_lab` reads this module, and has milliseconds

    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


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


def _prctl(option: int, value: int) -> None:
    if NAME == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
