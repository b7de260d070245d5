"""`PretrainedFolder`: the tensors of a folder of safetensors files, by name, read in slices.

Chapter: book/whole/weights.  In: a folder.  Out: types and shapes of all tensors, and slices of single ones.
One file is model.safetensors; of several, model.safetensors.index.json says in which file each tensor is.
Headers of all files are read and compared with the index before any tensor is, so that a folder with a part missing is
refused as a whole.  Files that need unpickling are never opened.
Elsewhere: transformers' `from_pretrained`; torchtitan's `HuggingFaceStorageReader`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dualpipe_lab.dp.checkpoint.file import read_header
from dualpipe_lab.models.pretrained.config import PretrainedError, read_json

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")


class Stored(NamedTuple):
    """File, position, shape and dtype of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class PretrainedFolder:
    """The tensors of a folder.

    Attributes:
        path: of the folder.
        tensors: by name.

    Raises:
        PretrainedError: no folder, no safetensors files, a file missing, cut or damaged, an index that names other
            tensors than the files hold, or weights that are quantised.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise PretrainedError(f"{self.path} is no folder; give the one with config.json and the safetensors files")
        index = self._index()
        self.tensors: dict[str, Stored] = {}
        for name in sorted(set(index.values()) or {ONE_FILE}):
            self._add(self.path / name)
        if index:
            self._compare(index)
        config = self.path / "config.json"
        if config.exists() and (found := read_json(config).get("quantization_config")) is not None:
            raise PretrainedError(
                f"{config} says that the weights are quantised, got quantization_config={found}; convert the folder to "
                "bfloat16 first"
            )

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        """Return a slice of a tensor, by default all of it."""
        return _read(self.find(name).file, name, where)

    def find(self, name: str) -> Stored:
        """Return where a tensor is; PretrainedError if there is none."""
        if name not in self.tensors:
            raise PretrainedError(f"{self.path} has no tensor {name}; it is a folder of another model")
        return self.tensors[name]

    def _index(self) -> dict[str, str]:
        """Return the file of each tensor, as the index says; nothing where one file holds all."""
        file = self.path / INDEX
        if not file.exists():
            if (self.path / ONE_FILE).exists():
                return {}
            if pickled := sorted(found.name for kind in PICKLES for found in self.path.glob(kind)):
                raise PretrainedError(
                    f"{self.path} has weights in pickles ({pickled[0]}), and a pickle may run any code; nothing is "
                    "unpickled here, so save them as safetensors first"
                )
            raise PretrainedError(f"{self.path} has neither {ONE_FILE} nor {INDEX}; the weights are missing")
        weights = read_json(file).get("weight_map")
        if not isinstance(weights, Mapping) or not weights:
            raise PretrainedError(f"{file} has no weight_map, which says in which file each tensor is")
        for name, place in weights.items():
            if not isinstance(place, str) or Path(place).name != place or not place.endswith(".safetensors"):
                raise PretrainedError(f"{file} places {name} in {place!r}, which is no safetensors file of its folder")
        return dict(weights)

    def _add(self, file: Path) -> None:
        if not file.exists():
            raise PretrainedError(f"{file} is missing; the index names it")
        try:
            header = read_header(file)
        except (ValueError, OSError) as error:
            raise PretrainedError(f"{file} cannot be read: {error}") from error
        size = file.stat().st_size
        for name, extent in header.tensors.items():
            if extent.end > size:
                raise PretrainedError(f"{file} is cut: {name} ends at byte {extent.end}, the file at {size}")
            if name in self.tensors:
                raise PretrainedError(f"{name} is in {self.tensors[name].file} and in {file}")
            self.tensors[name] = Stored(file, extent.dtype, extent.shape)

    def _compare(self, index: dict[str, str]) -> None:
        for name, place in index.items():
            if name not in self.tensors:
                raise PretrainedError(f"{self.path / place} has no {name}, which {INDEX} places there")
            if (found := self.tensors[name].file.name) != place:
                raise PretrainedError(f"{name} is in {found}, and {INDEX} places it in {place}")
        if surplus := sorted(set(self.tensors) - set(index)):
            raise PretrainedError(f"{self.tensors[surplus[0]].file} has {surplus[0]}, which {INDEX} does not name")


def _read(file: Path, name: str, where: tuple[slice, ...]) -> Tensor:
    try:
        with safe_open(str(file), framework="pt") as opened:
            found: Tensor = opened.get_slice(name)[where] if where else opened.get_tensor(name)
    except Exception as error:  # safetensors has its own, one for each cause
        raise PretrainedError(f"{file}: {name} cannot be read: {error}") from error
    return found
