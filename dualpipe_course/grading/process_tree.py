"""The process tree below this process: its members, their memory, and their end.

In: this process.  Out: its descendants as `psutil.Process`.
On Linux a process can adopt its orphaned descendants, so that a double fork does not leave the tree.
"""

import time
from collections.abc import Iterable
from contextlib import suppress

from dualpipe_lab._optional import extra
from dualpipe_lab.launch import operating_system

with extra("grading", "grading"):
    import psutil

adopt_orphans, die_with_parent = operating_system.adopt_orphans, operating_system.die_with_parent


def descendants() -> list[psutil.Process]:
    """Return all living descendants of this process."""
    return [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]


def memory_mib(processes: Iterable[psutil.Process]) -> float:
    """Return the memory of the processes in MiB; a page that several of them share counts once."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += operating_system.memory_bytes(process)
    return total / 2**20


def resident_mib(processes: Iterable[psutil.Process]) -> float:
    """Return the sum of resident memory in MiB, a cheap upper bound of `memory_mib`."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total / 2**20


def kill_descendants(spared: frozenset[int] = frozenset(), seconds: float = 15, subtrees: bool = False) -> int:
    """Kill all descendants except the spared pids; return the number of killed processes.

    Processes are suspended first, because a suspended process cannot fork.
    `subtrees`: spare the descendants of a spared child too.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = (
            _unspared_subtrees(spared) if subtrees else [found for found in descendants() if found.pid not in spared]
        )
        for action in (psutil.Process.suspend, psutil.Process.kill):
            for process in found:
                with suppress(psutil.Error, ProcessLookupError):
                    action(process)
        seen |= {process.pid for process in found}
        reap(spared)
        if not found:
            break
        time.sleep(0.005)
    return len(seen)


def reap(spared: frozenset[int] = frozenset()) -> None:
    """Collect the exit codes of dead children, adopted ones too, except of the spared pids."""
    children = [child for child in psutil.Process().children() if child.pid not in spared]
    psutil.wait_procs(children, timeout=0)


def _unspared_subtrees(spared: frozenset[int]) -> list[psutil.Process]:
    """Return the children that are not spared, and their descendants."""
    found = []
    for child in psutil.Process().children():
        if child.pid not in spared and _is_alive(child):
            with suppress(psutil.Error):
                found += [child, *child.children(recursive=True)]
    return found


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
