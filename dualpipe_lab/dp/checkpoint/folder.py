"""The folder of checkpoints: how one appears whole or not at all, and how old ones go.

Chapter: book/dp/io.  In: a folder, a step.  Out: names, renames.
A save writes into a hidden folder, makes the disk keep every file (fsync), and renames the folder.  A rename is one
step for the file system: whatever moment a process dies at, the folder bears either name.  A removal begins with a
rename too, so that what has its proper name is always whole.
"""

import os
import re
import shutil
from pathlib import Path

from dualpipe_lab.dp.checkpoint.index import CheckpointError

_SAVING, _REMOVING = ".saving-", ".removing-"


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


def hidden_of(folder: Path, step: int) -> Path:
    """Where a step is written before it has its name."""
    return folder / f"{_SAVING}{name_of(step)}"


def begin(folder: Path, step: int) -> None:
    """Make the hidden folder of a save, and clear away what broken-off saves and removals left.

    Raises:
        CheckpointError: the step is saved already.
    """
    if step in saved_steps(folder):
        raise CheckpointError(f"{folder / name_of(step)} is there already; remove it, or save into another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        if name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(folder / name)
    hidden_of(folder, step).mkdir()


def commit(hidden: Path) -> Path:
    """Give a complete save its name."""
    final = hidden.with_name(hidden.name.removeprefix(_SAVING))
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
