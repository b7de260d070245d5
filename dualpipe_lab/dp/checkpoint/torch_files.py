"""`TorchFiles`: the tensors of a checkpoint of `torch.distributed.checkpoint`, read one by one; no code of it is run.

Chapter: book/dp/io.  In: a folder with `.metadata`.  Out: types and shapes of all tensors; each of them in full.
  .metadata     a pickle, which may name any function: here it may name only the classes of torch's index, and for each
                of them stands a record without code; any other name is refused before anything is called
  *.distcp      every chunk of a tensor as `torch.save` wrote it, read with `weights_only=True`
  memory        one tensor and one chunk of it
Elsewhere: torch FileSystemReader, which unpickles `.metadata` as it is.
"""

import io
import pickle
from collections.abc import Iterator
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualpipe_lab.dp.checkpoint.index import CheckpointError

METADATA = ".metadata"
_INDEX, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    *((_INDEX, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_INDEX, name) for name in ("BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (_FILES, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath", "Path")),
}


class Chunk(NamedTuple):
    """A part of a tensor: where it begins, its shape, and its bytes in a file."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int


class TorchFiles:
    """The tensors of a checkpoint of torch.

    Attributes:
        path: of its folder.
        kinds: type and shape of every tensor, by name; what was saved beside tensors is left out.

    Raises:
        CheckpointError: `.metadata` is missing, damaged, or names what is no data; or a file is missing or cut.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._chunks: dict[str, list[Chunk]] = {}
        metadata = _read_metadata(self.path / METADATA)
        try:
            places = {
                (key.fqn, tuple(getattr(key, "offset", None) or ())): at for key, at in metadata.storage_data.items()
            }
            for name, entry in metadata.state_dict_metadata.items():
                if hasattr(entry, "properties"):
                    self.kinds[name] = entry.properties.state[0], tuple(entry.size)
                    self._chunks[name] = [self._chunk(name, chunk, places) for chunk in entry.chunks]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            told = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self.path / METADATA} is damaged ({told}); use another checkpoint") from error
        for name in self.kinds:
            self._check(name)

    def read(self, name: str) -> Tensor:
        """Return a full tensor.

        Raises:
            CheckpointError: there is none of this name, or its bytes cannot be read.
        """
        if name not in self.kinds:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        dtype, shape = self.kinds[name]
        chunks = self._chunks[name]
        if len(chunks) == 1:
            return self._load(name, chunks[0], dtype)
        full = torch.empty(shape, dtype=dtype)
        for chunk in chunks:
            where = tuple(slice(start, start + size) for start, size in zip(chunk.begin, chunk.shape, strict=True))
            full[where] = self._load(name, chunk, dtype)
        return full

    def _chunk(self, name: str, chunk: Any, places: dict[tuple[str, tuple[int, ...]], Any]) -> Chunk:
        begin, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        at = places[name, begin]
        if getattr(at, "transform_descriptors", None):
            raise CheckpointError(f"{self.path}: tensor {name} is compressed; save it without extensions")
        if Path(at.relative_path).name != at.relative_path:
            raise CheckpointError(
                f"{self.path}: tensor {name} is in {at.relative_path!r}, which is no file of its folder"
            )
        return Chunk(begin, shape, self.path / at.relative_path, int(at.offset), int(at.length))

    def _check(self, name: str) -> None:
        """Refuse files that are missing or cut, and chunks that are not the full tensor, once."""
        chunks, (_, shape) = self._chunks[name], self.kinds[name]
        for chunk in chunks:
            size = chunk.file.stat().st_size if chunk.file.is_file() else None
            if size is None or chunk.offset < 0 or chunk.offset + chunk.length > size:
                state = "is missing" if size is None else f"is cut at byte {size}"
                raise CheckpointError(f"{chunk.file} {state}, so tensor {name} cannot be read; use another checkpoint")
        is_inside = all(_is_inside(chunk, shape) for chunk in chunks)
        if not is_inside or sum(prod(c.shape) for c in chunks) != prod(shape) or _any_overlap(chunks):
            raise CheckpointError(
                f"{self.path / METADATA}: the chunks of tensor {name} are not {shape}, each element once"
            )

    def _load(self, name: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        try:
            with chunk.file.open("rb") as file:
                part = io.BufferedReader(_FilePart(file, chunk.offset, chunk.length))
                found = torch.load(part, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            told = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{chunk.file}: tensor {name} cannot be read ({told})") from error
        if not isinstance(found, Tensor) or (found.dtype, tuple(found.shape)) != (dtype, chunk.shape):
            what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise CheckpointError(f"{chunk.file}: tensor {name} is {what}, {METADATA} says {dtype} {chunk.shape}")
        return found.detach()


class _Record:
    """Stands for an object of torch's index: its arguments and its state, without code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        self.state = state


class _Reader(pickle.Unpickler):
    """Unpickles names of torch's index into records, sizes and types, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class; CheckpointError for any name that is no data."""
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(f"it asks for {module}.{name}, which is no part of torch's index; nothing of it was run")


def _read_metadata(file: Path) -> Any:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, so {file.parent} is no checkpoint of torch")
    try:
        with file.open("rb") as source:
            return _Reader(source).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file} is a pickle that cannot be trusted: {error}") from error
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, TypeError, AttributeError, IndexError) as error:
        told = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} is damaged ({told}); use another checkpoint") from error


class _FilePart(io.RawIOBase):
    """Bytes `offset` to `offset + length` of a file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to a place, and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer; return the number of bytes."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count


def _is_inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    sizes = list(_axes(chunk))
    return len(sizes) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(sizes, shape, strict=True)
    )


def _any_overlap(chunks: list[Chunk]) -> bool:
    pairs = combinations([chunk for chunk in chunks if prod(chunk.shape)], 2)
    return any(all(a < d and c < b for (a, b), (c, d) in zip(_axes(x), _axes(y), strict=True)) for x, y in pairs)


def _axes(chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield begin and end along each axis."""
    for start, size in zip(chunk.begin, chunk.shape, strict=True):
        yield start, start + size
