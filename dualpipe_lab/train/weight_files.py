"""`WeightFiles`: the weights of a model on disk, in any of the forms that are converted, read tensor by tensor.

Chapter: book/whole/weights.  In: a folder.  Out: the model's sizes; type, shape and values of each full tensor.
  published    config.json and safetensors files, by the published names
  checkpoint   of this library, saved under any plan; moments and random numbers stay where they are
  torch        of torch.distributed.checkpoint, with the names of either
Types and shapes of all tensors are checked before one is read.
Elsewhere: Megatron-Bridge's loaders; torchtitan `scripts/checkpoint_conversion`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.dp.checkpoint.folder import saved_steps
from dualpipe_lab.dp.checkpoint.full_tensors import Kinds
from dualpipe_lab.dp.checkpoint.index import INDEX, CheckpointError
from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.dp.checkpoint.torch_checkpoint import values_of
from dualpipe_lab.dp.checkpoint.torch_files import METADATA, TorchFiles
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.pretrained.config import config_from_pretrained
from dualpipe_lab.models.pretrained.folder import PICKLES, PretrainedError, PretrainedFolder, read_json
from dualpipe_lab.models.pretrained.load import check_folder, full_shapes
from dualpipe_lab.models.pretrained.names import published_name
from dualpipe_lab.train.options import find_checkpoint
from dualpipe_lab.train.saved_model import saved_config

PREFIX = "parameter/"
PUBLISHED = "published"  # beside the config of a checkpoint: the config.json that it came from


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a model on disk.

    Attributes:
        form: "published", "checkpoint" or "torch".
        path: of the folder.
        config: sizes of the model.
        kinds: type and shape of every tensor, by our names.
        read: returns a full tensor by our name, in the type of `kinds`.
        published: the values of config.json, if the folder has them.
    """

    form: str
    path: Path
    config: LlamaConfig
    kinds: Kinds
    read: Callable[[str], Tensor]
    published: Mapping[str, Any] | None

    def in_type(self, dtype: torch.dtype | None) -> "WeightFiles":
        """Return the same weights in another type, rounded to the nearest; None for the type of each tensor."""
        if dtype is None:
            return self
        kinds = {name: (dtype, shape) for name, (_, shape) in self.kinds.items()}
        return replace(self, kinds=kinds, read=lambda name: self.read(name).to(dtype))


def open_weights(path: Path | str) -> WeightFiles:
    """Return the weights in a folder of any form.

    Raises:
        PretrainedError: a published folder that cannot be used; or a folder of none of the forms.
        CheckpointError: a checkpoint that is damaged, or of another model than it says; or torch's asks for code.
        ValueError: a model that has no published form.
    """
    path = Path(path)
    if (path / INDEX).is_file() or saved_steps(path):
        return _of_checkpoint(path)
    if (path / METADATA).is_file():
        return _of_torch(path)
    if (path / "config.json").is_file():
        return _of_published(path)
    pickled = sorted(found.name for kind in PICKLES for found in path.glob(kind)) if path.is_dir() else []
    told = f"it has a pickle ({pickled[0]}), and nothing is unpickled here; " if pickled else ""
    raise PretrainedError(
        f"{path} holds no weights that can be converted: {told}give a folder with config.json and safetensors files, "
        "or a checkpoint, of this library or of torch"
    )


def _of_published(path: Path) -> WeightFiles:
    config, folder = _dense_config(path), PretrainedFolder(path)
    check_folder(folder, config)
    ours = {name: published_name(name) for name in full_shapes(config)}
    kinds = {name: (folder.find(theirs).dtype, folder.find(theirs).shape) for name, theirs in ours.items()}
    values = read_json(path / "config.json")
    return WeightFiles("published", path, config, kinds, lambda name: folder.read(ours[name]), values)


def _dense_config(path: Path) -> LlamaConfig:
    config = config_from_pretrained(path)
    if isinstance(config, LlamaConfig):
        return config
    raise PretrainedError(
        f"{path} is of a {type(config).__name__}, whose experts are single in files and stacked here; read it with "
        "load_pretrained and write it with save_pretrained"
    )


def _of_checkpoint(path: Path) -> WeightFiles:
    checkpoint = Checkpoint(find_checkpoint(path))
    entries = checkpoint.index.tensors
    stored = {name: (getattr(torch, entries[name].dtype), entries[name].shape) for name in checkpoint.names(PREFIX)}
    return _by_our_names("checkpoint", checkpoint.path, checkpoint.index.values["config"], stored, checkpoint.read)


def _of_torch(path: Path) -> WeightFiles:
    files = TorchFiles(path)
    if values := values_of(files):
        stored = {name: kind for name, kind in files.kinds.items() if name.startswith(PREFIX)}
        return _by_our_names("torch", path, values.get("config"), stored, files.read)
    if not (path / "config.json").is_file():
        raise PretrainedError(f"{path} does not say of which model it is; put the config.json of its model into it")
    config = _dense_config(path)
    ours = {name: published_name(name) for name in full_shapes(config)}
    check_kinds(path, files.kinds, {theirs: full_shapes(config)[name] for name, theirs in ours.items()})
    kinds = {name: files.kinds[theirs] for name, theirs in ours.items()}
    values = read_json(path / "config.json")
    return WeightFiles("torch", path, config, kinds, lambda name: files.read(ours[name]), values)


def _by_our_names(form: str, path: Path, saved: Any, stored: Kinds, read: Callable[[str], Tensor]) -> WeightFiles:
    """Return weights that a training has saved; `saved` is what it says about its model."""
    if not isinstance(saved, Mapping) or "model" not in saved:
        raise CheckpointError(f"{path} does not say of which model it is; what train.run saves does")
    try:
        config = saved_config(path, saved)
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is of a model with other sizes than those known here: {error}") from error
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{path} is of a {type(config).__name__}, which has no published form here; a LlamaConfig has")
    shapes = full_shapes(config)
    check_kinds(path, stored, {PREFIX + name: shape for name, shape in shapes.items()})
    kinds = {name: stored[PREFIX + name] for name in shapes}
    return WeightFiles(form, path, config, kinds, lambda name: read(PREFIX + name), saved.get(PUBLISHED))


def check_kinds(path: Path, stored: Kinds, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that are not those of a model.

    Raises:
        CheckpointError: naming the first tensor that is missing, left over, of another shape or of another type.
    """
    for name, shape in wanted.items():
        if name not in stored:
            raise CheckpointError(f"{path} has no tensor {name}, which its config asks for; it is incomplete")
        dtype, found = stored[name]
        if found != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {found}, its config asks for {shape}")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise CheckpointError(
                f"{path}: tensor {name} is {dtype}; weights are float64, float32, bfloat16 or float16"
            )
    if surplus := sorted(set(stored) - set(wanted)):
        raise CheckpointError(f"{path} has tensor {surplus[0]}, which the model of its config has not")
