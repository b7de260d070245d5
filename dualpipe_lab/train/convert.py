"""`convert`: weights of one form into another, tensor by tensor, in one process.

Chapter: book/whole/weights.  In: a folder, the form of the other.  Out: the other folder, complete or not there.
  memory   the largest tensor as it is read, and once more as it is written; experts are read and written one by one,
           also those that lie stacked in a checkpoint of this library; of stacks in one of torch (`to_torch`) it holds
           the stack, and of a weight in fp8 the weight in float32
What is written lies beside the target until it is complete, and a failed conversion leaves nothing.
Elsewhere: Megatron-Bridge `import_ckpt` and `export_ckpt`; torchtitan `scripts/checkpoint_conversion`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from dualpipe_lab.dp.checkpoint.file import Values, write_tensors
from dualpipe_lab.dp.checkpoint.folder import appearing
from dualpipe_lab.dp.checkpoint.full_tensors import share_out, write_checkpoint
from dualpipe_lab.dp.checkpoint.torch_checkpoint import write_torch
from dualpipe_lab.models.pretrained.config import config_from_pretrained, config_to_pretrained
from dualpipe_lab.models.pretrained.fields import PretrainedError
from dualpipe_lab.models.pretrained.load import full_shapes
from dualpipe_lab.models.pretrained.names import is_stacked, published_name
from dualpipe_lab.models.pretrained.save import finish_folder
from dualpipe_lab.models.stage import TABLE
from dualpipe_lab.train.saved_model import saved_name
from dualpipe_lab.train.weight_files import PUBLISHED, WeightFiles, names_of, open_weights

FORMS = ("published", "checkpoint", "torch")
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Converted:
    """What a conversion did.

    Attributes:
        source, target: the forms.
        path: of what was written.
        num_tensors: of the model; experts are counted singly, also where they are written as stacks.
        num_bytes: of these tensors, as they are written.
        largest_bytes: of the largest of them.
    """

    source: str
    target: str
    path: Path
    num_tensors: int
    num_bytes: int
    largest_bytes: int


def convert(
    source: Path | str, target: Path | str, to: str, dtype: str | None = None, max_bytes: int = 5 * 10**9
) -> Converted:
    """Convert weights from one form into another.

    Args:
        source: a published folder; a checkpoint (or a folder of them) that any plan saved; or one of torch.
        target: the folder to write; of checkpoints, for `to="checkpoint"`, into which step 0 is written.
        to: "published", "checkpoint" or "torch"; torch's has the published names, and config.json beside them.
        dtype: of the weights there, such as "float32"; by default every tensor keeps its own, and one in fp8 gets that
            of the embedding.  The biases of routers have float32 at least.
        max_bytes: of a file; a larger tensor has a file of its own.

    Raises:
        PretrainedError: the source cannot be used, or the target is there already.
        CheckpointError: the source is damaged, or the target has this step already.
        ValueError: a form or type that there is not, or a model that has no published form.
    """
    for value, known, what in ((to, FORMS, "form"), (dtype or DTYPES[0], DTYPES, "type")):
        if value not in known:
            raise ValueError(f"there is no {what} {value!r} of weights; use one of {', '.join(known)}")
    if max_bytes < 1:
        raise ValueError(f"a file has at least 1 byte, got max_bytes={max_bytes}")
    weights = open_weights(source).in_type(None if dtype is None else getattr(torch, dtype))
    write = {"published": _publish, "checkpoint": _save, "torch": _save_torch}[to]
    path = write(weights, Path(target), max_bytes)
    sizes = [prod(shape) * kind.itemsize for kind, shape in weights.kinds.values()]
    return Converted(weights.form, to, path, len(sizes), sum(sizes), max(sizes))


def _save(weights: WeightFiles, target: Path, max_bytes: int) -> Path:
    """Write a checkpoint of the weights alone, without moments: step 0 of a training."""
    model: dict[str, Any] = {"model": type(weights.config).__name__, "config": asdict(weights.config)}
    if weights.published is not None:
        model[PUBLISHED] = dict(weights.published)
    places = {saved_name(ours): theirs for ours, theirs in names_of(weights.config).items()}
    shapes = {saved_name(ours): shape for ours, shape in full_shapes(weights.config).items()}
    kinds = {name: (_type_of(weights, theirs), shapes[name]) for name, theirs in places.items()}

    def read(name: str) -> Values:
        theirs = places[name]
        return map(weights.read, theirs) if is_stacked(name) else weights.read(theirs[0])

    return write_checkpoint(target, 0, kinds, read, {"config": model}, max_bytes)


def _type_of(weights: WeightFiles, names: Sequence[str]) -> torch.dtype:
    """Return the type that tensors share which become one; PretrainedError if they have several."""
    found = {weights.kinds[name][0]: name for name in names}
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise PretrainedError(
            f"{weights.path}: {first} is {one} and {second} is {other}, and experts in one stack have one type; "
            "give dtype="
        )
    return next(iter(found))


def _publish(weights: WeightFiles, target: Path, max_bytes: int) -> Path:
    """Write a folder by the published names."""
    if target.exists():
        raise PretrainedError(f"{target} is there already, and nothing is overwritten; name another folder")
    with appearing(target) as hidden:
        files: dict[str, str] = {}
        for place, names in enumerate(share_out(weights.kinds, max_bytes)):
            file = hidden / f"{place:05}.safetensors"
            write_tensors(file, {name: weights.kinds[name] for name in names}, weights.read)
            files |= dict.fromkeys(names, file.name)
        finish_folder(hidden, files, config_values(weights))
    return target


def _save_torch(weights: WeightFiles, target: Path, max_bytes: int) -> Path:
    """Write a checkpoint of torch by the published names; every tensor has a file of its own."""
    beside = {"config.json": json.dumps(config_values(weights), indent=2) + "\n"}
    write_torch(target, weights.kinds, weights.read, beside)
    return target


def config_values(weights: WeightFiles) -> dict[str, Any]:
    """Return the values of config.json: those that the weights came with, if they are of the same model."""
    name = str(weights.kinds[published_name(TABLE)][0]).removeprefix("torch.")
    values = {key: value for key, value in (weights.published or {}).items() if key != "quantization_config"}
    values |= dict.fromkeys(set(values) & {"num_nextn_predict_layers"}, 0)  # a second token's layers are not written
    if values and config_from_pretrained(values) == config_from_pretrained(config_to_pretrained(weights.config, name)):
        types = [key for key in ("dtype", "torch_dtype") if key in values] or ["dtype"]
        return values | dict.fromkeys(types, name)
    return config_to_pretrained(weights.config, name)
