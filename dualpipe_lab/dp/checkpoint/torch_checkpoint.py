"""Convert to and from the checkpoints of `torch.distributed.checkpoint`, in one process.

Chapter: book/dp/io.  In: a checkpoint of this library, or of torch.  Out: a checkpoint of the other.
torch's index is a pickle, which can run code when it is read: convert only what you trust.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dualpipe_lab.dp.checkpoint import folder as folders
from dualpipe_lab.dp.checkpoint.file import write_tensors
from dualpipe_lab.dp.checkpoint.index import INDEX, CheckpointError, Index, StoredShard, TensorEntry
from dualpipe_lab.dp.checkpoint.reader import Checkpoint, metadata_of, type_name
from dualpipe_lab.dp.checkpoint.region import full_region

_VALUES = "dualpipe_lab.values"  # a tensor of bytes, so that nothing of ours is pickled
_FILE = "rank-00000.safetensors"
_NO_VALUES: dict[str, Any] = {
    "sampler": None,
    "config": None,
    "scaler": None,
    "topology": None,
    "random": [],
    "num_steps": 0,
}


def to_torch(path: Path | str, target: Path | str) -> None:
    """Convert a checkpoint of this library to one of torch, with the same names; the model must fit into memory.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    checkpoint = Checkpoint(path)
    state = {name: checkpoint.read(name) for name in checkpoint.names()}
    values = json.dumps({"step": checkpoint.step, **checkpoint.index.values}).encode()
    state[_VALUES] = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that one process does it is the intent
        dcp.save(state, checkpoint_id=str(target), no_dist=True)


def from_torch(
    source: Path | str, folder: Path | str, step: int | None = None, rename: Callable[[str], str] | None = None
) -> Path:
    """Convert a checkpoint of torch to one of this library in `folder`, and return its path.

    Args:
        source: the folder of torch's checkpoint.
        folder: the folder of checkpoints to write into.
        step: of the training; not needed if `to_torch` made the source.
        rename: returns the name of each tensor here: `parameter/...`, `exp_avg/...`, `exp_avg_sq/...`, `buffer/...`.

    Raises:
        CheckpointError: no step is known, or the step is saved already.
    """
    wanted = dcp.FileSystemReader(str(source)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in wanted.items()
        if hasattr(entry, "properties")
    }
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.load(state, checkpoint_id=str(source), no_dist=True)
    values = dict(_NO_VALUES)
    if _VALUES in state:
        values = json.loads(state.pop(_VALUES).numpy().tobytes())
        saved_step = values.pop("step")
        step = saved_step if step is None else step
    if step is None:
        raise CheckpointError(f"{source} does not say its step; pass step=")
    return _write(
        {rename(name) if rename else name: tensor for name, tensor in state.items()}, Path(folder), step, values
    )


def _write(state: dict[str, Tensor], folder: Path, step: int, values: dict[str, Any]) -> Path:
    with folders.locked(folder):
        hidden = folders.begin(folder, step)
        save = folders.token_of(hidden)
        parts = {name: (tensor.dtype, (tensor.numel(),)) for name, tensor in state.items()}
        written = write_tensors(hidden / _FILE, parts, state.__getitem__, metadata_of(step, _FILE, save))
        tensors = {}
        for name, tensor in state.items():
            shape = tuple(tensor.shape)
            shard = StoredShard(_FILE, full_region(shape), written.checksums[name])
            tensors[name] = TensorEntry(type_name(tensor.dtype), shape, [shard])
        (hidden / INDEX).write_text(Index(step, {_FILE: written.size}, tensors, values, save).dumps())
        folders.sync(hidden / INDEX)
        return folders.commit(hidden)
