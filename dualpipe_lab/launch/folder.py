"""The private folder of a launch (rendezvous, timestamps, logs, stacks), and the removal of those of killed kernels.

Its owner locks a file in it; the operating system releases the lock when the owner ends for any reason.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualpipe_lab.launch.operating_system import is_running

PREFIX = "dualpipe-lab-"


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder that only this user can read, and remove it at the end of the `with` block."""
    path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep() -> list[Path]:
    """Remove the folders of processes that no longer exist; return their paths."""
    candidates = [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*") if _is_abandoned(path)]
    for path in candidates:
        shutil.rmtree(path, ignore_errors=True)
    return candidates


def _is_abandoned(path: Path) -> bool:
    """Return whether the owner has ended; a process in another container has no number here."""
    owner = path.name.removeprefix(PREFIX).partition("-")[0]
    return owner.isdigit() and not is_running(int(owner)) and _is_unlocked(path)


def _is_unlocked(path: Path) -> bool:
    try:
        lock = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:
        return path.is_dir()
    except OSError:
        return False  # another user's folder
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
