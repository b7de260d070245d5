"""A tree of processes: all of it, also those that tried to leave, its memory, and its end.

On Linux a process can adopt the orphans among its descendants, so that a double fork does not escape.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans(adopt: bool = True) -> None:
    """Make this process the parent of every descendant whose own parent ends (Linux), or no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def die_with_the_parent() -> None:
    """Let this process be killed when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """All living descendants of this process."""
    return [process for process in psutil.Process().children(recursive=True) if _lives(process)]


def memory_mib(processes: Iterable[psutil.Process]) -> float:
    """Memory of the processes, in MiB; pages that they share count once (a forked rank shares nearly all of torch)."""
    total = 0
    for process in processes:
        with suppress(psutil.Error, AttributeError):
            total += process.memory_full_info().pss
    return total / 2**20


def resident_mib(processes: Iterable[psutil.Process]) -> float:
    """An upper bound of `memory_mib` that is quick to have."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total / 2**20


def end(spared: frozenset[int] = frozenset(), seconds: float = 15, whole: bool = False) -> int:
    """Kill all descendants but the spared; return how many there were.  Stops them first: a stopped one cannot fork.

    `whole`: what descends from a spared child is spared too.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = _strangers(spared) if whole else [found for found in descendants() if found.pid not in spared]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                with suppress(psutil.Error, ProcessLookupError):
                    process.send_signal(number)
        seen |= {process.pid for process in found}
        reap(spared)
        if not found:
            break
        time.sleep(0.005)
    return len(seen)


def reap(spared: frozenset[int] = frozenset()) -> None:
    """Collect dead children, adopted ones too; the spared are for whoever started them."""
    for child in psutil.Process().children():
        if child.pid not in spared:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def _strangers(known: frozenset[int]) -> list[psutil.Process]:
    """The children that are not known, and what descends from them."""
    found = []
    for child in psutil.Process().children():
        if child.pid not in known and _lives(child):
            with suppress(psutil.Error):
                found += [child, *child.children(recursive=True)]
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
