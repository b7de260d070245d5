"""`to_torch` and `from_torch`: checkpoints of `torch.distributed.checkpoint`, which torch itself reads and writes.

Chapter: book/dp/io.  In: a checkpoint of this library, or of torch.  Out: a checkpoint of the other.
  memory      one tensor as it is read, one as it is written
  .metadata   torch's index is a pickle, which could run any function: names other than torch's own records are refused
Elsewhere: torch `torch.distributed.checkpoint.format_utils`, which has all tensors in memory.
"""

import json
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import EnumMeta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dualpipe_lab.dp.checkpoint.file import Kinds
from dualpipe_lab.dp.checkpoint.folder import appearing, sync
from dualpipe_lab.dp.checkpoint.reader import Checkpoint, CheckpointError
from dualpipe_lab.dp.checkpoint.session import write_checkpoint

METADATA = ".metadata"
VALUES = "dualpipe_lab.values"  # a tensor of bytes, so that nothing of ours is pickled
_RECORDS = {  # what an index may name, by module
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorStorageMetadata "
    "TensorProperties _MEM_FORMAT_ENCODING ChunkStorageMetadata BytesStorageMetadata",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    **dict.fromkeys(("pathlib", "pathlib._local"), "Path PosixPath PurePosixPath"),
}


class TorchCheckpoint:
    """The tensors of a checkpoint of torch, read one by one.

    Attributes:
        path: of its folder.
        kinds: type and shape of every tensor, by name; what was saved beside tensors is left out.

    Raises:
        CheckpointError: `.metadata` is missing, damaged, or asks for code.
    """

    def __init__(self, path: Path | str) -> None:
        self.path, self.kinds = Path(path), dict[str, tuple[torch.dtype, tuple[int, ...]]]()
        self._reader = _TorchReader(self.path)
        for name, entry in self._reader.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                self.kinds[name] = entry.properties.dtype, tuple(entry.size)
                held, numel = sum(prod(chunk.sizes) for chunk in entry.chunks), prod(entry.size)
                if held != numel:
                    raise CheckpointError(f"{path}: the chunks of tensor {name} have {held} elements of {numel}")

    def read(self, name: str) -> Tensor:
        """Return a full tensor; CheckpointError if it cannot be read."""
        dtype, shape = self.kinds[name]
        found = torch.empty(shape, dtype=dtype)
        try:
            with _alone():
                dcp.load({name: found}, storage_reader=self._reader, no_dist=True)
        except dcp.CheckpointException as error:  # torch's, around what its reader raised
            told = re.split(r"\n|\. ", str(next(iter(error.failures.values()))[0]))[0]  # its first sentence
            raise CheckpointError(f"{self.path}: tensor {name} cannot be read ({told})") from error
        return found

    def values(self) -> dict[str, Any]:
        """Return the step and the values that `to_torch` put beside the tensors; nothing for a checkpoint of others."""
        if VALUES not in self.kinds:
            return {}
        try:
            return dict(json.loads(self.read(VALUES).numpy().tobytes()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.path}: {VALUES} is damaged ({error}); use another checkpoint") from error


class _TorchReader(dcp.FileSystemReader):  # type: ignore[misc]
    """torch's reader of files, which unpickles the index once, and no names but those of torch's records."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        file = path / METADATA
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, so {path} is no checkpoint of torch")
        try:
            with file.open("rb") as source:
                self.metadata: Metadata = _IndexUnpickler(source).load()
            if not isinstance(self.metadata, Metadata):
                raise TypeError(f"it holds {type(self.metadata).__name__}")
        except CheckpointError as error:
            raise CheckpointError(f"{file} is a pickle that cannot be trusted: {error}") from error
        except Exception as error:  # a damaged pickle may raise anything
            told = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{file} is damaged ({told}); use another checkpoint") from error

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return the index."""
        return self.metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a record of torch's index, or a type of numbers; CheckpointError for any other name."""
        if name in _RECORDS.get(module, "").split():
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(f"it asks for {module}.{name}, which is no part of torch's index; nothing of it was run")


def _member(record: Any, name: str) -> Any:
    """Stand for `getattr`, with which Python 3.11.2 pickles a member of an enumeration."""
    if not isinstance(record, EnumMeta):
        raise CheckpointError(f"it asks for {name} of {record}, which is no enumeration; nothing of it was run")
    return record[name]


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
    found = TorchCheckpoint(source)
    values = found.values()
    saved_step = values.pop("step", None)
    step = saved_step if step is None else step
    if step is None:
        raise CheckpointError(f"{source} does not say its step; pass step=")
    for group in values.get("param_groups") or []:
        if rename and "param_names" in group:
            renamed = (rename(f"parameter/{name}") for name in group["param_names"])
            group["param_names"] = [name.removeprefix("parameter/") for name in renamed]
    theirs = {rename(name) if rename else name: name for name in found.kinds if name != VALUES}
    kinds = {ours: found.kinds[name] for ours, name in theirs.items()}
    return write_checkpoint(Path(folder), step, kinds, lambda ours: found.read(theirs[ours]), values)


def write_torch(
    target: Path, kinds: Kinds, read: Callable[[str], Tensor], beside: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a checkpoint of torch, reading one at a time; `beside`: texts of further files, by name."""
    if target.exists():
        raise CheckpointError(f"{target} is there already, and nothing is overwritten; name another folder")
    planned = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in kinds.items()}
    planner: Any = dcp.DefaultSavePlanner()  # plans with tensors that have no memory, and reads each when it is written
    planner.resolve_data = lambda item: read(item.index.fqn).detach()
    try:
        with appearing(target) as hidden, _alone():
            # torch keeps the tensors of a file until it is complete, so each has a file of its own
            writer = dcp.FileSystemWriter(hidden, single_file_per_rank=False, thread_count=1)
            dcp.save(planned, storage_writer=writer, planner=planner, no_dist=True)
            for name, text in (beside or {}).items():
                (hidden / name).write_text(text, encoding="utf-8")
                sync(hidden / name)
    except dcp.CheckpointException as error:  # torch's, around what `read` raised
        raise next(iter(error.failures.values()))[0] from error


def _alone() -> AbstractContextManager[object]:
    """Silence torch's remark that one process reads or writes a checkpoint, which is the intent."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
