"""`slices_of`: what every rank of a plan would read of a published folder, without reading a tensor.

Chapter: book/whole/weights.  In: a folder, a topology, a program.  Out: per rank, file, tensor, slice and bytes.
  cut by rows     q, k, v, gate, up, the embedding and the head: their outputs are shared along tp; of latent attention
                  what unfolds queries, keys and values
  cut by columns  o and down: their inputs are
  KV heads       with more ranks than KV heads, several ranks read the same rows
  experts         whole, those of the rank along ep, whether it is an axis or within the data ranks
  everywhere      norms, routers with their biases, what makes latents; along dp and cp everything else too
Elsewhere: transformers' `base_model_tp_plan` by name; vLLM's `weight_loader` of each layer.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.parameters import EXPERTS, TABLE, full_parameters
from dualpipe_lab.models.pretrained.config import config_from_pretrained
from dualpipe_lab.models.pretrained.folder import PretrainedFolder
from dualpipe_lab.models.pretrained.load import check_folder
from dualpipe_lab.models.stage_rules import ModelConfig, check_stages, sizes_of, stage_layers, stages_of
from dualpipe_lab.pp.program import Program
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.topology import Topology


class FileSlice(NamedTuple):
    """A part of a tensor in a file: the published name, first index and end along each axis, and its bytes."""

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
    known, num_kv_heads = full_parameters(config), sizes_of(config).num_kv_heads
    names = _stage_names(known, config, stage_layers(config, program.num_stages if program else 1, layers))
    tp_size, ep_size = topology.size("tp"), topology.size("ep")

    @cache  # many ranks read the same
    def of_stage(stage: int, tp: int, ep: int) -> list[FileSlice]:
        found: list[FileSlice] = []
        for name in names[stage]:
            files, shard = known[name].file_names, known[name].shard(tp_size, tp, num_kv_heads)
            here = files[shard_slice(len(files), ep_size, ep)] if known[name].sharded == EXPERTS else files
            found += [_slice(folder, file, *shard) for file in here]
        return found

    def of_rank(rank: int) -> list[FileSlice]:
        here = topology.at(rank)
        place = here.rank("tp"), here.rank("ep")
        return [one for stage in stages_of(program, here.rank("pp")) for one in of_stage(stage, *place)]

    return list(map(of_rank, range(topology.world_size)))


def _stage_names(names: Iterable[str], config: ModelConfig, split: Sequence[range]) -> list[list[str]]:
    """Return the parameters of each stage; a tied head reads the table, unless that is on its stage already."""
    stage_of = {number: stage for stage, layers in enumerate(split) for number in layers}
    last = len(split) - 1
    found: list[list[str]] = [[] for _ in split]
    for name in names:
        is_layer = name.startswith("layers.")
        found[stage_of[int(name.split(".")[1])] if is_layer else 0 if name == TABLE else last].append(name)
        if name == "norm.weight" and last and isinstance(config, LlamaConfig) and config.tied:
            found[last].append(TABLE)
    return found


def _slice(folder: PretrainedFolder, name: str, axis: int, number: int, count: int) -> FileSlice:
    """Return what is read of a shard of a tensor."""
    stored = folder.find(name)
    where = [slice(0, size) for size in stored.shape]
    if count > 1:
        where[axis] = shard_slice(stored.shape[axis], count, number)
    num_bytes = prod(part.stop - part.start for part in where) * stored.dtype.itemsize
    return FileSlice(stored.file.name, name, tuple((part.start, part.stop) for part in where), num_bytes)
