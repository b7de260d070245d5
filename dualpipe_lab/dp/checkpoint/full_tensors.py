"""`write_checkpoint`: a checkpoint of full tensors, written by one process, tensor by tensor.

Chapter: book/dp/io.  In: types, shapes, a function that returns a tensor by name.  Out: a checkpoint of one step.
  memory   what the function holds to return one tensor, or one part of it
The checkpoint appears when it is complete; what a failed write has begun is removed.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from dualpipe_lab.dp.checkpoint import folder as folders
from dualpipe_lab.dp.checkpoint.file import Values, write_tensors
from dualpipe_lab.dp.checkpoint.index import INDEX, Index, StoredShard, TensorEntry
from dualpipe_lab.dp.checkpoint.reader import metadata_of, type_name
from dualpipe_lab.dp.checkpoint.region import full_region
from dualpipe_lab.dp.checkpoint.writers import file_of

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # type and shape of each tensor, by name
NO_VALUES: dict[str, Any] = {
    "sampler": None,
    "config": None,
    "scaler": None,
    "topology": None,
    "random": [],
    "num_steps": 0,
}


def write_checkpoint(
    folder: Path,
    step: int,
    kinds: Kinds,
    read: Callable[[str], Values],
    values: Mapping[str, Any],
    max_bytes: int = 5 * 10**9,
) -> Path:
    """Write a checkpoint whose shards are full tensors; return its path.

    Args:
        folder: the folder of checkpoints to write into.
        step: of the training.
        kinds: type and shape of every tensor, by its name in the checkpoint.
        read: returns a tensor by that name, or its parts along the first axis, one after the other.
        values: everything that is not a tensor.
        max_bytes: of a file; a larger tensor has a file of its own.

    Raises:
        CheckpointError: the step is saved already, or another save is under way.
    """
    existed = folder.exists()
    try:
        with folders.locked(folder):
            hidden = folder / folders.begin(folder, step)
            try:
                return _write(hidden, step, kinds, read, values, max_bytes)
            except BaseException:
                shutil.rmtree(hidden, ignore_errors=True)
                raise
    except BaseException:
        if not existed and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _write(
    hidden: Path, step: int, kinds: Kinds, read: Callable[[str], Values], values: Mapping[str, Any], max_bytes: int
) -> Path:
    save, sizes = folders.token_of(hidden.name), {}
    tensors: dict[str, TensorEntry] = {}
    for place, names in enumerate(share_out(kinds, max_bytes)):
        file = file_of(place)
        parts = {name: (kinds[name][0], (prod(kinds[name][1]),)) for name in names}
        written = write_tensors(hidden / file, parts, read, metadata_of(step, file, save))
        sizes[file] = written.size
        for name in names:
            dtype, shape = kinds[name]
            shard = StoredShard(file, full_region(shape), written.checksums[name])
            tensors[name] = TensorEntry(type_name(dtype), shape, [shard])
    index = Index(step, sizes, tensors, {**NO_VALUES, **values}, save)
    (hidden / INDEX).write_text(index.dumps(), encoding="utf-8")
    folders.sync(hidden / INDEX)
    folders.commit(hidden)
    return hidden.with_name(folders.name_of(step))


def share_out(kinds: Kinds, max_bytes: int) -> Iterator[list[str]]:
    """Share names out to files of at most so many bytes, in order; a larger tensor has a file of its own.

    >>> list(share_out({"a": (torch.int8, (3,)), "b": (torch.int8, (4,)), "c": (torch.int8, (2,))}, 6))
    [['a'], ['b', 'c']]
    """
    names: list[str] = []
    size = 0
    for name, (dtype, shape) in kinds.items():
        needed = prod(shape) * dtype.itemsize
        if names and size + needed > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += needed
    if names:
        yield names
