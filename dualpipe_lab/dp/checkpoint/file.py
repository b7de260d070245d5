"""Writing a safetensors file tensor by tensor, so that no copy of the whole is ever in memory.

Chapter: book/dp/io-save-and-load.  In: types, shapes, a function that gives a tensor by name.  Out: a file on the disk.
  the file   8 bytes: length of the header; the header: JSON of types, shapes and places; then the bytes of the tensors
Elsewhere: safetensors.torch.save_file, which wants all tensors at once.
"""

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_tensors(
    file: Path, parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], read: Callable[[str], Tensor]
) -> int:
    """Write tensors of these types and shapes, asking for one at a time; return the bytes of the file.

    When it returns, the disk has them.

    Raises:
        KeyError: a type that the format does not know.
    """
    header, end = {}, 0
    for name, (dtype, shape) in parts.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format aligns the data
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in parts:
            out.write(read(name).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())
    return len(encoded) + 8 + end
