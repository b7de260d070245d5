"""The index of a checkpoint: which file holds which elements of which tensor, and everything that is no tensor.

Chapter: book/dp/io.  In: JSON.  Out: an `Index`, or an error that names the file.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualpipe_lab.dp.checkpoint.region import Region

FORMAT = "dualpipe-lab checkpoint 1"
INDEX = "index.json"
VALUES = ("sampler", "config", "num_steps", "scaler", "topology", "random")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; nothing was loaded."""


@dataclass(frozen=True)
class Stored:
    """Elements of a tensor in a file, where they lie flat under the tensor's name."""

    file: str
    region: Region


@dataclass
class TensorEntry:
    """One whole tensor: its type, its shape and where its elements are."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Stored] = field(default_factory=list)


@dataclass
class Index:
    """What is in a checkpoint.

    Attributes:
        step: of the training.
        files: bytes of each file.
        tensors: by name.
        values: everything that is no tensor, as JSON.
    """

    step: int
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]

    def dumps(self) -> str:
        """The index as JSON."""
        tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "pieces": [[piece.file, *piece.region[1:]] for piece in entry.pieces],
            }
            for name, entry in self.tensors.items()
        }
        parts = {"format": FORMAT, "step": self.step, "files": self.files, "tensors": tensors, "values": self.values}
        return json.dumps(parts, indent=1)


def read_index(path: Path) -> Index:
    """Read and check the index of the checkpoint at `path`.

    Raises:
        CheckpointError: no index, one that cannot be read, or a file of another size than it says.
    """
    file = path / INDEX
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, so {path} is no checkpoint; latest(folder) names one")
    try:
        index = _parse(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error}); use another checkpoint") from error
    for name, size in index.files.items():
        shard = path / name
        found = shard.stat().st_size if shard.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes of {size}"
            raise CheckpointError(f"{shard} {state}, so {_first(index, name)} cannot be read; use another checkpoint")
    return index


def _parse(parts: dict[str, Any]) -> Index:
    if parts["format"] != FORMAT:
        raise ValueError(f"format {parts['format']!r}, expected {FORMAT!r}")
    values = {name: parts["values"][name] for name in VALUES}  # a missing one must show before anything is loaded
    tensors = {}
    for name, entry in parts["tensors"].items():
        shape = tuple(entry["shape"])
        pieces = [Stored(file, Region(shape or (1,), *numbers)) for file, *numbers in entry["pieces"]]
        tensors[name] = TensorEntry(entry["dtype"], shape, pieces)
    return Index(int(parts["step"]), dict(parts["files"]), tensors, values)


def _first(index: Index, file: str) -> str:
    """Name a tensor of a file."""
    names = [name for name, entry in index.tensors.items() if any(piece.file == file for piece in entry.pieces)]
    return f"tensor {names[0]}" if names else "what it holds"
