"""`load_pretrained`: published weights into a model, each rank its slices alone.

Chapter: book/whole/weights.  In: a model of any cut, a folder.  Out: the model's parameters, filled.
  memory    beside this rank's parameters the slice that is being read
No rank sends anything: every rank opens the files itself.  Names, shapes, types and lengths of all files are checked
before a parameter changes.  A disk that fails after that leaves NaN everywhere: never half of one model in another.
  names     a layer's number stays; experts are stacked here and single in files.  Weights are stored [out, in], rotary
            pairs are the same on both sides: i and i + K / 2, in latent attention neighbours.  So none is permuted
Elsewhere: transformers' `from_pretrained(tp_plan=)`; torchtitan's `StateDictAdapter`, DCP's `HuggingFaceStorageReader`.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from dualpipe_lab.grad_ready import synchronizers_of
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.lora import LoRA
from dualpipe_lab.models.parameters import EXPERTS, TABLE, end_parameters, full_parameters
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.pretrained.config import PretrainedError, config_from_pretrained, family_of
from dualpipe_lab.models.pretrained.folder import PretrainedFolder
from dualpipe_lab.models.rank_model import RankModel
from dualpipe_lab.models.stage import TransformerStage
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.tp.shard import Shard, shards_of

Model: TypeAlias = PlainLlama | PlainV3MoE | TransformerStage | RankModel
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MOST_TOKENS = 8  # layers behind the last, each for one token more, that files may have
_ROWS_AT_ONCE = 4096  # of two tables that are compared
_LEFT_OVER = ".rotary_emb.inv_freq"  # older files have the angles, which follow from the config


def load_pretrained(model: Model, path: Path | str) -> None:
    """Fill a model with published weights, before its optimizer is made; each rank calls this for its own parameters.

    Args:
        model: a plain model, a model over tp and cp, or what `build_stages` returns.
        path: a folder with config.json and safetensors files.

    Raises:
        PretrainedError: the folder cannot be used, is of another model, or has a tensor of another shape or type; then
            no parameter has changed.  Or a file cannot be read any more, or a weight is too large for the type of its
            parameter; then all parameters are NaN.
        ValueError: an optimizer of `dp` has the parameters already, and with them masters and shards of other weights.
    """
    if any(synchronizers_of(parameter) for parameter in model.parameters()):
        raise ValueError(
            "published weights are read before the optimizer is made, got parameters that one has: its masters and "
            "shards would keep the old weights; call load_pretrained first"
        )
    config, parts = config_of(model), parts_of(model).values()
    folder = open_pretrained(path, config)
    with torch.no_grad():
        try:
            for part in parts:
                _fill(part, folder, config)
        except BaseException:
            for _, tensor in chain.from_iterable(map(tensors_of, parts)):
                tensor.fill_(torch.nan)
            raise


def open_pretrained(path: Path | str, config: ModelConfig) -> PretrainedFolder:
    """Return the folder of a model, after checking that it has these sizes; only headers are read."""
    found = config_from_pretrained(path)
    if _normal(found) != _normal(config):
        raise PretrainedError(f"{path} is of {found}, the model of {config}; build it from config_from_pretrained")
    folder = PretrainedFolder(path)
    check_folder(folder, config)
    return folder


def _fill(part: nn.Module, folder: PretrainedFolder, config: ModelConfig) -> None:
    """Fill a module with its slices, one after the other; stacked experts one by one."""
    shards, known = shards_of(part), full_parameters(config)
    for name, tensor in tensors_of(part):
        shard, parameter = shards.get(name), known.get(name) or known[TABLE]  # of a tied head
        names = parameter.file_names
        if parameter.sharded == EXPERTS:
            for target, number in zip(tensor, experts_of(shard, len(names)), strict=True):
                _copy(folder.read(names[number]), target, name)
        else:
            where = () if shard is None else (*[slice(None)] * shard.axis, slice(shard.start, shard.stop))
            _copy(folder.read(names[0], where), tensor, name)


def _copy(found: Tensor, target: Tensor, name: str) -> None:
    if found.shape != target.shape:
        raise PretrainedError(f"{name} has shape {tuple(target.shape)} on this rank, the files {found.shape}")
    target.copy_(rounded(found, target.dtype, name))


def rounded(found: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a tensor in another type; PretrainedError if a finite weight is too large for it."""
    if found.dtype == dtype:
        return found
    largest = torch.finfo(dtype).max
    if torch.finfo(found.dtype).max > largest and (lost := found.isfinite() & found.to(dtype).isinf()).any():
        raise PretrainedError(
            f"{name} has {int(lost.sum())} weights of up to {found[lost].abs().max():.4g}, and {dtype} ends at "
            f"{largest:.4g}; use bfloat16 or float32"
        )
    return found.to(dtype)


def tensors_of(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a published folder has of a module: its parameters, and the biases of its routers."""
    yield from part.named_parameters()
    for name, buffer in part.named_buffers():
        if name.endswith(("mlp.router.bias", "mlp.router.selection_bias")):
            yield name.replace("selection_bias", "bias"), buffer


def check_folder(folder: PretrainedFolder, config: ModelConfig) -> None:
    """Refuse a folder whose tensors are not those of a model; PretrainedError names the first that is not."""
    wanted = {name: each.file_shape for each in full_parameters(config).values() for name in each.file_names}
    for name, shape in wanted.items():
        stored = folder.find(name)
        if stored.shape != shape:
            raise PretrainedError(f"{stored.file}: {name} has shape {stored.shape}, the config asks for {shape}")
        if stored.dtype not in _FLOATS:
            raise PretrainedError(f"{stored.file}: {name} has {stored.dtype}; convert the folder to bfloat16 first")
    for name in sorted(set(folder.tensors) - set(wanted) - _spare(folder, config)):
        if not name.endswith(_LEFT_OVER):
            raise PretrainedError(f"{folder.tensors[name].file} has {name}, which the model has not")
    if isinstance(config, LlamaConfig) and config.tied:
        _compare_tied(folder, config)


def _compare_tied(folder: PretrainedFolder, config: LlamaConfig) -> None:
    """Refuse a head that is stored beside the table to which config.json ties it, and has other values."""
    table, _, head = (each.file_name for each in end_parameters(config))
    if head not in folder.tensors:
        return
    shape = folder.find(table).shape
    is_same = folder.find(head).shape == shape
    for start in range(0, shape[0] if is_same else 0, _ROWS_AT_ONCE):
        rows = (slice(start, min(start + _ROWS_AT_ONCE, shape[0])),)
        is_same = is_same and bool((folder.read(table, rows) == folder.read(head, rows)).all())
    if not is_same:
        raise PretrainedError(
            f"{folder.path}: {head} has other values than {table}, to which tie_word_embeddings=true in config.json "
            "ties it; set it to false to keep both, or leave one tensor out"
        )


def _spare(folder: PretrainedFolder, config: ModelConfig) -> set[str]:
    """Return the tensors of a folder that a model has no use for: a tied table again; a second token's layers."""
    if isinstance(config, LlamaConfig):
        return {end_parameters(config)[-1].file_name} if config.tied else set()
    stems = (f"model.layers.{number}." for number in range(config.num_layers, config.num_layers + _MOST_TOKENS))
    layers = tuple(stem for stem in stems if f"{stem}eh_proj.weight" in folder.tensors)
    return {name for name in folder.tensors if name.startswith(layers)}


def experts_of(shard: Shard | None, num_experts: int) -> list[int]:
    """Return the numbers of the experts in a shard."""
    every = torch.arange(num_experts)
    return list(map(int, every if shard is None else shard.of(every)))


def _normal(config: ModelConfig) -> ModelConfig:
    """Return a config without what may differ: a head size that follows, a loss that is not in the files."""
    if isinstance(config, LlamaConfig):
        return replace(config, head_size=config.size_of_head)
    if config.latent is None:
        return replace(config, head_size=config.dense.size_of_head, balance=0.0)
    return replace(config, head_size=None, num_kv_heads=config.num_heads, balance=0.0)


def parts_of(model: Model) -> dict[int, nn.Module]:
    """Return the modules whose parameters have their names in the full model, by the number of their stage."""
    return dict(model.stages) if isinstance(model, RankModel) else {0: model}


def config_of(model: Model) -> ModelConfig:
    """Return the sizes of a model; PretrainedError if it has no published form here."""
    config = check_form(model.config)
    if any(getattr(part, "mtp", False) for part in (model, *parts_of(model).values())):
        raise PretrainedError(
            "the layer of a second token has no published form here, got a model that predicts one; build it without "
            "mtp"
        )
    if any(isinstance(module, LoRA) for module in model.modules()):
        raise PretrainedError(
            "adapters have no published form here; load before add_lora, save after merge_lora(model)"
        )
    return config


def check_form(config: object) -> ModelConfig:
    """Return the sizes of a model that has a published form here; PretrainedError for others."""
    if isinstance(config, LlamaConfig | V3MoEConfig) and family_of(config) is not None:
        return config
    raise PretrainedError(
        f"published weights are those of a Llama, a Qwen3, a DeepSeek-V3 or a Qwen3-MoE, got {config}; give it latent= "
        "for a V3; for a Qwen3-MoE softmax scores, qk_norm, and no biases, groups, shared experts or scale"
    )
