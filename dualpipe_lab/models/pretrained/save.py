"""`save_pretrained`: a model of any cut into a folder that transformers reads.

Chapter: book/whole/weights.  In: a model, a folder.  Out: config.json, safetensors files, their index.
  who writes   of each stage the first rank that holds it, tensor by tensor
  memory       one full tensor, on the ranks that share it; of stacked experts one expert
The folder appears when it is complete, under its name; what was begun lies beside it, as `<name>.part`.
Elsewhere: transformers' `save_pretrained`; Megatron-Bridge `export_hf_weights`.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import members
from dualpipe_lab.dp.checkpoint.file import write_tensors
from dualpipe_lab.dp.checkpoint.folder import sync
from dualpipe_lab.dp.checkpoint.full_tensors import share_out
from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.pretrained.config import config_to_pretrained
from dualpipe_lab.models.pretrained.fields import PretrainedError
from dualpipe_lab.models.pretrained.folder import INDEX, ONE_FILE
from dualpipe_lab.models.pretrained.load import Model, config_of, experts_of, full_shapes, parts_of, tensors_of
from dualpipe_lab.models.pretrained.names import is_stacked, published_names
from dualpipe_lab.models.rank_model import RankModel
from dualpipe_lab.models.stage import TransformerStage
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.models.v3_moe import V3Stage
from dualpipe_lab.tp.shard import Shard, full_tensor, shards_of


def save_pretrained(model: Model, path: Path | str, max_bytes: int = 5 * 10**9) -> None:
    """Write a model by its published names; every rank of the world calls this.

    A tokenizer, and what else a published folder has beside sizes and weights, is not written.

    Args:
        model: as in `load_pretrained`.
        path: of the folder, which must not be there yet.
        max_bytes: of a file; a larger tensor has a file of its own.

    Raises:
        PretrainedError: the folder is there already, or the model has no published form.
        ValueError: ZeRO-3 holds the weights in shards.
    """
    path, config = Path(path), config_of(model)
    if any(map(is_absent, model.parameters())):
        raise ValueError("ZeRO-3 holds the weights in shards; save inside of `with optimizer.gathered():`")
    if path.exists():
        raise PretrainedError(f"{path} is there already, and nothing is overwritten; name another folder")
    hidden = path.with_name(path.name + ".part")
    is_alone = isinstance(model, PlainLlama | PlainV3MoE)
    is_first = is_alone or comm.get_rank() == 0
    if is_first:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    if not is_alone:
        comm.barrier()
    files: dict[str, str] = {}
    for number, stage in parts_of(model).items():
        files |= _write_stage(model, number, stage, config, hidden, max_bytes)
    every = [files] if is_alone else comm.all_gather_object(files)
    if is_first:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        files = {name: file for part in every for name, file in part.items()}
        finish_folder(hidden, files, config_to_pretrained(config, dtype))
        os.replace(hidden, path)
        sync(path.parent)
    if not is_alone:
        comm.barrier()


def _write_stage(
    model: Model, number: int, stage: torch.nn.Module, config: ModelConfig, hidden: Path, max_bytes: int
) -> dict[str, str]:
    """Write a stage, if this rank or one that shares its layers does; return the file of each tensor written here."""
    if isinstance(stage, TransformerStage) and not _takes_part(model, stage, number):
        return {}
    source = _Source(stage, config)
    files: dict[str, str] = {}
    for place, names in enumerate(share_out(source.kinds, max_bytes)):
        if source.writes:
            file = hidden / f"{number:05}-{place:05}.safetensors"
            write_tensors(file, {name: source.kinds[name] for name in names}, source.read)
            files |= dict.fromkeys(names, file.name)
        else:
            for name in names:  # in the order in which the first rank reads them
                source.read(name)
    return files


class _Source:
    """The tensors of a stage by their published names, each gathered when it is read.

    Attributes:
        kinds: type and shape of each.
        writes: whether this rank is the one that writes them.
    """

    def __init__(self, stage: torch.nn.Module, config: ModelConfig) -> None:
        self.stage, self.shards = stage, shards_of(stage)
        self.writes = not isinstance(stage, TransformerStage) or _is_first_copy(stage)
        shapes, tied = full_shapes(config), getattr(stage, "tied_names", {})
        self.tensors = {name: tensor for name, tensor in tensors_of(stage) if name not in tied}
        self.places: dict[str, tuple[str, int | None]] = {}
        self.kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, tensor in self.tensors.items():
            for expert, published in enumerate(published_names(name, config)):
                self.places[published] = name, expert if is_stacked(name) else None
                self.kinds[published] = tensor.dtype, shapes[name][1:] if is_stacked(name) else shapes[name]

    def read(self, published: str) -> Tensor:
        """Return a full tensor; all ranks that share it call this."""
        name, expert = self.places[published]
        tensor, shard = self.tensors[name].detach(), self.shards.get(name)
        if expert is not None:
            return self._expert(tensor, shard, expert, self.kinds[published][1])
        return full_tensor(tensor, shard, self.stage.tp.group) if isinstance(self.stage, TransformerStage) else tensor

    def _expert(self, tensor: Tensor, shard: Shard | None, expert: int, shape: tuple[int, ...]) -> Tensor:
        """Return the weight of one expert, which the first rank that has it sends to the others of ep."""
        if not isinstance(self.stage, V3Stage):
            return tensor[expert]
        here = experts_of(shard, len(tensor) if shard is None else shard.size)
        if self.stage.ep.size == 1:
            return tensor[here.index(expert)]
        found = tensor[here.index(expert)].contiguous() if expert in here else tensor.new_empty(shape)
        source = members(self.stage.ep.group)[expert // len(tensor)]
        comm.broadcast(found, source, self.stage.ep.group)
        return found


def _takes_part(model: Model, stage: TransformerStage, number: int) -> bool:
    """Return whether this rank gathers a stage: of copies along dp and cp the first alone, unless they share experts.

    Mirrors have copies too.
    """
    mesh = stage.mesh
    copies = () if mesh.topology.edp else ("dp", "cp")
    if any(mesh.rank(axis) for axis in copies if axis in mesh.topology.names):
        return False
    if not isinstance(model, RankModel) or model.program is None:
        return True
    holders = [rank for (placed, _), rank in model.program.placement.items() if placed == number]
    return mesh.rank("pp") == min(holders)


def _is_first_copy(stage: TransformerStage) -> bool:
    """Return whether this rank is the first along every axis but pp."""
    mesh = stage.mesh
    return not any(mesh.rank(axis) for axis in ("dp", "ep", "cp", "tp") if axis in mesh.topology.names)


def finish_folder(hidden: Path, files: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Number the files, and write the index and the config.

    Args:
        hidden: the folder with the files.
        files: of each tensor, by its published name.
        values: of config.json.
    """
    order = sorted(set(files.values()))
    named = {file: f"model-{place:05}-of-{len(order):05}.safetensors" for place, file in enumerate(order, 1)}
    if len(order) == 1:
        named = {order[0]: ONE_FILE}
    for file, name in named.items():
        os.rename(hidden / file, hidden / name)
    if len(order) > 1:
        size = sum((hidden / name).stat().st_size for name in named.values())
        index = {"metadata": {"total_size": size}, "weight_map": {name: named[file] for name, file in files.items()}}
        _write_json(hidden / INDEX, index)
    _write_json(hidden / "config.json", values)
    sync(hidden)


def _write_json(file: Path, values: Mapping[str, object]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    sync(file)
