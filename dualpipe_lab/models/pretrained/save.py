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
from dualpipe_lab.dp.checkpoint.file import share_out, write_tensors
from dualpipe_lab.dp.checkpoint.folder import sync
from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.models.parameters import EXPERTS, full_parameters
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.pretrained.config import PretrainedError, config_to_pretrained
from dualpipe_lab.models.pretrained.folder import INDEX, ONE_FILE
from dualpipe_lab.models.pretrained.load import Model, config_of, experts_of, parts_of, tensors_of
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
        if not isinstance(stage, TransformerStage) or _takes_part(model, stage, number):
            files |= _write_stage(number, stage, config, hidden, max_bytes)
    every = [files] if is_alone else comm.all_gather_object(files)
    if is_first:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        files = {name: file for part in every for name, file in part.items()}
        finish_folder(hidden, files, config_to_pretrained(config, dtype))
        os.replace(hidden, path)
        sync(path.parent)
    if not is_alone:
        comm.barrier()


def finish_folder(hidden: Path, files: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Number the files of a folder, and write index and config.json; `files`: of each tensor, by its published name."""
    order = sorted(set(files.values()))
    numbered = (f"model-{place:05}-of-{len(order):05}.safetensors" for place in range(1, len(order) + 1))
    named = dict(zip(order, [ONE_FILE] if len(order) == 1 else numbered, strict=True))
    for file, name in named.items():
        os.rename(hidden / file, hidden / name)
    texts = {"config.json": values}
    if len(order) > 1:
        size = sum((hidden / name).stat().st_size for name in named.values())
        weight_map = {name: named[file] for name, file in files.items()}
        texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": weight_map}
    for name, found in texts.items():
        (hidden / name).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        sync(hidden / name)
    sync(hidden)


def _takes_part(model: Model, stage: TransformerStage, number: int) -> bool:
    """Return whether this rank gathers a stage: the first mirror and copy does, and copies that share experts do."""
    if not (stage.mesh.topology.edp or _is_first(stage, "dp", "cp")):
        return False
    if not isinstance(model, RankModel) or model.program is None:
        return True
    return stage.mesh.rank("pp") == model.program.holders[number][0]


def _is_first(stage: TransformerStage, *axes: str) -> bool:
    return not any(stage.mesh.rank(axis) for axis in axes if axis in stage.mesh.topology.names)


def _write_stage(
    number: int, stage: torch.nn.Module, config: ModelConfig, hidden: Path, max_bytes: int
) -> dict[str, str]:
    """Write a stage on its first rank, to which the others give their shards; return the file of each tensor here."""
    known, shards, tied = full_parameters(config), shards_of(stage), getattr(stage, "tied_names", {})
    places: dict[str, tuple[Tensor, Shard | None, int | None]] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, tensor in tensors_of(stage):
        for expert, published in enumerate(known[name].file_names if name not in tied else ()):
            is_expert = known[name].sharded == EXPERTS
            places[published] = tensor.detach(), shards.get(name), expert if is_expert else None
            kinds[published] = tensor.dtype, known[name].file_shape

    def read(published: str) -> Tensor:
        tensor, shard, expert = places[published]
        if expert is not None:
            return _expert(stage, tensor, shard, expert, kinds[published][1])
        return full_tensor(tensor, shard, stage.tp.group) if isinstance(stage, TransformerStage) else tensor

    files: dict[str, str] = {}
    for place, names in enumerate(share_out(kinds, max_bytes)):
        if not isinstance(stage, TransformerStage) or _is_first(stage, "dp", "ep", "cp", "tp"):
            file = hidden / f"{number:05}-{place:05}.safetensors"
            write_tensors(file, {name: kinds[name] for name in names}, read)
            files |= dict.fromkeys(names, file.name)
        else:
            for name in names:  # in the order in which the first rank reads them
                read(name)
    return files


def _expert(stage: torch.nn.Module, tensor: Tensor, shard: Shard | None, expert: int, shape: tuple[int, ...]) -> Tensor:
    """Return the weight of one expert, which the first rank that has it sends to the others of ep."""
    if not isinstance(stage, V3Stage):
        return tensor[expert]
    here = experts_of(shard, len(tensor) if shard is None else shard.size)
    if stage.ep.size == 1:
        return tensor[here.index(expert)]
    found = tensor[here.index(expert)].contiguous() if expert in here else tensor.new_empty(shape)
    source = members(stage.ep.group)[expert // len(tensor)]
    comm.broadcast(found, source, stage.ep.group)
    return found
