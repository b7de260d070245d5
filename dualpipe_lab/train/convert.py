"""`convert`: weights of one form into another, tensor by tensor, in one process.

Chapter: book/whole/weights.  In: a folder, the form of the other.  Out: the other folder, complete or not there.
  published    config.json and safetensors files, by the published names
  checkpoint   of this library, saved under any plan; moments and random numbers stay where they are
  memory       the largest tensor as it is read, and once more as it is written; experts are read and written singly,
               also those that lie stacked in a checkpoint
Types and shapes of all tensors are checked before one is read, and a failed conversion leaves nothing.
Elsewhere: Megatron-Bridge `import_ckpt` and `export_ckpt`; torchtitan `scripts/checkpoint_conversion`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.dp.checkpoint.file import Kinds, Values, share_out, write_tensors
from dualpipe_lab.dp.checkpoint.folder import appearing, saved_steps
from dualpipe_lab.dp.checkpoint.reader import INDEX, Checkpoint, CheckpointError
from dualpipe_lab.dp.checkpoint.region import ShardRegion
from dualpipe_lab.dp.checkpoint.session import write_checkpoint
from dualpipe_lab.models.parameters import EXPERTS, TABLE, full_parameters
from dualpipe_lab.models.pretrained.config import (
    PretrainedError,
    config_from_pretrained,
    config_to_pretrained,
    read_json,
)
from dualpipe_lab.models.pretrained.folder import PICKLES, PretrainedFolder
from dualpipe_lab.models.pretrained.load import check_folder, check_form, rounded
from dualpipe_lab.models.pretrained.save import finish_folder
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.train.options import find_checkpoint
from dualpipe_lab.train.saved_model import KEPT, ROUTER_BIAS, is_second, saved_config, saved_name

FORMS = ("published", "checkpoint")
DTYPES = ("float64", "float32", "bfloat16", "float16")
PUBLISHED = "published"  # beside the config of a checkpoint: the config.json that it came from


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    source: str  # form
    target: str  # form
    path: Path  # of what was written
    num_tensors: int  # of the model; experts are counted singly, also where they are written as stacks
    num_bytes: int  # of these tensors, as they are written
    largest_bytes: int  # of the largest of them


def convert(
    source: Path | str, target: Path | str, to: str, dtype: str | None = None, max_bytes: int = 5 * 10**9
) -> Converted:
    """Convert weights from one form into another.

    Args:
        source: a published folder, or a checkpoint (or a folder of them) that any plan saved.
        target: the folder to write; of checkpoints, for `to="checkpoint"`, into which step 0 is written.
        to: "published" or "checkpoint".
        dtype: of the weights there, such as "float32"; by default every tensor keeps its own.  The biases of routers
            have float32 at least.
        max_bytes: of a file; a larger tensor has a file of its own.

    Raises:
        PretrainedError: the source cannot be used, a weight is too large for `dtype`, or the target is there already.
        CheckpointError: the source is damaged, or the target has this step already.
        ValueError: a form or type that there is not, or a model that has no published form.
    """
    for value, known, what in ((to, FORMS, "form"), (dtype or DTYPES[0], DTYPES, "type")):
        if value not in known:
            raise ValueError(f"there is no {what} {value!r} of weights; use one of {', '.join(known)}")
    if max_bytes < 1:
        raise ValueError(f"a file has at least 1 byte, got max_bytes={max_bytes}")
    weights = _open(Path(source))
    if dtype is not None:
        weights = _in_type(weights, getattr(torch, dtype))
    path = (_publish if to == "published" else _save)(weights, Path(target), max_bytes)
    sizes = [prod(shape) * kind.itemsize for kind, shape in weights.kinds.values()]
    return Converted(weights.form, to, path, len(sizes), sum(sizes), max(sizes))


@dataclass(frozen=True)
class _Weights:
    """The weights of a model on disk, by their published names."""

    form: str
    path: Path
    config: ModelConfig
    kinds: Kinds  # type and shape of every tensor; experts are single
    stored: Callable[[str], Tensor]  # a full tensor in the type in which it is stored
    published: Mapping[str, Any] | None  # the values of config.json, if the folder has them

    def read(self, name: str) -> Tensor:
        return rounded(self.stored(name), self.kinds[name][0], name)


def _in_type(weights: _Weights, dtype: torch.dtype) -> _Weights:
    """Return the weights in another type; biases of routers have float32 at least, as their steps are short."""
    biases = {theirs for ours, _, theirs, _ in _singles(weights.config) if ours.endswith(ROUTER_BIAS)}
    wide = torch.promote_types(dtype, torch.float32)
    kinds = {name: (wide if name in biases else dtype, shape) for name, (_, shape) in weights.kinds.items()}
    return replace(weights, kinds=kinds)


def _open(path: Path) -> _Weights:
    if (path / INDEX).is_file() or saved_steps(path):
        return _of_checkpoint(path)
    if (path / "config.json").is_file():
        return _of_published(path)
    pickled = sorted(found.name for kind in PICKLES for found in path.glob(kind)) if path.is_dir() else []
    told = f"it has a pickle ({pickled[0]}), and nothing is unpickled here; " if pickled else ""
    raise PretrainedError(
        f"{path} holds no weights that can be converted: {told}give a folder with config.json and safetensors files, "
        "or a checkpoint of this library"
    )


def _of_published(path: Path) -> _Weights:
    config, folder = config_from_pretrained(path), PretrainedFolder(path)
    check_folder(folder, config)
    kinds = {theirs: folder.find(theirs)[1:] for _, _, theirs, _ in _singles(config)}
    return _Weights("published", path, config, kinds, folder.read, read_json(path / "config.json"))


def _of_checkpoint(path: Path) -> _Weights:
    """Return the weights of a checkpoint, without a second token's."""
    checkpoint = Checkpoint(find_checkpoint(path))
    path, saved, entries = checkpoint.path, checkpoint.index.values["config"], checkpoint.index.tensors
    stored = {
        name: (getattr(torch, entry.dtype), entry.shape)
        for name, entry in entries.items()
        if name.startswith(KEPT) and not is_second(name)
    }
    try:
        config = check_form(saved_config(path, saved))
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is of a model with other sizes than those known here: {error}") from error
    except PretrainedError as error:
        raise PretrainedError(f"{path} has no published form: {error}") from error
    _check_kinds(path, stored, {saved_name(name): each.shape for name, each in full_parameters(config).items()})
    places = {theirs: (saved_name(ours), expert) for ours, expert, theirs, _ in _singles(config)}
    kinds = {theirs: (stored[saved_name(ours)][0], shape) for ours, _, theirs, shape in _singles(config)}

    def read(theirs: str) -> Tensor:
        name, expert = places[theirs]
        if expert is None:
            return checkpoint.read(name)
        # an expert is a part of a shard, and a checksum is that of all of it
        checkpoint.verify((name, shard.file) for shard in entries[name].shards)
        shape = entries[name].shape
        region = ShardRegion(shape, 0, expert, expert + 1, 0, prod(shape[1:]))
        return checkpoint.read(name, region).view(shape[1:])

    return _Weights("checkpoint", path, config, kinds, read, saved.get(PUBLISHED))


def _singles(config: ModelConfig) -> list[tuple[str, int | None, str, tuple[int, ...]]]:
    """Return our name, the number of the expert, published name and shape of every tensor of a published model."""
    return [
        (ours, expert if each.sharded == EXPERTS else None, theirs, each.file_shape)
        for ours, each in full_parameters(config).items()
        for expert, theirs in enumerate(each.file_names)
    ]


def _check_kinds(path: Path, stored: Kinds, wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in wanted.items():
        if name not in stored:
            raise CheckpointError(f"{path} has no tensor {name}, which its config asks for; it is incomplete")
        dtype, found = stored[name]
        if found != shape:
            raise CheckpointError(f"{path}: tensor {name} has shape {found}, its config asks for {shape}")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise CheckpointError(f"{path}: tensor {name} is {dtype}; weights are {', '.join(DTYPES)}")
    if surplus := sorted(set(stored) - set(wanted)):
        raise CheckpointError(f"{path} has tensor {surplus[0]}, which the model of its config has not")


def _save(weights: _Weights, target: Path, max_bytes: int) -> Path:
    """Write a checkpoint of the weights alone, without moments: step 0 of a training."""
    model: dict[str, Any] = {"model": type(weights.config).__name__, "config": asdict(weights.config)}
    if weights.published is not None:
        model[PUBLISHED] = dict(weights.published)
    known = {saved_name(ours): each for ours, each in full_parameters(weights.config).items()}
    kinds = {name: (_type_of(weights, each.file_names), each.shape) for name, each in known.items()}

    def read(name: str) -> Values:
        theirs = known[name].file_names
        return map(weights.read, theirs) if known[name].sharded == EXPERTS else weights.read(theirs[0])

    return write_checkpoint(target, 0, kinds, read, {"config": model}, max_bytes)


def _type_of(weights: _Weights, names: tuple[str, ...]) -> torch.dtype:
    """Return the type that tensors share which become one; PretrainedError if they have several."""
    found = {weights.kinds[name][0]: name for name in names}
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise PretrainedError(
            f"{weights.path}: {first} is {one} and {second} is {other}, and experts in one stack have one type; "
            "give dtype="
        )
    return next(iter(found))


def _publish(weights: _Weights, target: Path, max_bytes: int) -> Path:
    if target.exists():
        raise PretrainedError(f"{target} is there already, and nothing is overwritten; name another folder")
    with appearing(target) as hidden:
        files: dict[str, str] = {}
        for place, names in enumerate(share_out(weights.kinds, max_bytes)):
            file = hidden / f"{place:05}.safetensors"
            write_tensors(file, {name: weights.kinds[name] for name in names}, weights.read)
            files |= dict.fromkeys(names, file.name)
        finish_folder(hidden, files, _config_values(weights))
    return target


def _config_values(weights: _Weights) -> dict[str, Any]:
    """Return the values of config.json: those that the weights came with, if they are of the same model."""
    name = str(weights.kinds[full_parameters(weights.config)[TABLE].file_name][0]).removeprefix("torch.")
    values = dict(weights.published or {})
    values |= dict.fromkeys(set(values) & {"num_nextn_predict_layers"}, 0)  # a second token's layers are not written
    if values and config_from_pretrained(values) == config_from_pretrained(config_to_pretrained(weights.config, name)):
        types = [key for key in ("dtype", "torch_dtype") if key in values] or ["dtype"]
        return values | dict.fromkeys(types, name)
    return config_to_pretrained(weights.config, name)
