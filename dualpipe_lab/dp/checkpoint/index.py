"""The index of a checkpoint: the file of every shard of every tensor, and all values that are not tensors.

Chapter: book/dp/io.  In: JSON.  Out: an `Index`, or an error that names the file and the tensor.
Checksums (CRC-32): one for each shard of a tensor, over its bytes; one for all other values, over their JSON with
sorted keys.  Checkpoints of format 1 have none, and are loaded without a comparison.
"""

import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

from dualpipe_lab.dp.checkpoint.file import size_of
from dualpipe_lab.dp.checkpoint.region import ShardRegion
from dualpipe_lab.dp.checkpoint.store import Place

FORMAT = "dualpipe-lab checkpoint 2"
OLD_FORMAT = "dualpipe-lab checkpoint 1"  # without checksums and without the token of the save
INDEX = "index.json"
VALUES = ("sampler", "config", "num_steps", "scaler", "topology", "random")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; nothing was loaded."""


@dataclass(frozen=True)
class StoredShard:
    """A shard of a tensor in a file, stored flat under the tensor's name, with the CRC-32 of its bytes."""

    file: str
    region: ShardRegion
    checksum: int | None = None


@dataclass
class TensorEntry:
    """One full tensor: its type, its shape and its shards."""

    dtype: str
    shape: tuple[int, ...]
    shards: list[StoredShard] = field(default_factory=list)


@dataclass
class Index:
    """The index of a checkpoint.

    Attributes:
        step: of the training.
        files: bytes of each file.
        tensors: by name.
        values: everything that is not a tensor, as JSON.
        save: the token of the save, which its files repeat; empty in format 1.
    """

    step: int
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    save: str = ""

    def dumps(self) -> str:
        """Return the index as JSON."""
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "pieces": [[shard.file, *shard.region[1:], shard.checksum] for shard in entry.shards],
            }
            for name, entry in self.tensors.items()
        }
        parts = {"format": FORMAT, "step": self.step, "save": self.save, "files": self.files, "tensors": tensors}
        return json.dumps({**parts, "values": self.values, "values_checksum": checksum_of(self.values)}, indent=1)


def read_index(path: Place) -> Index:
    """Read and check the index of the checkpoint at `path`.

    Raises:
        CheckpointError: the index is missing or damaged, or a file does not have the size in the index.
    """
    file = path / INDEX
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, so {path} is no checkpoint; latest(folder) names one")
    try:
        index = _parse(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error}); use another checkpoint") from error
    for name, size in index.files.items():
        data = path / name
        found = data.stat().st_size if data.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes of {size}"
            raise CheckpointError(f"{data} {state}, so {_first(index, name)} cannot be read; use another checkpoint")
    return index


def checksum_of(values: dict[str, Any]) -> int:
    """Return the CRC-32 of the values that are not tensors, as they will be read."""
    read = json.loads(json.dumps(values))  # keys are text from here on
    return zlib.crc32(json.dumps(read, sort_keys=True).encode())


def _parse(parts: dict[str, Any]) -> Index:
    if parts["format"] not in (FORMAT, OLD_FORMAT):
        raise ValueError(f"format {parts['format']!r}, expected {FORMAT!r}")
    has_checksums = parts["format"] == FORMAT
    values = {name: parts["values"][name] for name in VALUES}  # a missing one must show before anything is loaded
    if has_checksums and parts["values_checksum"] != checksum_of(parts["values"]):
        raise ValueError("the values beside the tensors, random numbers included, differ from their checksum")
    files = {name: _natural(size, f"the size of {name}") for name, size in parts["files"].items()}
    held: Counter[str] = Counter()
    tensors = {}
    for name, entry in parts["tensors"].items():
        tensors[name] = _tensor(name, entry, has_checksums)
        for shard in tensors[name].shards:
            held[shard.file] += shard.region.numel * size_of(tensors[name].dtype)
            if shard.file not in files or held[shard.file] > files[shard.file]:
                raise ValueError(f"tensor {name} is in {shard.file!r}, which is not listed or has fewer bytes")
    step = _natural(parts["step"], "the step")
    return Index(step, files, tensors, values, str(parts["save"]) if has_checksums else "")


def _tensor(name: str, entry: dict[str, Any], has_checksums: bool) -> TensorEntry:
    """Read the entry of a tensor; ValueError naming it, if it describes none."""
    shape = tuple(_natural(length, f"tensor {name}: a length of shape {entry['shape']}") for length in entry["shape"])
    if not size_of(entry["dtype"]):
        raise ValueError(f"tensor {name}: dtype {entry['dtype']!r} is unknown")
    found = TensorEntry(entry["dtype"], shape)
    for file, *numbers in entry["pieces"]:
        what = f"tensor {name}: a number of its shard in {file}"
        axis, start, stop, first, last, *rest = (_natural(number, what) for number in numbers)
        region = ShardRegion(shape or (1,), axis, start, stop, first, last)
        if len(rest) != has_checksums or not _is_inside(region):
            raise ValueError(f"tensor {name}: {numbers} describes no shard of shape {shape}")
        found.shards.append(StoredShard(file, region, *rest))
    return found


def _is_inside(region: ShardRegion) -> bool:
    shape, axis, start, stop, first, last = region
    if axis >= len(shape) or not start <= stop <= shape[axis] or not first <= last:
        return False
    return last <= prod(shape[:axis]) * (stop - start) * prod(shape[axis + 1 :])


def _natural(number: Any, what: str) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{what} is {str(number)[:40]!r}, which is no full number from 0")
    return number


def _first(index: Index, file: str) -> str:
    """Return the name of a tensor in a file."""
    names = [name for name, entry in index.tensors.items() if any(shard.file == file for shard in entry.shards)]
    return f"tensor {names[0]}" if names else "what it holds"
