"""`read_model`: the model of a checkpoint in this process, without ranks and without a plan.

Chapter: book/whole/training.  In: a checkpoint that any plan saved.  Out: the full model in plain torch.
  memory    the full weights, in the precision that they were saved with: masters where there were some, no moments
Elsewhere: Megatron `tools/checkpoint/convert.py`; torch `dcp_to_torch_save`, which returns tensors without a model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from dualpipe_lab.dp.checkpoint.reader import Checkpoint, CheckpointError
from dualpipe_lab.dp.checkpoint.region import full_region
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.mtp import MTP_PREFIX
from dualpipe_lab.models.parameters import TABLE
from dualpipe_lab.models.plain_llama import PlainLlama
from dualpipe_lab.models.plain_v3_moe import PlainV3MoE
from dualpipe_lab.models.pretrained.load import tensors_of
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.tp.latent_sizes import LatentSizes
from dualpipe_lab.tp.rope_scaling import scaling_of
from dualpipe_lab.train.options import Config, find_checkpoint

PlainModel: TypeAlias = PlainLlama | PlainV3MoE

ROUTER_BIAS = "mlp.router.bias"  # how the names of the buffers of a model end that are weights too
KEPT = "parameter/", "buffer/"  # the moments and averages stay where they are
_CONFIGS: dict[str, type[Config]] = {"LlamaConfig": LlamaConfig, "V3MoEConfig": V3MoEConfig}
_PARTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {  # fields that are sizes themselves
    "rope_scaling": scaling_of,
    "latent": lambda values: LatentSizes(**values),
}


def read_model(path: Path | str) -> PlainModel:
    """Return the full model of a checkpoint, in this process; what predicts a second token is left out.

    Args:
        path: of a checkpoint, or of a folder of them, of which the last is taken; any plan may have saved it.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it does not say of which model it is.
    """
    found = find_checkpoint(path)
    checkpoint = Checkpoint(found)
    chosen = saved_config(found, checkpoint.index.values["config"])
    stored, table = checkpoint.index.tensors, f"parameter/{TABLE}"
    if table not in stored:
        raise CheckpointError(f"{found} has no tensor {table}; it is a checkpoint of another model")
    dtype: torch.dtype = getattr(torch, stored[table].dtype)
    make: Any = PlainV3MoE if isinstance(chosen, V3MoEConfig) else PlainLlama
    model: PlainModel = make(chosen, dtype)
    targets = {saved_name(name): tensor for name, tensor in tensors_of(model)}  # a tied table comes once
    for name, tensor in targets.items():
        has_own_type = name.endswith(ROUTER_BIAS) and name in stored  # a router's bias may be wider than the weights
        kind: torch.dtype = getattr(torch, stored[name].dtype) if has_own_type else dtype
        checkpoint.check(name, full_region(tuple(tensor.shape)), kind if kind.is_floating_point else dtype)
    known = {*targets, *(name for name in checkpoint.names() if is_second(name))}
    if surplus := [name for name in checkpoint.names() if name.startswith(KEPT) and name not in known]:
        raise CheckpointError(
            f"{found} has tensor {surplus[0]}, the model has not; it is a checkpoint of another model"
        )
    with torch.no_grad():
        for name, tensor in targets.items():
            tensor.copy_(checkpoint.read(name))
    return model


def saved_config(path: Path, saved: Any) -> Config:
    """Return the model's config from the value `config` of a checkpoint."""
    if not isinstance(saved, Mapping) or saved.get("model") not in _CONFIGS:
        raise CheckpointError(f"{path} does not say of which model it is; what train.run saves does")
    parts = {name: make(found) for name, make in _PARTS.items() if (found := saved["config"].get(name))}
    return _CONFIGS[saved["model"]](**saved["config"] | parts)


def is_second(name: str) -> bool:
    """Return whether a tensor of a checkpoint belongs to what predicts a second token, in training alone."""
    return name.partition("/")[2].startswith(MTP_PREFIX)


def saved_name(name: str) -> str:
    """Return the name in a checkpoint of a parameter, or of a router's bias: the latter is a buffer."""
    return f"{'buffer' if name.endswith(ROUTER_BIAS) else 'parameter'}/{name}"
