"""`Checkpoint`: reads any elements of any tensor, from the files that have them and nothing more of those.

Chapter: book/dp/io.  In: a checkpoint's folder.  Out: flat tensors; one file of the whole model.
  bytes read for a shard of a flat tensor   those of the shard, and the headers of the files that have them
  memory of `consolidate`                   the largest tensor, not the model
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
from dualpipe_lab.dp.checkpoint.index import INDEX, CheckpointError, Index, Stored, read_index
from dualpipe_lab.dp.checkpoint.region import Copy, Region, overlaps, whole


class Read(NamedTuple):
    """Bytes `begin` to `end` of a file, in which elements of a tensor lie."""

    file: str
    tensor: str
    begin: int
    end: int


class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        reads: which bytes of which file were read so far.
        checked: pieces (tensor, file) whose bytes had the checksum of the index.

    Raises:
        CheckpointError: it is not there, or not whole.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.index: Index = read_index(self.path)
        self.reads: list[Read] = []
        self.checked: set[tuple[str, str]] = set()
        self._headers: dict[str, Header] = {}

    @property
    def step(self) -> int:
        """The step of the training at which it was saved."""
        return self.index.step

    def names(self, prefix: str = "") -> list[str]:
        """The tensors whose names begin with `prefix`."""
        return [name for name in self.index.tensors if name.startswith(prefix)]

    def check(self, name: str, region: Region, dtype: torch.dtype) -> None:
        """Refuse a tensor that does not fit, before anything is read.

        Raises:
            CheckpointError: naming the tensor and what differs.
        """
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}; it is a checkpoint of another model")
        entry = self.index.tensors[name]
        where = f"{self.path / entry.pieces[0].file}: tensor {name}" if entry.pieces else f"{self.path}: tensor {name}"
        if (entry.shape or (1,)) != region.shape:
            raise CheckpointError(
                f"{where} has shape {entry.shape}, the model's has {region.shape}; it is a checkpoint of another model"
            )
        if entry.dtype != type_name(dtype):
            raise CheckpointError(
                f"{where} is {entry.dtype}, the model's is {type_name(dtype)}; "
                "load it with the precision that it was saved with"
            )

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Some elements of a tensor, flat; all of them in the tensor's shape if no region is named.

        Raises:
            CheckpointError: naming the file and the tensor, if it cannot be read.
        """
        if name not in self.index.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        entry = self.index.tensors[name]
        wanted = region or whole(entry.shape)
        copies = [overlaps(piece.region, wanted) for piece in entry.pieces]
        self._check_complete(name, copies, wanted.numel)
        flat = torch.empty(wanted.numel, dtype=getattr(torch, entry.dtype))
        for piece, found in zip(entry.pieces, copies, strict=True):
            if found:
                self._read_piece(name, piece, found, flat)
        return flat if region else flat.view(entry.shape)

    def pieces(self) -> list[tuple[str, str]]:
        """Every piece that has a checksum: its tensor and its file."""
        tensors = self.index.tensors.items()
        return [(name, piece.file) for name, entry in tensors for piece in entry.pieces if piece.checksum is not None]

    def verify(self, pieces: Iterable[tuple[str, str]] | None = None) -> None:
        """Read these pieces (all of them) whole and compare their checksums; what was compared already is left out.

        Raises:
            CheckpointError: naming the file and the tensor that differ.
        """
        for name, file in self.pieces() if pieces is None else pieces:
            if (name, file) not in self.checked:
                piece = next(piece for piece in self.index.tensors[name].pieces if piece.file == file)
                self._block(name, piece, 0, piece.region.numel)

    def consolidate(self, file: Path | str, prefix: str = "parameter/") -> None:
        """Write all tensors of a prefix whole into one safetensors file, one after the other, without the prefix."""
        names = self.names(prefix)
        entries = {name.removeprefix(prefix): self.index.tensors[name] for name in names}
        hidden = Path(file).with_name(f".saving-{Path(file).name}")
        parts = {name: (getattr(torch, entry.dtype), entry.shape) for name, entry in entries.items()}
        write_tensors(hidden, parts, lambda name: self.read(prefix + name))
        os.rename(hidden, file)

    def _check_complete(self, name: str, copies: list[list[Copy]], numel: int) -> None:
        """Raise CheckpointError unless the copies fill the places 0 to `numel`, each once."""
        filled = sorted((copy.target, copy.length) for found in copies for copy in found)
        count = sum(length for _, length in filled)
        if count < numel:
            raise CheckpointError(
                f"{self.path / INDEX}: {numel - count} elements of tensor {name} are in none of its files"
            )
        if any(begin + length > after for (begin, length), (after, _) in pairwise(filled)):
            raise CheckpointError(f"{self.path / INDEX}: pieces of tensor {name} overlap; use another checkpoint")

    def _read_piece(self, name: str, piece: Stored, copies: list[Copy], flat: Tensor) -> None:
        """Copy what a piece has of the wanted elements."""
        begin, end = copies[0].source, copies[-1].source + copies[-1].length
        block, place = self._block(name, piece, begin, end)
        self.reads.append(Read(piece.file, name, place, place + block.nbytes))
        for copy in copies:
            flat[copy.target : copy.target + copy.length] = block[
                copy.source - begin : copy.source - begin + copy.length
            ]

    def _block(self, name: str, piece: Stored, begin: int, end: int) -> tuple[Tensor, int]:
        """Elements of a piece and their place in its file; compared with the checksum if they are all of it.

        Raises:
            CheckpointError: naming the file and the tensor.
        """
        try:
            extent = self._extent(name, piece)
            first, last = (extent.begin + place * extent.dtype.itemsize for place in (begin, end))
            block = read_range(self.path / piece.file, extent.dtype, first, last)
            if (begin, end) == (0, piece.region.numel) and piece.checksum is not None:
                if zlib.crc32(block.view(torch.uint8).numpy().data) != piece.checksum:
                    raise ValueError("its bytes differ from their checksum")
                self.checked.add((name, piece.file))
        except (OSError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path / piece.file}: tensor {name} cannot be read ({error})") from error
        return block, first

    def _extent(self, name: str, piece: Stored) -> Extent:
        """Where a piece lies in its file, if the file is the one that the index means.

        Raises:
            ValueError: it is of another save, or its header and the index disagree.
        """
        if piece.file not in self._headers:
            self._headers[piece.file] = read_header(self.path / piece.file)
        metadata, tensors = self._headers[piece.file]
        if metadata != (wanted := metadata_of(self.step, piece.file, self.index.save)):
            other = "" if metadata.pop("save", "") == wanted.pop("save", "") else " of another save"
            raise ValueError(f"it says that it is {metadata}{other}, the index means {wanted}; do not mix checkpoints")
        if name not in tensors:
            raise ValueError("it is not in the file")
        dtype = getattr(torch, self.index.tensors[name].dtype)
        extent, num_bytes = tensors[name], piece.region.numel * dtype.itemsize
        if (extent.dtype, extent.end - extent.begin) != (dtype, num_bytes):
            found = f"{extent.end - extent.begin} bytes of {type_name(extent.dtype)}"
            raise ValueError(f"it has {found}, the index says {num_bytes} of {type_name(dtype)}")
        return extent


def metadata_of(step: int, file: str, save: str = "") -> dict[str, str]:
    """What a file says of itself, so that files of two checkpoints, which look alike, are not mixed up."""
    return {"step": str(step), "file": file} | ({"save": save} if save else {})


def type_name(dtype: torch.dtype) -> str:
    """The name of a type in the index.

    >>> type_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
