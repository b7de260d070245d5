"""`WeightFiles`: the weights of a model on disk, in any of the forms that are converted, read tensor by tensor.

Chapter: book/whole/weights.  In: a folder.  Out: the model's sizes; type, shape and values of each full tensor.
  published    config.json and safetensors files, by the published names
  checkpoint   of this library, saved under any plan; moments and random numbers stay where they are
  torch        of torch.distributed.checkpoint, with the names of either
  fp8          weights with scales for blocks are read in float32, and have the type of the embedding by default
  experts      single in files and stacked here: one at a time is read, of torch's stacks the stack that it is in
Types and shapes of all tensors are checked before one is read.
Elsewhere: Megatron-Bridge's loaders; torchtitan `scripts/checkpoint_conversion`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualpipe_lab.dp.checkpoint.folder import saved_steps
from dualpipe_lab.dp.checkpoint.full_tensors import Kinds
from dualpipe_lab.dp.checkpoint.index import INDEX, CheckpointError
from dualpipe_lab.dp.checkpoint.reader import Checkpoint
from dualpipe_lab.dp.checkpoint.region import ShardRegion
from dualpipe_lab.dp.checkpoint.store import Place
from dualpipe_lab.dp.checkpoint.torch_checkpoint import values_of
from dualpipe_lab.dp.checkpoint.torch_files import METADATA, TorchFiles
from dualpipe_lab.models.pretrained.config import config_from_pretrained
from dualpipe_lab.models.pretrained.fields import PretrainedError, read_json
from dualpipe_lab.models.pretrained.folder import PICKLES, PretrainedFolder
from dualpipe_lab.models.pretrained.load import check_folder, check_form, full_shapes
from dualpipe_lab.models.pretrained.names import is_stacked, published_name, published_names
from dualpipe_lab.models.stage import TABLE
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.train.options import find_checkpoint
from dualpipe_lab.train.saved_model import ROUTER_BIAS, is_second, saved_config, saved_name

PUBLISHED = "published"  # beside the config of a checkpoint: the config.json that it came from
_KEPT = "parameter/", "buffer/"  # the moments and averages stay where they are
Read: TypeAlias = Callable[[str, int | None], Tensor]  # by the name in a checkpoint, and the number of an expert


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a model on disk, by their published names.

    Attributes:
        form: "published", "checkpoint" or "torch".
        path: of the folder.
        config: sizes of the model.
        kinds: type and shape of every tensor; experts are single.
        stored: returns a full tensor in the type in which it is stored, fp8 in float32.
        published: the values of config.json, if the folder has them.
    """

    form: str
    path: Place
    config: ModelConfig
    kinds: Kinds
    stored: Callable[[str], Tensor]
    published: Mapping[str, Any] | None

    def read(self, name: str) -> Tensor:
        """Return a full tensor, rounded to the type of `kinds`."""
        return self.stored(name).to(self.kinds[name][0])

    def in_type(self, dtype: torch.dtype | None) -> "WeightFiles":
        """Return the same weights in another type, rounded to the nearest; None for the types of `kinds`.

        The biases of routers have float32 at least, as their steps are short.
        """
        if dtype is None:
            return self
        names = names_of(self.config).items()
        biases = {theirs for ours, found in names if ours.endswith(ROUTER_BIAS) for theirs in found}
        wide = torch.promote_types(dtype, torch.float32)
        kinds = {name: (wide if name in biases else dtype, shape) for name, (_, shape) in self.kinds.items()}
        return replace(self, kinds=kinds)


def open_weights(path: Path | str) -> WeightFiles:
    """Return the weights in a folder of any form.

    Raises:
        PretrainedError: a published folder that cannot be used; or a folder of none of the forms; or a model that has
            no published form.
        CheckpointError: a checkpoint that is damaged, or of another model than it says; or torch's asks for code.
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


def names_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the published names of every tensor of a full model, by our names; of stacked experts one for each.

    >>> from dualpipe_lab.models import LlamaConfig
    >>> names_of(LlamaConfig())["norm.weight"]
    ('model.norm.weight',)
    """
    return {name: published_names(name, config) for name in full_shapes(config)}


def _of_published(path: Path) -> WeightFiles:
    config, folder = config_from_pretrained(path), PretrainedFolder(path)
    check_folder(folder, config)
    wanted = {name: folder.find(name) for names in names_of(config).values() for name in names}
    table = wanted[published_name(TABLE)].dtype  # what weights in fp8 become, beside the others
    kinds = {name: (table if name in folder.scales else found.dtype, found.shape) for name, found in wanted.items()}
    return WeightFiles("published", path, config, kinds, folder.read, read_json(path / "config.json"))


def _of_checkpoint(path: Path) -> WeightFiles:
    checkpoint = Checkpoint(find_checkpoint(path))
    entries = checkpoint.index.tensors
    names = [name for name in entries if name.startswith(_KEPT)]
    stored = {name: (getattr(torch, entries[name].dtype), entries[name].shape) for name in names}

    def read(name: str, expert: int | None) -> Tensor:
        if expert is None:
            return checkpoint.read(name)
        # an expert is a part of a shard, and a checksum is that of all of it
        checkpoint.verify((name, shard.file) for shard in entries[name].shards if shard.checksum is not None)
        shape = entries[name].shape
        region = ShardRegion(shape, 0, expert, expert + 1, 0, prod(shape[1:]))
        return checkpoint.read(name, region).view(shape[1:])

    return _by_our_names("checkpoint", checkpoint.path, checkpoint.index.values["config"], stored, read)


def _of_torch(path: Path) -> WeightFiles:
    files = TorchFiles(path)
    if values := values_of(files):
        stored = {name: kind for name, kind in files.kinds.items() if name.startswith(_KEPT)}
        return _by_our_names("torch", path, values.get("config"), stored, _StackReader(files))
    if not (path / "config.json").is_file():
        raise PretrainedError(f"{path} does not say of which model it is; put the config.json of its model into it")
    config = config_from_pretrained(path)
    wanted = {theirs: shape for _, _, theirs, shape in _singles(config)}
    check_kinds(path, files.kinds, wanted)
    kinds = {name: files.kinds[name] for name in wanted}
    return WeightFiles("torch", path, config, kinds, files.read, read_json(path / "config.json"))


def _by_our_names(form: str, path: Place, saved: Any, stored: Kinds, read: Read) -> WeightFiles:
    """Return weights that a training has saved, without what predicts a second token.

    `saved`: what the training says about its model.
    """
    stored = {name: kind for name, kind in stored.items() if not is_second(name)}
    if not isinstance(saved, Mapping) or "model" not in saved:
        raise CheckpointError(f"{path} does not say of which model it is; what train.run saves does")
    try:
        config = saved_config(path, saved)
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is of a model with other sizes than those known here: {error}") from error
    try:
        config = check_form(config)
    except PretrainedError as error:
        raise PretrainedError(f"{path} has no published form: {error}") from error
    check_kinds(path, stored, {saved_name(name): shape for name, shape in full_shapes(config).items()})
    kinds, places = {}, {}
    for ours, expert, theirs, shape in _singles(config):
        kinds[theirs] = stored[saved_name(ours)][0], shape
        places[theirs] = saved_name(ours), expert
    return WeightFiles(form, path, config, kinds, lambda name: read(*places[name]), saved.get(PUBLISHED))


def _singles(config: ModelConfig) -> list[tuple[str, int | None, str, tuple[int, ...]]]:
    """Return our name, the number of the expert, published name and shape of every tensor of a published model."""
    found: list[tuple[str, int | None, str, tuple[int, ...]]] = []
    for ours, shape in full_shapes(config).items():
        names = published_names(ours, config)
        if is_stacked(ours):
            found += [(ours, expert, theirs, shape[1:]) for expert, theirs in enumerate(names)]
        else:
            found.append((ours, None, names[0], shape))
    return found


class _StackReader:
    """Reads tensors of torch by our names; of stacked experts it holds the stack that was asked for last."""

    def __init__(self, files: TorchFiles) -> None:
        self.files = files
        self.held: dict[str, Tensor] = {}

    def __call__(self, name: str, expert: int | None) -> Tensor:
        """Return a full tensor, or one expert of a stack."""
        if expert is None:
            return self.files.read(name)
        if name not in self.held:
            self.held.clear()  # before the next one is read
            self.held[name] = self.files.read(name)
        return self.held[name][expert]


def check_kinds(path: Place, stored: Kinds, wanted: Mapping[str, tuple[int, ...]]) -> None:
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
