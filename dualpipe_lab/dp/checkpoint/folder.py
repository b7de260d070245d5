"""The folder of checkpoints: a save is visible completely or not at all, and old checkpoints are removed.

Chapter: book/dp/io.  In: a folder, a step.  Out: names, renames.
A save writes into a hidden folder, waits until every file is on disk (fsync), and renames the folder.  A rename is
atomic: whenever a process dies, the folder has one name or the other.  A removal begins with a rename too, so a folder
with its final name is always complete.  A lock allows one save at a time; the operating system releases the lock of a
dead process.  On a file system without locks, the token in the hidden name keeps two saves apart.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualpipe_lab.dp.checkpoint.reader import INDEX, CheckpointError, name_of, step_of

_SAVING, _REMOVING, _LOCK = ".saving-", ".removing-", ".saving.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems


def saved_steps(folder: Path | str) -> list[int]:
    """Return the steps that have a checkpoint in a folder, in order."""
    names = os.listdir(folder) if Path(folder).is_dir() else []
    return sorted(step for name in names if (step := step_of(name)) is not None)


def latest(folder: Path | str) -> Path:
    """Return the path of the checkpoint with the highest step.

    Raises:
        CheckpointError: there is none, or that one is incomplete, as a copy is that was cut short.
    """
    paths = [Path(folder) / name_of(step) for step in reversed(saved_steps(folder))]
    if not paths:
        raise CheckpointError(f"there is no checkpoint in {folder}; save one, or name another folder")
    if not (paths[0] / INDEX).is_file():
        whole = next((path for path in paths if (path / INDEX).is_file()), None)
        left = "there is none before it" if whole is None else f"the one before it is {whole}"
        raise CheckpointError(f"{paths[0]} is incomplete, {INDEX} is missing; remove it or copy it again ({left})")
    return paths[0]


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Give a folder to write into that becomes `target` when the block has ended; a failed block leaves nothing.

    It lies beside the target, as `<name>.part`; what a process that died has left under that name is removed.
    """
    hidden = target.with_name(target.name + ".part")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        yield hidden
        sync(hidden)
        os.replace(hidden, target)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    sync(target.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other saves, of this process and of others.

    Raises:
        CheckpointError: another save is under way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    while True:
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            _lock(lock, folder)
            if _is_at(path, lock):  # else its holder has just removed the file, and it locks no longer
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(lock)


def begin(folder: Path, step: int) -> str:
    """Make the hidden folder of a save and return its name; remove the remains of interrupted saves and removals.

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
    return hidden.name


def token_of(begun: str) -> str:
    """Return the token of a save, which differs from that of every other save, also of the same step."""
    return begun.rpartition("-")[2]


def commit(hidden: Path) -> Path:
    """Rename the hidden folder of a complete save to its final name."""
    final = hidden.with_name(hidden.name.removeprefix(_SAVING).rpartition("-")[0])
    sync(hidden)
    os.rename(hidden, final)
    sync(final.parent)
    return final


def rotate(folder: Path, step: int, keep: int) -> None:
    """Remove all but the last `keep` checkpoints up to `step`; later steps, of an earlier run, stay."""
    for step in [saved for saved in saved_steps(folder) if saved <= step][:-keep]:
        dying = folder / f"{_REMOVING}{name_of(step)}"
        os.rename(folder / name_of(step), dying)
        shutil.rmtree(dying)


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on disk."""
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
    """Return whether an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
