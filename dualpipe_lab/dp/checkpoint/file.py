"""The safetensors format: written tensor by tensor, so that no second copy is in memory; read by byte range.

Chapter: book/dp/io.  In: types, shapes, a function that returns a tensor by name.  Out: a file on disk, its header.
A tensor may also come in parts, one behind the other, such as stacked experts one by one.
  the file   8 bytes: length of the header; the header: JSON of types, shapes and offsets; then the bytes of the tensors
Elsewhere: safetensors.torch.save_file, which needs all tensors at once; safetensors.safe_open, which does not tell
where a tensor lies in the file, parses the full header for each opening, and maps the file, so that one that is cut
short while it is read ends the process (SIGBUS) instead of raising an error.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import prod
from operator import index
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import torch
from torch import Tensor

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_METADATA = "__metadata__"
Kinds: TypeAlias = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # type and shape of each tensor, by name
Values: TypeAlias = Tensor | Iterator[Tensor]  # a tensor, or its parts along the first axis, each made when it is asked


class Extent(NamedTuple):
    """The bytes of a tensor in a file: `begin` to `end`, counted from the start of the file; and its shape."""

    dtype: torch.dtype
    begin: int
    end: int
    shape: tuple[int, ...]


class Written(NamedTuple):
    """A file that is on disk: its size in bytes, and the CRC-32 of each tensor's bytes."""

    size: int
    checksums: dict[str, int]


class Header(NamedTuple):
    """The header of a file: its metadata, and the type and bytes of each tensor."""

    metadata: dict[str, str]
    tensors: dict[str, Extent]


def is_known(dtype: torch.dtype) -> bool:
    """Return whether the format has this type."""
    return dtype in _CODES


def size_of(name: str) -> int:
    """Return the bytes of an element of the type with this name; 0 if the format has no such type."""
    return next((dtype.itemsize for dtype in _CODES if str(dtype) == f"torch.{name}"), 0)


def write_tensors(
    file: Path,
    parts: Kinds,
    read: Callable[[str], Values],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write tensors of these types and shapes, reading one at a time; return size and checksums.

    `read` returns a tensor, or its parts, of which one is in memory at a time.  The data is on disk when this returns.
    The header contains `metadata`; other programs look for the format in it, so that is the default.

    Raises:
        KeyError: a type that the format does not know.
    """
    header: dict[str, object] = {_METADATA: dict(metadata or {"format": "pt"})}
    end = 0
    for name, (dtype, shape) in parts.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data
    checksums = {}
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in parts:
            checksums[name] = _write_values(out, read(name))
        assert out.tell() == 8 + len(encoded) + end, "the values are of other types or shapes than the header says"
        out.flush()
        os.fsync(out.fileno())
    return Written(len(encoded) + 8 + end, checksums)


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


def _write_values(out: BinaryIO, values: Values) -> int:
    """Write a tensor, or its parts one after the other; return the checksum of its bytes."""
    checksum, parts = 0, iter((values,)) if isinstance(values, Tensor) else values
    del values
    while (part := next(parts, None)) is not None:
        data = _on_host(part.detach()).contiguous().view(-1).view(torch.uint8).numpy().data
        out.write(data)
        checksum = zlib.crc32(data, checksum)
        del data, part  # before the next one is read
    return checksum


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in the memory of the CPU; from a GPU through page-locked memory, which torch keeps and reuses."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available()).copy_(tensor)


def read_header(file: Path) -> Header:
    """Read and check the header of a file.

    Raises:
        ValueError: it is no safetensors file.
        OSError: it cannot be read.
    """
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        size = source.seek(0, os.SEEK_END)
        source.seek(8)
        if not 0 < length <= size - 8:
            raise ValueError("it is no safetensors file")
        types = {code: dtype for dtype, code in _CODES.items()}
        try:
            header = json.loads(source.read(length))
            metadata = dict(header.pop(_METADATA, {}))
            tensors = {name: _extent(entry, types, 8 + length) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"its header is damaged: {type(error).__name__}") from error
    return Header(metadata, tensors)


def _extent(entry: Mapping[str, Any], types: Mapping[str, torch.dtype], start: int) -> Extent:
    """Return what a header says of a tensor; offsets there count from the end of the header."""
    begin, end = (start + index(place) for place in entry["data_offsets"])
    dtype, shape = types[entry["dtype"]], tuple(index(size) for size in entry["shape"])
    if end - begin != prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{end - begin} bytes do not fit {shape} of {dtype}")
    return Extent(dtype, begin, end, shape)


def read_range(file: Path, dtype: torch.dtype, begin: int, end: int) -> Tensor:
    """Read the elements in bytes `begin` to `end` of a file, and no other bytes.

    Raises:
        ValueError: the file ends before.
        OSError: it cannot be read.
    """
    with file.open("rb") as source:
        source.seek(begin)
        found = bytearray(end - begin)
        if (length := source.readinto(found)) != end - begin:
            raise ValueError(f"it ends at byte {begin + length}")
    return torch.frombuffer(found, dtype=dtype) if found else torch.empty(0, dtype=dtype)
