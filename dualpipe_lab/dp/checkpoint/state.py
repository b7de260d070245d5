"""The sharded state dict of a rank: its shards of tensors, each with its region; and which rank writes which shard.

Chapter: book/dp/io.  In: an optimizer.  Out: named, flat views; loading writes into the same views.
The place of a parameter in the full model is read from its module: layers name their `shards` (tensor parallel layers,
experts), and names count from the nearest enclosing module with `names_start_here = True`, such as a pipeline's stage.
Every element of every tensor is written once, and nothing that could not be read:
  one shard on several ranks      the first rank writes; a sample of weights and buffers must agree: copies may drift
                                  apart by rounding, and other layers, or statistics of other data, are not alike in 1%
  copies that lie otherwise       (a KV head's replica, a mirror, a tied weight under ZeRO) are left out
  the rest                        must be the full tensor, once
Elsewhere: Megatron `sharded_state_dict`; torch.distributed.checkpoint.state_dict.
"""

import base64
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab._private import plain_name
from dualpipe_lab.dp.adam import OptimizerShard, is_elementwise
from dualpipe_lab.dp.checkpoint.reader import CheckpointError, StoredShard, TensorEntry, type_name
from dualpipe_lab.dp.checkpoint.region import ShardRegion, full_region
from dualpipe_lab.dp.param_specs import full_name_of
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.launch import accelerator
from dualpipe_lab.launch.context import device

_SAMPLE, _ALIKE = 16, 0.01  # elements of a weight, and their relative difference, that tell copies from other layers
_REMEDY = "give each its own name with shard_spec_of, or by `names_start_here` of the stages and `shards` of the layers"
_BUFFER_REMEDY = (
    "average it over the ranks before the save, give each its own name, register it persistent=False, or take a layer "
    "that keeps no statistics (track_running_stats=False, GroupNorm)"
)


_NO_VALUES = "state", "param_names"  # of a group's values


class ShardSpec(NamedTuple):
    """The place of a rank's parameter in the full model: its name there, and its slice along one axis.

    The second of 2 ranks that shard a parameter along its columns has `ShardSpec("head.weight", axis=0, start=512,
    size=1024)`.  For a stage of a pipeline only the name differs: `ShardSpec("blocks.3.weight")`.
    """

    name: str
    axis: int = 0
    start: int = 0
    size: int | None = None  # of the full tensor along `axis`; None: the rank holds the full tensor


class Place(NamedTuple):
    """A spec, and whether these elements are a copy: another rank is known to save them, perhaps in other shards."""

    spec: ShardSpec
    is_copy: bool = False


ShardSpecOf = Callable[[str, Tensor], ShardSpec]
PlaceOf = Callable[[str, Tensor], Place]


class SavedShard(NamedTuple):
    """This rank's shard of a full tensor, as a flat view; a copy of `source` where memory has another order."""

    name: str
    shape: tuple[int, ...]  # of the full tensor
    region: ShardRegion
    view: Tensor
    is_copy: bool = False
    source: Tensor | None = None

    def fill(self, values: Tensor) -> None:
        """Load values into the tensor that the shard is of."""
        self.view.copy_(values)
        if self.source is not None:
            self.source.copy_(self.view.view(self.source.shape))


def sharded_state_dict(
    optimizer: ShardedOptimizer, shard_spec_of: ShardSpecOf | None = None, frozen: bool = True
) -> Iterator[SavedShard]:
    """Yield this rank's shards of the model and its optimizer; replicas yield equal shards.

    Weights come in their best precision: from the master copy if there is one.  Without `shard_spec_of`, the modules'
    own declarations give the places.
    """
    place_of = declared_places(optimizer) if shard_spec_of is None else given_places(shard_spec_of)
    seen: set[nn.Parameter] = set()
    for held in optimizer.local_shards:
        state = held.optimizer.state_dict()
        for part in held.bucket.layout.tensors_between(held.start, held.stop):
            parameter = held.bucket.parameters[part.tensor]
            begin = held.bucket.layout.offsets[part.tensor] + part.start - held.start
            for kind, tensor in state.items():
                view = tensor[begin : begin + part.stop - part.start]
                yield _saved_shard(kind, optimizer.names[parameter], parameter, view, part.start, place_of)
        seen.update(held.bucket.parameters)
    if frozen:
        yield from _frozen(optimizer, seen, place_of)
    persistent = optimizer.module.state_dict(keep_vars=True)
    for name, buffer in optimizer.module.named_buffers():
        if name in persistent:
            yield _unsharded("buffer", name, buffer, place_of)


def group_values(optimizer: ShardedOptimizer, shard_spec_of: ShardSpecOf | None = None) -> list[dict[str, Any]]:
    """Return the values of each param group as JSON.

    Under "state" are the numbers that all elements of a shard share, under "param_names" the trained parameters.
    """
    optimizer.check_module()
    found: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        values = {name: _plain(value) for name, value in group.items() if name not in ("params", *_NO_VALUES)}
        kinds = (int, float, str, list, tuple)  # what JSON can hold
        found.append({name: value for name, value in values.items() if isinstance(value, kinds)})
    for held in optimizer.local_shards:
        found[held.group]["state"] = _numbers(held.optimizer)
        for name, value in found[held.group]["state"].items():
            if not isinstance(value, int | float):
                raise CheckpointError(
                    f"{held.optimizer.name} keeps {name}, a {type(value).__name__}, which is neither a "
                    "number nor a tensor with an element for each weight and cannot be resharded; save "
                    "dp.full_weights(optimizer) in its place"
                )
    for values, names in zip(found, group_names(optimizer, shard_spec_of), strict=True):
        values["param_names"] = names
    return found


def group_names(optimizer: ShardedOptimizer, shard_spec_of: ShardSpecOf | None = None) -> list[list[str]]:
    """Return the names in the full model of this rank's trained parameters of each param group."""
    place_of = declared_places(optimizer) if shard_spec_of is None else given_places(shard_spec_of)
    held = [[parameter for parameter in group["params"] if parameter.requires_grad] for group in optimizer.param_groups]
    return [sorted({place_of(optimizer.names[each], each).spec.name for each in group}) for group in held]


def matched_groups(
    path: Path, saved: list[dict[str, Any]] | None, names_by_rank: list[list[list[str]]]
) -> list[dict[str, Any]] | None:
    """Return the saved groups in the order of ours, which are found by the names of their parameters.

    Raises:
        CheckpointError: there are other numbers of groups, or a group has other parameters.
    """
    ours = [set(chain.from_iterable(same)) for same in zip(*names_by_rank, strict=True)]
    if saved is None:
        return None
    if len(saved) != len(ours):
        raise CheckpointError(
            f"{path} was saved with {len(saved)} param groups, got {len(ours)}; give params= with the same groups"
        )
    if any("param_names" not in group for group in saved):  # saved before the names were
        if len(saved) > 1 and comm.get_rank() == 0:
            said = f"{path} does not say which parameters are in its {len(saved)} param groups; they are taken in order"
            warn(said, stacklevel=2)
        return saved
    left, found = list(saved), []
    for number, names in enumerate(ours):
        same = next((group for group in left if set(group["param_names"]) == names), None)
        if same is None:
            near = max(left, key=lambda group: len(names & set(group["param_names"])))
            raise CheckpointError(
                f"{path} was saved with other param groups: {sorted(names ^ set(near['param_names']))[0]} was not in "
                f"one with the others of group {number}; give params= with the same groups, in any order"
            )
        left.remove(same)
        found.append(same)
    return found


def merged_groups(groups_by_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the values of one rank; the state of a group is known to those that have weights of it.

    Raises:
        CheckpointError: the ranks have other groups, or other values in them.
    """
    if len({len(groups) for groups in groups_by_rank}) > 1:
        raise CheckpointError("param groups are the same on every rank, got other numbers of them; some may be empty")
    best = [max(same, key=lambda group: "state" in group) for same in zip(*groups_by_rank, strict=True)]
    merged = [{**group} for group in best]
    for rank, groups in enumerate(groups_by_rank):
        for one, values in zip(merged, groups, strict=True):
            one["param_names"] = sorted({*one["param_names"], *values["param_names"]})  # stages have some of them
            for name, value in values.items():
                if name != "param_names" and one.get(name) != value:
                    raise CheckpointError(
                        f"{name} of a param group is {value} on rank {rank} and {one.get(name)} on another; set the "
                        "same values on every rank, and step a scheduler by a loss that is summed over the ranks"
                    )
    return merged


def set_group_values(optimizer: ShardedOptimizer, groups: list[dict[str, Any]] | None) -> None:
    """Go on with the values of `group_values`; converted weights have none."""
    saved = groups or [{} for _ in optimizer.param_groups]
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}  # JSON has no tuples
        kept = [name for name in values if name not in _NO_VALUES]
        group.update({name: lists.get(name, values[name]) for name in kept})
    for held in optimizer.local_shards:
        numbers = {"step": optimizer.num_steps, **saved[held.group].get("state", {})}
        for name in _numbers(held.optimizer):
            old, value = held.optimizer.state[name], numbers[name]
            held.optimizer.state[name] = torch.full_like(old, value) if isinstance(old, Tensor) else type(old)(value)


def check_numbers(optimizer: ShardedOptimizer, groups: list[dict[str, Any]] | None) -> None:
    """Raise CheckpointError if an optimizer of another kind has saved `group_values`."""
    for held in optimizer.local_shards:
        there = groups[held.group].get("state", {}) if groups else {}
        for name in _numbers(held.optimizer).keys() - {"step", *there}:
            raise CheckpointError(
                f"{held.optimizer.name} keeps {name}, which the checkpoint has not; load it into the "
                "optimizer that saved it"
            )


def _numbers(shard: OptimizerShard) -> dict[str, Any]:
    """Return what all elements of a shard share in an optimizer's state."""
    state = {name: _plain(value) for name, value in shard.state.items() if not is_elementwise(value, shard.working)}
    return {name: value for name, value in state.items() if value is not None}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def declared_places(optimizer: ShardedOptimizer) -> PlaceOf:
    """Return the places that the modules declare; buffers have names of the full model too, and no shards."""
    model_spec, full_name = optimizer.spec, full_name_of(optimizer.module)

    def place_of(name: str, owner: Tensor) -> Place:
        if not isinstance(owner, nn.Parameter):
            return Place(ShardSpec(full_name(name)))
        found = model_spec.parameters[owner]
        shard, counts = found.shard, model_spec.counts(owner, is_sharded=True)
        spec = ShardSpec(found.name) if shard is None else ShardSpec(found.name, shard.axis, shard.start, shard.size)
        return Place(spec, found.is_replica or not counts)

    return place_of


def given_places(shard_spec_of: ShardSpecOf) -> PlaceOf:
    """Return the places that the caller says, who gets the names of the modules before they were compiled."""
    return lambda name, owner: Place(shard_spec_of(plain_name(name), owner))


def _frozen(optimizer: ShardedOptimizer, seen: set[nn.Parameter], place_of: PlaceOf) -> Iterator[SavedShard]:
    """Yield the parameters without optimizer state."""
    if isinstance(optimizer, Zero3):
        for flat in optimizer.flats:
            layout = flat.bucket.layout
            rank = comm.get_rank(flat.bucket.group)
            for part in layout.tensors_in(rank) if not flat.is_trained else ():
                parameter = flat.bucket.parameters[part.tensor]
                begin = layout.offsets[part.tensor] + part.start - layout.span(rank)[0]
                view = flat.shard[begin : begin + part.stop - part.start]
                yield _saved_shard("parameter", optimizer.names[parameter], parameter, view, part.start, place_of)
        return
    for parameter, name in optimizer.names.items():
        if parameter not in seen:
            yield _unsharded("parameter", name, parameter, place_of)


def _unsharded(kind: str, name: str, owner: Tensor, place_of: PlaceOf) -> SavedShard:
    """Return a tensor that this rank holds in full; it may be a transposed one, whose elements have no flat view."""
    saved = _saved_shard(kind, name, owner, owner.detach().reshape(-1), 0, place_of)
    return saved if owner.is_contiguous() else saved._replace(source=owner.detach())


def _saved_shard(kind: str, name: str, owner: Tensor, view: Tensor, first: int, place_of: PlaceOf) -> SavedShard:
    place, is_copy = place_of(name, owner)
    shape = list(owner.shape)
    region = full_region(tuple(shape))
    if shape:
        length = shape[place.axis]
        shape[place.axis] = length if place.size is None else place.size
        region = ShardRegion(tuple(shape), place.axis, place.start, place.start + length, 0, 0)
    region = region._replace(first=first, last=first + view.numel())
    return SavedShard(f"{kind}/{place.name}", tuple(shape), region, view, is_copy)


def random_state() -> dict[str, Any]:
    """Return the state of random numbers as JSON: of Python, torch, and numpy if it is imported.

    On a GPU torch has a second state, that of the rank's GPU.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": _text(torch.get_rng_state())}
    if (here := device()).type != "cpu":
        state[here.type] = _text(accelerator.current().rng_state(here))
    if "numpy" in sys.modules:
        name, keys, *numbers = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *numbers]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the state of random numbers; what another kind of device has saved cannot be continued, and is left."""
    version, numbers, spare = state["python"]
    random.setstate((version, tuple(numbers), spare))
    torch.set_rng_state(_bytes(state["torch"]))
    if (here := device()).type in state:
        accelerator.current().set_rng_state(_bytes(state[here.type]), here)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


class Claim(NamedTuple):
    """One shard as its rank describes it before a save: name, shape, region, and a sample of a weight or buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    region: ShardRegion
    sample: tuple[float, ...] = ()
    is_copy: bool = False


def claim_of(shard: SavedShard) -> Claim:
    """Describe a shard to the other ranks."""
    dtype = type_name(shard.view.dtype)
    sample = sample_of(shard.view) if shard.name.startswith(("parameter/", "buffer/")) else ()
    return Claim(shard.name, shard.shape, dtype, shard.region, sample, shard.is_copy)


def sample_of(view: Tensor) -> tuple[float, ...]:
    """Return some elements, spread over a flat tensor."""
    return tuple(view.detach()[:: max(1, view.numel() // _SAMPLE)].double().tolist())


def are_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two samples may be of copies of one weight.

    >>> are_alike([1.0, -2.0], [1.0, -2.000001]), are_alike([1.0, -2.0], [1.0, -2.1])
    (True, False)
    """
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if isfinite(a) and isfinite(b)]
    largest = max((abs(number) for pair in pairs for number in pair), default=0.0)
    return all(abs(a - b) <= _ALIKE * largest for a, b in pairs)


def assign_writers(claims_by_rank: list[list[Claim]]) -> dict[str, TensorEntry]:
    """Assign every shard to one rank.

    Raises:
        CheckpointError: what would be written could not be read, or is not what every rank holds.
    """
    tensors: dict[str, TensorEntry] = {}
    first: dict[tuple[str, ShardRegion], tuple[int, Claim]] = {}  # by rank
    ranked = [(rank, claim) for rank, claims in enumerate(claims_by_rank) for claim in claims]
    for rank, claim in sorted(ranked, key=lambda one: one[1].is_copy):
        name, region = claim.name, claim.region
        entry = tensors.setdefault(name, TensorEntry(claim.dtype, claim.shape))
        if (entry.dtype, entry.shape) != (claim.dtype, claim.shape):
            raise CheckpointError(
                f"tensor {name} is {claim.dtype} {claim.shape} on rank {rank} and {entry.dtype} {entry.shape} on "
                f"another; {_REMEDY}"
            )
        if (name, region) in first:
            writer, written = first[name, region]
            if not are_alike(written.sample, claim.sample):
                raise CheckpointError(
                    f"tensor {name} has other values on rank {rank} than on rank {writer}; if they are copies, they "
                    f"must be alike; else {_BUFFER_REMEDY if name.startswith('buffer/') else _REMEDY}"
                )
        elif not claim.is_copy or (region.numel and not any(_overlap(region, s.region) for s in entry.shards)):
            first[name, region] = rank, claim
            entry.shards.append(StoredShard(file_of(rank), region))
    for name, entry in tensors.items():
        _check_full(name, entry)
    return tensors


def file_of(rank: int) -> str:
    """Return the name of a rank's file, such as rank-00003.safetensors."""
    return f"rank-{rank:05d}.safetensors"


def _overlap(one: ShardRegion, other: ShardRegion) -> bool:
    if one[:4] == other[:4]:  # parts of one slice
        return one.first < other.last and other.first < one.last
    return other.numel > 0 and one.start < other.stop and other.start < one.stop


def _check_full(name: str, entry: TensorEntry) -> None:
    held, numel = sum(shard.region.numel for shard in entry.shards), prod(entry.shape)
    if held != numel:
        raise CheckpointError(
            f"the shards of tensor {name} have {held} elements, and the tensor has {numel}: some are missing or held "
            f"twice; save with all ranks of the model, and {_REMEDY}"
        )
    if len({shard.file for shard in entry.shards}) < len(entry.shards):
        raise CheckpointError(f"one rank has two shards of tensor {name}, and a file holds one; {_REMEDY}")
