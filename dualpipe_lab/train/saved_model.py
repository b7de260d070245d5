"""`read_model`: the model of a checkpoint in this process, without ranks and without a plan.

Chapter: book/whole/training.  In: a checkpoint that any plan saved.  Out: the full model in plain torch.
  memory    the full weights, in the precision that they were saved with: masters where there were some, no moments
Elsewhere: Megatron `tools/checkpoint/convert.py`; torch `dcp_to_torch_save`, which returns tensors without a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dualpipe_lab.dp.checkpoint.index import CheckpointError
from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.dp.checkpoint.region import full_region
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.stage import TABLE
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.rope_scaling import RopeScaling
from dualpipe_lab.train.options import Config, check_config, find_checkpoint

PlainModel: TypeAlias = PlainLlama | PlainV3MoE

_CONFIGS: dict[str, type[Config]] = {"LlamaConfig": LlamaConfig, "V3MoEConfig": V3MoEConfig}
_PARTS: dict[str, type[Any]] = {"rope_scaling": RopeScaling, "latent": LatentSizes}  # fields that are sizes themselves


def read_model(path: str | Path, config: Config | None = None) -> PlainModel:
    """Return the full model of a checkpoint, in this process.

    Args:
        path: of a checkpoint, or of a folder of them, of which the last is taken; any plan may have saved it.
        config: of the model; what `train.run` saves has one, and a given one must equal it.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its tensors are not this model's.
        ValueError: it is of another model, or says nothing of its model and `config` is missing.
    """
    found = find_checkpoint(path)
    checkpoint = Checkpoint(found)
    chosen = saved_config(checkpoint.path, checkpoint.index.values["config"], config)
    dtype = _dtype(checkpoint)
    make: Any = PlainV3MoE if isinstance(chosen, V3MoEConfig) else PlainLlama
    model: PlainModel = make(chosen, dtype)
    targets = _targets(model)
    for name, tensor in targets.items():
        checkpoint.check(name, full_region(tuple(tensor.shape)), dtype)
    kept = "parameter/", "buffer/"  # the moments and averages stay where they are
    if surplus := [name for name in checkpoint.names() if name.startswith(kept) and name not in targets]:
        raise CheckpointError(
            f"{found} has tensor {surplus[0]}, the model has not; it is a checkpoint of another model"
        )
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(checkpoint.read(name))
    return model


def sequence_length_of(path: str | Path) -> int | None:
    """Return the tokens of a sequence of the training that saved a checkpoint; None if it does not say."""
    found = find_checkpoint(path)
    sampler = Checkpoint(found).index.values["sampler"]
    return int(sampler["sequence_length"]) if isinstance(sampler, Mapping) and "sequence_length" in sampler else None


def saved_config(path: Path, saved: Any, given: Config | None = None) -> Config:
    """Return a model's config, from what a checkpoint says or given; if there are both, they must be equal.

    Args:
        path: of the checkpoint.
        saved: the value `config` in it.
        given: the config that is wanted.

    Raises:
        ValueError: they differ, or there is none.
    """
    if isinstance(saved, Mapping) and saved.get("model") in _CONFIGS:
        if given is not None:
            check_config(path, saved, given)
        parts = {name: make(**found) for name, make in _PARTS.items() if (found := saved["config"].get(name))}
        return _CONFIGS[saved["model"]](**saved["config"] | parts)
    if given is None:
        raise ValueError(f"{path} does not say of which model it is; give config=")
    return given


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    name = f"parameter/{TABLE}"
    if name not in checkpoint.index.tensors:
        raise CheckpointError(f"{checkpoint.path} has no tensor {name}; it is a checkpoint of another model")
    dtype: torch.dtype = getattr(torch, checkpoint.index.tensors[name].dtype)
    return dtype


def _targets(model: PlainModel) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names in a checkpoint; a tied table comes once."""
    found: dict[str, torch.Tensor] = {f"parameter/{name}": tensor for name, tensor in model.named_parameters()}
    return found | {
        f"buffer/{name.replace('selection_bias', 'bias')}": tensor for name, tensor in model.named_buffers()
    }
