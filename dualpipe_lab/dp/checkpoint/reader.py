"""`Checkpoint`: reads any elements of any tensor, and no other bytes of the files.

Chapter: book/dp/io.  In: a checkpoint's folder.  Out: flat tensors; one file of the full model.
  bytes read for a shard of a flat tensor   those of the shard, and the headers of the files that it lies in
  memory of `consolidate`                   the largest tensor, not the model
  memory of `verify`                        2 MiB
"""

import os
import zlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dualpipe_lab.dp.checkpoint.file import Extent, Header, read_header, read_range, write_tensors
from dualpipe_lab.dp.checkpoint.index import INDEX, CheckpointError, Index, StoredShard, read_index
from dualpipe_lab.dp.checkpoint.region import CopyRange, ShardRegion, copies_between, full_region
from dualpipe_lab.dp.checkpoint.store import Place, place_of

_BLOCK = 1 << 20  # bytes that are compared with a checksum at a time


class Read(NamedTuple):
    """One read: bytes `begin` to `end` of a file, which are elements of a tensor."""

    file: str
    tensor: str
    begin: int
    end: int


class Checkpoint:
    """A checkpoint on a disk or in an object store, whose tensors are read one by one.

    Attributes:
        reads: the bytes of each file that were read so far.
        checked: shards (tensor, file) whose bytes have been compared with the checksum of the index.

    Raises:
        CheckpointError: it does not exist, or is incomplete.
    """

    def __init__(self, path: Place | str) -> None:
        self.path = place_of(path)
        self.index: Index = read_index(self.path)
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
            raise CheckpointError(f"{self.path} has no tensor {name}; it is a checkpoint of another model")
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
            block = self._read_block(name, entry.shards[0], 0, wanted.numel)
            return block if region else block.view(entry.shape)
        copies = [copies_between(shard.region, wanted) for shard in entry.shards]
        self._check_complete(name, copies, wanted.numel)
        flat = torch.empty(wanted.numel, dtype=getattr(torch, entry.dtype))
        for shard, found in zip(entry.shards, copies, strict=True):
            if found:
                self._read_shard(name, shard, found, flat)
        return flat if region else flat.view(entry.shape)

    def shards(self) -> list[tuple[str, str]]:
        """Return the tensor and the file of every shard that has a checksum."""
        tensors = self.index.tensors.items()
        return [(name, shard.file) for name, entry in tensors for shard in entry.shards if shard.checksum is not None]

    def verify(self, shards: Iterable[tuple[str, str]] | None = None) -> None:
        """Read these shards (default: all) completely, in blocks, and compare their checksums; each is compared once.

        Raises:
            CheckpointError: naming the file and the tensor that differ.
        """
        for name, file in self.shards() if shards is None else shards:
            if (name, file) not in self.checked:
                shard = next(shard for shard in self.index.tensors[name].shards if shard.file == file)
                self._verify(name, shard)

    def _verify(self, name: str, shard: StoredShard) -> None:
        """Compare a shard with its checksum, if it has one."""
        try:
            extent, found = self._extent(name, shard), 0
            for begin in range(extent.begin, extent.end, _BLOCK):
                block = read_range(self.path / shard.file, torch.uint8, begin, min(begin + _BLOCK, extent.end))
                found = zlib.crc32(block.numpy().data, found)
            self._compare(name, shard, found)
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path / shard.file}: tensor {name} cannot be read ({error})") from error

    def _compare(self, name: str, shard: StoredShard, found: int) -> None:
        """Note that a shard's bytes are those that were saved; ValueError if they are not."""
        if shard.checksum is None:
            return
        if found != shard.checksum:
            raise ValueError("its bytes differ from their checksum")
        self.checked.add((name, shard.file))

    def consolidate(self, file: Path | str, prefix: str = "parameter/") -> None:
        """Write all full tensors of a prefix into one safetensors file, one after the other, without the prefix."""
        names = self.names(prefix)
        entries = {name.removeprefix(prefix): self.index.tensors[name] for name in names}
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
        """CopyRange what a shard has of the wanted elements."""
        begin, end = copies[0].source, copies[-1].source + copies[-1].length
        block = self._read_block(name, shard, begin, end)
        for copy in copies:
            flat[copy.target : copy.target + copy.length] = block[
                copy.source - begin : copy.source - begin + copy.length
            ]

    def _read_block(self, name: str, shard: StoredShard, begin: int, end: int) -> Tensor:
        """Read elements of a shard, and note which bytes."""
        block, offset = self._block(name, shard, begin, end)
        self.reads.append(Read(shard.file, name, offset, offset + block.nbytes))
        return block

    def _block(self, name: str, shard: StoredShard, begin: int, end: int) -> tuple[Tensor, int]:
        """Read elements of a shard; return them and their offset in the file.

        If they are all of the shard, they are compared with its checksum.

        Raises:
            CheckpointError: naming the file and the tensor.
        """
        try:
            extent = self._extent(name, shard)
            first, last = (extent.begin + element * extent.dtype.itemsize for element in (begin, end))
            block = read_range(self.path / shard.file, extent.dtype, first, last)
            if (begin, end) == (0, shard.region.numel):
                self._compare(name, shard, zlib.crc32(block.view(torch.uint8).numpy().data))
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path / shard.file}: tensor {name} cannot be read ({error})") from error
        return block, first

    def _extent(self, name: str, shard: StoredShard) -> Extent:
        """Return the bytes of a shard in its file, after checking that the file belongs to this checkpoint.

        Raises:
            ValueError: it is of another save, or its header and the index disagree.
        """
        if shard.file not in self._headers:
            self._headers[shard.file] = read_header(self.path / shard.file)
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


def metadata_of(step: int, file: str, save: str = "") -> dict[str, str]:
    """Return the metadata of a file, by which files of two checkpoints are told apart."""
    return {"step": str(step), "file": file} | ({"save": save} if save else {})


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type in the index.

    >>> type_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
