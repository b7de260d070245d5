"""Convert to and from the checkpoints of `torch.distributed.checkpoint`, in one process, tensor by tensor.

Chapter: book/dp/io.  In: a checkpoint of this library, or of torch.  Out: a checkpoint of the other.
  memory   one tensor as it is read, one as it is written
torch's index is a pickle; it is read by `TorchFiles`, which runs no code of it.  A target appears when it is complete.
Elsewhere: torch `torch.distributed.checkpoint.format_utils`, which has all tensors in memory.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dualpipe_lab.dp.checkpoint.folder import appearing, sync
from dualpipe_lab.dp.checkpoint.full_tensors import Kinds, write_checkpoint
from dualpipe_lab.dp.checkpoint.index import CheckpointError
from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.dp.checkpoint.torch_files import TorchFiles

VALUES = "dualpipe_lab.values"  # a tensor of bytes, so that nothing of ours is pickled


def to_torch(path: Path | str, target: Path | str) -> None:
    """Convert a checkpoint of this library to one of torch, with the same names.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the target is there already.
    """
    checkpoint = Checkpoint(path)
    values = json.dumps({"step": checkpoint.step, **checkpoint.index.values}).encode()
    packed = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    entries = checkpoint.index.tensors.items()
    kinds = {name: (getattr(torch, entry.dtype), entry.shape) for name, entry in entries}
    kinds[VALUES] = packed.dtype, tuple(packed.shape)
    write_torch(Path(target), kinds, lambda name: packed if name == VALUES else checkpoint.read(name))


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
        CheckpointError: the source is damaged or asks for code, no step is known, or the step is saved already.
    """
    files = TorchFiles(source)
    values = values_of(files)
    saved_step = values.pop("step", None)
    step = saved_step if step is None else step
    if step is None:
        raise CheckpointError(f"{source} does not say its step; pass step=")
    theirs = {rename(name) if rename else name: name for name in files.kinds if name != VALUES}
    kinds = {ours: files.kinds[name] for ours, name in theirs.items()}
    return write_checkpoint(Path(folder), step, kinds, lambda ours: files.read(theirs[ours]), values)


def values_of(files: TorchFiles) -> dict[str, Any]:
    """Return the step and the values that `to_torch` put beside the tensors; nothing for a checkpoint of others.

    Raises:
        CheckpointError: they are damaged.
    """
    if VALUES not in files.kinds:
        return {}
    try:
        found: dict[str, Any] = dict(json.loads(files.read(VALUES).numpy().tobytes()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{files.path}: {VALUES} is damaged ({error}); use another checkpoint") from error
    return found


def write_torch(
    target: Path, kinds: Kinds, read: Callable[[str], Tensor], beside: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a checkpoint of torch, reading one at a time.

    Args:
        target: the folder, which must not be there yet.
        kinds: type and shape of every tensor, by name.
        read: returns a tensor by name.
        beside: texts of further files of the folder.

    Raises:
        CheckpointError: the folder is there already.
    """
    if target.exists():
        raise CheckpointError(f"{target} is there already, and nothing is overwritten; name another folder")
    planned = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in kinds.items()}
    planner: Any = dcp.DefaultSavePlanner()  # plans with tensors that have no memory, and reads each when it is written
    planner.resolve_data = lambda item: read(item.index.fqn).detach()
    alone = warnings.catch_warnings(action="ignore", category=UserWarning)  # that one process does it is the intent
    try:
        with appearing(target) as hidden, alone:
            # torch keeps the tensors of a file until it is complete, so each has a file of its own
            writer = dcp.FileSystemWriter(hidden, single_file_per_rank=False, thread_count=1)
            dcp.save(planned, storage_writer=writer, planner=planner, no_dist=True)
            for name, text in (beside or {}).items():
                (hidden / name).write_text(text, encoding="utf-8")
                sync(hidden / name)
    except dcp.CheckpointException as error:  # torch's, around what `read` raised
        cause = next(iter(error.failures.values()))[0]
        raise cause from error
