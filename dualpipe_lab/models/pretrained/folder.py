"""`PretrainedFolder`: the tensors of a folder of safetensors files, by name, read in slices.

Chapter: book/whole/weights.  In: a folder.  Out: types and shapes of all tensors, and slices of single ones.
One file is model.safetensors; of several, model.safetensors.index.json says in which file each tensor is.
Where config.json says so, as DeepSeek-V3's, weights X.weight are in fp8, with X.weight_scale_inv in float32, one for
each block of a x b.  Nothing is written in fp8.
Headers of all files are read and compared with the index before any tensor is, so that a folder with a part missing is
refused as a whole.  Files that need unpickling are never opened.
Elsewhere: transformers' `from_pretrained`, `FineGrainedFP8Config`; torchtitan's `HuggingFaceStorageReader`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.3.2.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dualpipe_lab.dp.checkpoint.file import read_header
from dualpipe_lab.models.pretrained.config import Blocks, PretrainedError, blocks_of, read_json

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
FP8, SCALE_TYPE, SCALE = torch.float8_e4m3fn, torch.float32, "_scale_inv"


class Stored(NamedTuple):
    """File, position, shape and dtype of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class PretrainedFolder:
    """The tensors of a folder.

    Attributes:
        path: of the folder.
        tensors: by name, all of them but scales.
        blocks: rows and columns of weights in fp8 that share a scale; None without such weights.
        scales: by the name of the weight.

    Raises:
        PretrainedError: no folder, no safetensors files, a file missing, cut or damaged, an index that names other
            tensors than the files hold, or scales that are missing, left over, or of another shape or type.
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
        self.blocks = blocks_of(read_json(config), str(config)) if config.exists() else None
        self.scales: dict[str, Stored] = {}
        if self.blocks is not None:
            self._take_scales(self.blocks)

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        """Return a slice of a tensor, by default all of it; of a weight in fp8 times its scales, in float32."""
        stored = self.find(name)
        if self.blocks is None or name not in self.scales:
            return _read(stored.file, name, where)
        given = (*where, *[slice(None)] * (len(stored.shape) - len(where)))
        where = tuple(slice(*part.indices(size)[:2]) for part, size in zip(given, stored.shape, strict=True))
        scale = _read(self.scales[name].file, name + SCALE, self.blocks.scale_slices(where))
        return dequantise(_read(stored.file, name, where), scale, where, self.blocks)

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

    def _take_scales(self, blocks: Blocks) -> None:
        """Move the scales out of `tensors`, and refuse what does not fit together."""
        for name in [name for name in self.tensors if name.endswith(SCALE)]:
            self.scales[name.removesuffix(SCALE)] = self.tensors.pop(name)
        for name, stored in self.tensors.items():
            if stored.dtype != FP8:
                continue
            if name not in self.scales:
                raise PretrainedError(f"{stored.file}: {name} is in fp8, and no file has its scales {name}{SCALE}")
            if len(stored.shape) != 2:
                raise PretrainedError(
                    f"{stored.file}: {name} is in fp8 with shape {stored.shape}; blocks need a matrix"
                )
        for name, scale in self.scales.items():
            weight = self.tensors.get(name)
            if weight is None or weight.dtype != FP8:
                raise PretrainedError(f"{scale.file} has {name}{SCALE}, and no file has {name} in fp8")
            wanted = SCALE_TYPE, blocks.scale_shape(weight.shape)
            if (scale.dtype, scale.shape) != wanted:
                raise PretrainedError(
                    f"{scale.file}: {name}{SCALE} has {scale.dtype} of shape {scale.shape}, and a weight of shape "
                    f"{weight.shape} in blocks of {tuple(blocks)} needs {wanted[0]} of {wanted[1]}"
                )


def dequantise(weight: Tensor, scale: Tensor, where: Sequence[slice], blocks: Blocks) -> Tensor:
    """Return a slice of a weight, `w_RC` in float32, from its stored `q_RC` and the scales of its blocks.

    w_ij = q_ij s_mn, m = i // a, n = j // b; the last block of an axis may be smaller.  Rows i0 to i1 need the scales
    i0 // a to ceil(i1 / a).

    >>> weight, scale = torch.ones(3, 1), torch.tensor([[2.0], [4.0]])
    >>> dequantise(weight.to(FP8), scale, (slice(3, 6), slice(0, 1)), Blocks(4, 4)).T
    tensor([[2., 4., 4.]])
    """
    found = weight.to(SCALE_TYPE)
    rows, columns = where
    number = torch.arange(columns.start, columns.stop) // blocks.columns - columns.start // blocks.columns
    begin = rows.start // blocks.rows * blocks.rows - rows.start  # of the first block, at or before the slice
    for place, scales in enumerate(scale):
        start = begin + place * blocks.rows
        found[max(start, 0) : start + blocks.rows] *= scales[number]
    return found


def _read(file: Path, name: str, where: tuple[slice, ...]) -> Tensor:
    try:
        with safe_open(str(file), framework="pt") as opened:
            found: Tensor = opened.get_slice(name)[where] if where else opened.get_tensor(name)
    except Exception as error:  # safetensors has its own, one for each cause
        raise PretrainedError(f"{file}: {name} cannot be read: {error}") from error
    return found
