"""The index of a checkpoint, and `Checkpoint`: reads any elements of any tensor, and no other bytes of the files.

Chapter: book/dp/io.  In: a checkpoint's folder.  Out: flat tensors; one file of the full model.
  index.json   the size of every file, the file of every shard of every tensor, and all values that are not tensors
  checksums    CRC-32: one for each shard, over its bytes; one for the values, over their JSON with sorted keys
  bytes read for a shard of a flat tensor   those of the shard, and the headers of the files that it lies in
  memory of `consolidate`                   the largest tensor, not the model
  memory of `verify`                        2 MiB
"""

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe_lab._private import plain_name
from dualpipe_lab.dp.checkpoint.file import Extent, Header, read_header, read_range, size_of, write_tensors
from dualpipe_lab.dp.checkpoint.region import CopyRange, ShardRegion, copies_between, full_region

FORMAT = "dualpipe-lab checkpoint 2"
INDEX = "index.json"
VALUES = ("sampler", "config", "num_steps", "param_groups", "scaler", "topology", "random")
_BLOCK = 1 << 20  # bytes that are compared with a checksum at a time


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; nothing was loaded."""


@dataclass(frozen=True)
class StoredShard:
    """A shard of a tensor in a file, stored flat under the tensor's name, with the CRC-32 of its bytes."""

    file: str
    region: ShardRegion
    checksum: int = 0


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
        save: the token of the save, which its files repeat.
    """

    step: int
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    save: str

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


class Read(NamedTuple):
    """One read: bytes `begin` to `end` of a file, which are elements of a tensor."""

    file: str
    tensor: str
    begin: int
    end: int


class Checkpoint:
    """A checkpoint, whose tensors are read one by one.

    Attributes:
        reads: the bytes of each file that were read so far.
        checked: shards (tensor, file) whose bytes have been compared with the checksum of the index.

    Raises:
        CheckpointError: it does not exist, or is incomplete.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.index: Index = _read_index(self.path)
        self.reads: list[Read] = []
        self.checked: set[tuple[str, str]] = set()
        self._headers: dict[str, Header] = {}

    @property
    def step(self) -> int:
        """The training step at which it was saved."""
        return self.index.step

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the tensors that begin with `prefix`."""
        return [name for name in self.index.tensors if name.startswith(prefix)]

    def check(self, name: str, region: ShardRegion, dtype: torch.dtype) -> None:
        """Refuse a tensor of another shape or type, before anything is read.

        Raises:
            CheckpointError: naming the tensor and what differs.
        """
        if name not in self.index.tensors:
            raise CheckpointError(
                f"{self.path} has no tensor {name}; it is a checkpoint of another model or optimizer, or without the "
                "weights that are not trained: load it with frozen=False"
            )
        entry = self.index.tensors[name]
        where = f"{self.path / entry.shards[0].file}: tensor {name}" if entry.shards else f"{self.path}: tensor {name}"
        if (entry.shape or (1,)) != region.shape:
            raise CheckpointError(
                f"{where} has shape {entry.shape}, the model's has {region.shape}; it is a checkpoint of another model"
            )
        if entry.dtype != type_name(dtype):
            raise CheckpointError(
                f"{where} is {entry.dtype}, the model's is {type_name(dtype)}; "
                "load it with the precision that it was saved with"
            )

    def read(self, name: str, region: ShardRegion | None = None) -> Tensor:
        """Read the elements of a region, flat; without a region, the full tensor in its shape.

        Raises:
            CheckpointError: naming the file and the tensor, if it cannot be read.
        """
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        entry = self.index.tensors[name]
        wanted = region or full_region(entry.shape)
        if len(entry.shards) == 1 and entry.shards[0].region == wanted and wanted.numel:  # nothing to put together
            flat = self._read_block(name, entry.shards[0], 0, wanted.numel)
        else:
            copies = [copies_between(shard.region, wanted) for shard in entry.shards]
            self._check_complete(name, copies, wanted.numel)
            flat = torch.empty(wanted.numel, dtype=getattr(torch, entry.dtype))
            for shard, found in zip(entry.shards, copies, strict=True):
                if found:
                    self._read_shard(name, shard, found, flat)
        return flat if region else flat.view(entry.shape)

    def shards(self) -> list[tuple[str, str]]:
        """Return the tensor and the file of every shard."""
        return [(name, shard.file) for name, entry in self.index.tensors.items() for shard in entry.shards]

    def verify(self, shards: Iterable[tuple[str, str]] | None = None) -> None:
        """Read these shards (default: all) completely, in blocks, and compare their checksums; each is compared once.

        Raises:
            CheckpointError: naming the file and the tensor that differ.
        """
        for name, file in self.shards() if shards is None else shards:
            if (name, file) in self.checked:
                continue
            shard, found = next(shard for shard in self.index.tensors[name].shards if shard.file == file), 0
            try:
                extent = self._extent(name, shard)
                for begin in range(extent.begin, extent.end, _BLOCK):
                    block = read_range(self.path / file, torch.uint8, begin, min(begin + _BLOCK, extent.end))
                    found = zlib.crc32(block.numpy().data, found)
                self._compare(name, shard, found)
            except (OSError, ValueError, OverflowError) as error:
                raise CheckpointError(f"{self.path / file}: tensor {name} cannot be read ({error})") from error

    def consolidate(self, file: Path | str, prefix: str = "parameter/") -> None:
        """Write all full tensors of a prefix into one safetensors file, one after the other, without the prefix."""
        entries = {name.removeprefix(prefix): self.index.tensors[name] for name in self.names(prefix)}
        hidden = Path(file).with_name(f".saving-{Path(file).name}")
        parts = {name: (getattr(torch, entry.dtype), entry.shape) for name, entry in entries.items()}
        write_tensors(hidden, parts, lambda name: self.read(prefix + name))
        os.rename(hidden, file)

    def _check_complete(self, name: str, copies: list[list[CopyRange]], numel: int) -> None:
        """Raise CheckpointError unless the copies fill elements 0 to `numel`, each once."""
        filled = sorted((copy.target, copy.length) for found in copies for copy in found)
        count = sum(length for _, length in filled)
        if count < numel:
            raise CheckpointError(
                f"{self.path / INDEX}: {numel - count} elements of tensor {name} are in none of its files"
            )
        if any(begin + length > after for (begin, length), (after, _) in pairwise(filled)):
            raise CheckpointError(f"{self.path / INDEX}: shards of tensor {name} overlap; use another checkpoint")

    def _read_shard(self, name: str, shard: StoredShard, copies: list[CopyRange], flat: Tensor) -> None:
        """Copy what a shard has of the wanted elements."""
        begin, end = copies[0].source, copies[-1].source + copies[-1].length
        block = self._read_block(name, shard, begin, end)
        for copy in copies:
            first = copy.source - begin
            flat[copy.target : copy.target + copy.length] = block[first : first + copy.length]

    def _read_block(self, name: str, shard: StoredShard, begin: int, end: int) -> Tensor:
        """Read elements of a shard, note which bytes, and compare the checksum if they are all of the shard."""
        try:
            extent = self._extent(name, shard)
            first, last = (extent.begin + element * extent.dtype.itemsize for element in (begin, end))
            block = read_range(self.path / shard.file, extent.dtype, first, last)
            if (begin, end) == (0, shard.region.numel):
                self._compare(name, shard, zlib.crc32(block.view(torch.uint8).numpy().data))
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path / shard.file}: tensor {name} cannot be read ({error})") from error
        self.reads.append(Read(shard.file, name, first, first + block.nbytes))
        return block

    def _compare(self, name: str, shard: StoredShard, found: int) -> None:
        if found != shard.checksum:
            raise ValueError("its bytes differ from their checksum")
        self.checked.add((name, shard.file))

    def _extent(self, name: str, shard: StoredShard) -> Extent:
        """Return the bytes of a shard in its file; ValueError if the file is of another save, or disagrees."""
        if shard.file not in self._headers:
            metadata, tensors = read_header(self.path / shard.file)
            self._headers[shard.file] = Header(metadata, {plain_name(name): tensors[name] for name in tensors})
        metadata, tensors = self._headers[shard.file]
        if metadata != (wanted := metadata_of(self.step, shard.file, self.index.save)):
            other = "" if metadata.pop("save", "") == wanted.pop("save", "") else " of another save"
            raise ValueError(f"it says that it is {metadata}{other}, the index means {wanted}; do not mix checkpoints")
        if name not in tensors:
            raise ValueError("it is not in the file")
        dtype = getattr(torch, self.index.tensors[name].dtype)
        extent, num_bytes = tensors[name], shard.region.numel * dtype.itemsize
        if (extent.dtype, extent.end - extent.begin) != (dtype, num_bytes):
            found = f"{extent.end - extent.begin} bytes of {type_name(extent.dtype)}"
            raise ValueError(f"it has {found}, the index says {num_bytes} of {type_name(dtype)}")
        return extent


def name_of(step: int) -> str:
    """Return the name of a step's folder, such as step-00000010."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step whose folder has this name; None for any other name.

    >>> step_of("step-00000010"), step_of("step-10")
    (10, None)
    """
    digits = name.removeprefix("step-")
    step = int(digits) if digits.isdecimal() else -1
    return step if name == name_of(step) else None


def checksum_of(values: dict[str, Any]) -> int:
    """Return the CRC-32 of the values that are not tensors, as they will be read."""
    read = json.loads(json.dumps(values))  # keys are text from here on
    return zlib.crc32(json.dumps(read, sort_keys=True).encode())


def metadata_of(step: int, file: str, save: str) -> dict[str, str]:
    """Return the metadata of a file, by which files of two checkpoints are told apart."""
    return {"step": str(step), "file": file, "save": save}


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type in the index.

    >>> type_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def _read_index(path: Path) -> Index:
    """Read and check the index, and the sizes of the files that it lists."""
    file = path / INDEX
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, so {path} is no checkpoint, or not all of it; use another one")
    try:
        index = _parse(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error}); use another checkpoint") from error
    named = step_of(path.absolute().name)
    if named not in (None, index.step):
        raise CheckpointError(
            f"a folder has the name of its checkpoint's step, and {path} has one of step {index.step}; name it "
            f"{name_of(index.step)}, or move it out of the folder of checkpoints"
        )
    for name, size in index.files.items():
        data = path / name
        found = data.stat().st_size if data.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes of {size}"
            tensors = [one for one, entry in index.tensors.items() if any(each.file == name for each in entry.shards)]
            what = f"tensor {tensors[0]}" if tensors else "what it holds"
            raise CheckpointError(f"{data} {state}, so {what} cannot be read; use another checkpoint")
    return index


def _parse(parts: dict[str, Any]) -> Index:
    if parts["format"] != FORMAT:
        raise ValueError(f"format {parts['format']!r}, expected {FORMAT!r}")
    values = {name: parts["values"][name] for name in VALUES}  # a missing one must show before anything is loaded
    if parts["values_checksum"] != checksum_of(parts["values"]):
        raise ValueError("the values beside the tensors, random numbers included, differ from their checksum")
    files = {name: _natural(size, f"the size of {name}") for name, size in parts["files"].items()}
    held: Counter[str] = Counter()
    tensors = {plain_name(name): _tensor(name, entry) for name, entry in parts["tensors"].items()}
    for name, entry in tensors.items():
        for shard in entry.shards:
            held[shard.file] += shard.region.numel * size_of(entry.dtype)
            if shard.file not in files or held[shard.file] > files[shard.file]:
                raise ValueError(f"tensor {name} is in {shard.file!r}, which is not listed or has fewer bytes")
    return Index(_natural(parts["step"], "the step"), files, tensors, values, str(parts["save"]))


def _tensor(name: str, entry: dict[str, Any]) -> TensorEntry:
    """Read the entry of a tensor; ValueError naming it, if it describes none."""
    shape = tuple(_natural(length, f"tensor {name}: a length of shape {entry['shape']}") for length in entry["shape"])
    if not size_of(entry["dtype"]):
        raise ValueError(f"tensor {name}: dtype {entry['dtype']!r} is unknown")
    found = TensorEntry(entry["dtype"], shape)
    for file, *numbers in entry["pieces"]:
        what = f"tensor {name}: a number of its shard in {file}"
        axis, start, stop, first, last, *rest = (_natural(number, what) for number in numbers)
        region = ShardRegion(shape or (1,), axis, start, stop, first, last)
        if len(rest) != 1 or not _is_inside(region):
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
