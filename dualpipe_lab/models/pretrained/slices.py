"""`slices_of`: what every rank of a plan would read of a published folder, without reading a tensor.

Chapter: book/whole/weights.  In: a folder, a topology, a program.  Out: per rank, file, tensor, slice and bytes.
  read here       config.json and the headers of the files; no process starts
  cut by rows     q, k, v, gate, up, the embedding and the head: their outputs are shared along tp
  cut by columns  o and down: their inputs are
  key heads       with more ranks than key heads, several ranks read the same rows
`load_pretrained` reads exactly these slices.
Elsewhere: transformers' `base_model_tp_plan` by name; vLLM's `weight_loader` of each layer.
"""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.pretrained.config import config_from_pretrained
from dualpipe_lab.models.pretrained.folder import PretrainedError, PretrainedFolder
from dualpipe_lab.models.pretrained.load import check_folder, full_shapes
from dualpipe_lab.models.pretrained.names import published_name
from dualpipe_lab.models.stage import HEAD, TABLE
from dualpipe_lab.models.stage_rules import check_stages, stage_layers, stages_of
from dualpipe_lab.pp.program import Program
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.topology import Topology

_ROWS = (TABLE, HEAD, "q.weight", "gate.weight", "up.weight")
_COLUMNS = ("o.weight", "down.weight")
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
        PretrainedError: the folder cannot be used, or is of a model with experts.
        ValueError: as `check_stages`, for a model that this cut does not fit.
    """
    config, folder = config_from_pretrained(path), PretrainedFolder(path)
    if not isinstance(config, LlamaConfig):
        raise PretrainedError(f"{path} has experts, whose slices are not listed before a run; use load_pretrained")
    check_folder(folder, config)
    check_stages(config, topology, program, layers=layers)
    split = stage_layers(config, 1 if program is None else program.num_stages, layers)
    return [
        [
            _slice(folder, config, name, here.get("tp", 0), topology.size("tp"))
            for stage in stages_of(program, here.get("pp", 0))
            for name in _names(config, split, stage)
        ]
        for here in map(topology.coordinates, range(topology.world_size))
    ]


def _names(config: LlamaConfig, split: Sequence[range], stage: int) -> list[str]:
    """Return the parameters of a stage by our names; a tied head reads the table, unless that is here already."""
    is_first, is_last, names = stage == 0, stage == len(split) - 1, list(full_shapes(config))
    found = [TABLE] if is_first else []
    for number in split[stage]:
        found += [name for name in names if name.startswith(f"layers.{number}.")]
    if is_last:
        found.append("norm.weight")
        if not config.tied or not is_first:
            found.append(TABLE if config.tied else HEAD)
    return found


def _slice(folder: PretrainedFolder, config: LlamaConfig, name: str, rank: int, num_ranks: int) -> FileSlice:
    """Return what a rank of tp reads of a parameter."""
    stored = folder.find(published_name(name))
    where = [(0, size) for size in stored.shape]
    axis = 1 if name.endswith(_COLUMNS) else 0
    if name.endswith(_KEYS):  # ranks share a key head where there are more of them
        num_shards = min(num_ranks, config.num_kv_heads)
        part = shard_slice(stored.shape[0], num_shards, rank * num_shards // num_ranks)
    elif name.endswith((*_ROWS, *_COLUMNS)):
        part = shard_slice(stored.shape[axis], num_ranks, rank)
    else:
        part = slice(0, stored.shape[0])  # norms are on every rank
    where[axis] = part.start, part.stop
    num_bytes = prod(stop - start for start, stop in where) * stored.dtype.itemsize
    return FileSlice(stored.file.name, published_name(name), tuple(where), num_bytes)
