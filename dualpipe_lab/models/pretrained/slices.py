"""`slices_of`: what every rank of a plan would read of a published folder, without reading a tensor.

Chapter: book/whole/weights.  In: a folder, a topology, a program.  Out: per rank, file, tensor, slice and bytes.
  read here       config.json and the headers of the files; no process starts
  cut by rows     q, k, v, gate, up, the embedding and the head: their outputs are shared along tp; of latent attention
                  what unfolds queries, keys and values
  cut by columns  o and down: their inputs are
  key heads       with more ranks than key heads, several ranks read the same rows
  experts         whole, those of the rank along ep, whether it is an axis or within the data ranks
  fp8             the scales of the blocks in which a slice lies; a block on an edge is read by both ranks
  everywhere      norms, routers with their biases, what makes latents; along dp and cp everything else too
`load_pretrained` reads exactly these slices.
Elsewhere: transformers' `base_model_tp_plan` by name; vLLM's `weight_loader` of each layer.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.pretrained.config import config_from_pretrained
from dualpipe_lab.models.pretrained.folder import PretrainedFolder, Stored
from dualpipe_lab.models.pretrained.fp8 import SCALE
from dualpipe_lab.models.pretrained.load import check_folder, full_shapes
from dualpipe_lab.models.pretrained.names import is_stacked, published_names
from dualpipe_lab.models.stage import HEAD, TABLE
from dualpipe_lab.models.stage_rules import ModelConfig, check_stages, stage_layers, stages_of
from dualpipe_lab.pp.program import Program
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.topology import Topology

_UNFOLDED = ("q.weight", "q_up.weight", "kv_up.weight")
_ROWS = (TABLE, HEAD, *_UNFOLDED, "mlp.gate.weight", "mlp.up.weight", "shared.gate.weight", "shared.up.weight")
_COLUMNS = ("attention.o.weight", "mlp.down.weight", "mlp.shared.down.weight")  # what makes latents is called down too
_KEYS = ("attention.k.weight", "attention.v.weight")


class FileSlice(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
        file: its name in the folder.
        tensor: the published name.
        where: first index and end along each axis.
        num_bytes: of the part.
    """

    file: str
    tensor: str
    where: tuple[tuple[int, int], ...]
    num_bytes: int

    def __str__(self) -> str:
        """Return the slice as torch writes it.

        >>> print(FileSlice("model.safetensors", "lm_head.weight", ((0, 8), (4, 6)), 32))
        model.safetensors: lm_head.weight[0:8, 4:6], 32 bytes
        """
        places = ", ".join(f"{start}:{stop}" for start, stop in self.where)
        return f"{self.file}: {self.tensor}[{places}], {self.num_bytes:,} bytes"


def slices_of(
    path: Path | str, topology: Topology, program: Program | None = None, layers: Sequence[int] | None = None
) -> list[list[FileSlice]]:
    """Return, for every rank, the slices that `load_pretrained` reads there, in its order.

    Args:
        path: a folder with config.json and safetensors files.
        topology: the ranks, such as `plan.topology`.
        program: of the pipeline, such as `plan.program`; None without one.
        layers: the number of layers of each stage (default: as `stage_layers` shares them out).

    Raises:
        PretrainedError: the folder cannot be used.
        ValueError: as `check_stages`, for a model that this cut does not fit.
    """
    config, folder = config_from_pretrained(path), PretrainedFolder(path)
    check_folder(folder, config)
    check_stages(config, topology, program, layers=layers)
    published = {name: published_names(name, config) for name in full_shapes(config)}
    stages = stage_layers(config, 1 if program is None else program.num_stages, layers)
    names = _stage_names(list(published), config, stages)
    found: dict[tuple[int, int, int], list[FileSlice]] = {}  # many ranks read the same

    def of_stage(stage: int, tp: int, ep: int) -> list[FileSlice]:
        if (stage, tp, ep) not in found:
            cut = _Cut(config.num_kv_heads, tp, topology.size("tp"), ep, topology.size("ep"))
            found[stage, tp, ep] = [one for name in names[stage] for one in cut.slices(folder, name, published[name])]
        return found[stage, tp, ep]

    numbers = _numbers_along_ep(topology)
    return [
        [
            one
            for stage in stages_of(program, here.get("pp", 0))
            for one in of_stage(stage, here.get("tp", 0), numbers.get(rank, 0))
        ]
        for rank, here in enumerate(map(topology.coordinates, range(topology.world_size)))
    ]


def _numbers_along_ep(topology: Topology) -> dict[int, int]:
    """Return the number of each rank among those that share the experts; nothing if none do."""
    groups = topology.groups("ep") if topology.size("ep") > 1 else ()
    return {rank: number for group in groups for number, rank in enumerate(group)}


def _stage_names(names: Sequence[str], config: ModelConfig, split: Sequence[range]) -> list[list[str]]:
    """Return the parameters of each stage; a tied head reads the table, unless that is on its stage already."""
    is_tied = isinstance(config, LlamaConfig) and config.tied
    stage_of = {number: stage for stage, layers in enumerate(split) for number in layers}
    last = len(split) - 1
    found: list[list[str]] = [[] for _ in split]
    for name in names:
        if name == TABLE:
            found[0].append(name)
        elif name.startswith("layers."):
            found[stage_of[int(name.split(".")[1])]].append(name)
        else:
            found[last].append(name)
        if is_tied and last and name == "norm.weight":
            found[last].append(TABLE)
    return found


class _Cut(NamedTuple):
    """A rank's places along tp and ep, by which its slices follow from names."""

    num_kv_heads: int
    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int

    def slices(self, folder: PretrainedFolder, name: str, published: Sequence[str]) -> list[FileSlice]:
        """Return what the rank reads of a parameter: one slice, or its experts; of weights in fp8 their scales too."""
        if is_stacked(name):
            here = published[shard_slice(len(published), self.ep_size, self.ep_rank)]
            return [part for one in here for part in _slices(folder, one)]
        axis = 1 if name.endswith(_COLUMNS) else 0
        return _slices(folder, published[0], axis, self._part(name, folder.find(published[0]).shape[axis]))

    def _part(self, name: str, size: int) -> slice:
        """Return which rows or columns of a parameter the rank reads."""
        if name.endswith(_KEYS):  # ranks share a key head where there are more of them
            num_shards = min(self.tp_size, self.num_kv_heads)
            return shard_slice(size, num_shards, self.tp_rank * num_shards // self.tp_size)
        if name.endswith((*_ROWS, *_COLUMNS)):
            return shard_slice(size, self.tp_size, self.tp_rank)
        return slice(0, size)


def _slices(folder: PretrainedFolder, name: str, axis: int = 0, part: slice | None = None) -> list[FileSlice]:
    """Return what is read of a slice along one axis of a tensor, by default of all of it; scales come first."""
    stored = folder.find(name)
    where = [slice(0, size) for size in stored.shape]
    if part is not None:
        where[axis] = part
    found = [_file_slice(stored, name, where)]
    if folder.blocks is not None and name in folder.scales:
        found.insert(0, _file_slice(folder.scales[name], name + SCALE, folder.blocks.scale_slices(where)))
    return found


def _file_slice(stored: Stored, name: str, where: Sequence[slice]) -> FileSlice:
    num_bytes = prod(part.stop - part.start for part in where) * stored.dtype.itemsize
    return FileSlice(stored.file.name, name, tuple((part.start, part.stop) for part in where), num_bytes)
