"""The folder of checkpoints: how one appears whole or not at all, and how old ones go.

Chapter: book/dp/io.  In: a folder, a step.  Out: names, renames.
A save writes into a hidden folder, makes the disk keep every file (fsync), and renames the folder.  A rename is one
step for the file system: whatever moment a process dies at, the folder bears either name.  A removal begins with a
rename too, so that what has its proper name is always whole.  One save at a time: a lock says so, which the operating
system takes from a dead process.  Where a file system has no locks, the token in the hidden name keeps two saves apart.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualpipe_lab.dp.checkpoint.index import CheckpointError

_SAVING, _REMOVING, _LOCK = ".saving-", ".removing-", ".saving.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems


def name_of(step: int) -> str:
    """The name of a step's folder.

    >>> name_of(10)
    'step-00000010'
    """
    return f"step-{step:08d}"


def saved_steps(folder: Path | str) -> list[int]:
    """The steps of which a folder holds a checkpoint, in order."""
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8,})", name)))


def latest(folder: Path | str) -> Path:
    """The checkpoint of the highest step.

    Raises:
        CheckpointError: there is none.
    """
    steps = saved_steps(folder)
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {folder}; save one, or name another folder")
    return Path(folder) / name_of(steps[-1])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other saves out of a folder, in this process and in others.

    Raises:
        CheckpointError: another save is under way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    while True:
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            _lock(lock, folder)
            if _is_at(path, lock):  # else its holder has just removed it: it keeps nobody out any more
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(lock)


def begin(folder: Path, step: int) -> Path:
    """Make and return the hidden folder of a save, and clear away what broken-off saves and removals left.

    Call it with the folder locked.

    Raises:
        CheckpointError: the step is saved already.
    """
    if step in saved_steps(folder):
        raise CheckpointError(f"{folder / name_of(step)} is there already; remove it, or save into another folder")
    for name in os.listdir(folder):
        if name.startswith((f"{_SAVING}step-", f"{_REMOVING}step-")):
            shutil.rmtree(folder / name)
    hidden = folder / f"{_SAVING}{name_of(step)}-{secrets.token_hex(8)}"
    hidden.mkdir()
    return hidden


def token_of(hidden: Path) -> str:
    """What tells a save from all others, also of the same step."""
    return hidden.name.rpartition("-")[2]


def commit(hidden: Path) -> Path:
    """Give a complete save its name."""
    final = hidden.with_name(hidden.name.removeprefix(_SAVING).rpartition("-")[0])
    sync(hidden)
    os.rename(hidden, final)
    sync(final.parent)
    return final


def rotate(folder: Path, step: int, keep: int) -> None:
    """Remove all checkpoints up to that of `step` but the last `keep`; later ones, of an earlier run, stay."""
    for step in [saved for saved in saved_steps(folder) if saved <= step][:-keep]:
        dying = folder / f"{_REMOVING}{name_of(step)}"
        os.rename(folder / name_of(step), dying)
        shutil.rmtree(dying)


def sync(path: Path) -> None:
    """Return when the disk has what was written to a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"another save is under way in {folder}; wait until it is done, or save into another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
