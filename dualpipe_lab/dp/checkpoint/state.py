"""The sharded state dict of a rank: its shards of tensors, each with its region; and its state of random numbers.

Chapter: book/dp/io.  In: an optimizer.  Out: named, flat views; loading writes into the same views.
The place of a parameter in the full model is read from its module: layers name their `shards` (tensor parallel layers,
experts), and names count from the nearest enclosing module with `names_start_here = True`, such as a pipeline's stage.
Elsewhere: Megatron `sharded_state_dict`; torch.distributed.checkpoint.state_dict.
"""

import base64
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.dp.checkpoint.region import ShardRegion, full_region
from dualpipe_lab.dp.declaration import full_name_of
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.dp.zero3 import Zero3
from dualpipe_lab.world import accelerator
from dualpipe_lab.world.context import device


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


def sharded_state_dict(optimizer: ShardedOptimizer, shard_spec_of: ShardSpecOf | None = None) -> Iterator[SavedShard]:
    """Yield this rank's shards of the model and its optimizer; replicas yield equal shards.

    Weights come in their best precision: from the master copy if there is one.  Without `shard_spec_of`, the modules'
    own declarations give the places.
    """
    place_of = declared_places(optimizer) if shard_spec_of is None else given_places(shard_spec_of)
    seen: set[nn.Parameter] = set()
    for held in optimizer.local_shards:
        state = held.adam.state_dict()
        for part in held.bucket.layout.tensors_between(held.start, held.stop):
            parameter = held.bucket.parameters[part.tensor]
            begin = held.bucket.layout.offsets[part.tensor] + part.start - held.start
            for kind, tensor in state.items():
                view = tensor[begin : begin + part.stop - part.start]
                yield _saved_shard(kind, optimizer.names[parameter], parameter, view, part.start, place_of)
        seen.update(held.bucket.parameters)
    yield from _frozen(optimizer, seen, place_of)
    persistent = optimizer.module.state_dict(keep_vars=True)
    for name, buffer in optimizer.module.named_buffers():
        if name in persistent:
            yield _unsharded("buffer", name, buffer, place_of)


def declared_places(optimizer: ShardedOptimizer) -> PlaceOf:
    """Return the places that the modules declare; buffers have names of the full model too, and no shards."""
    declaration, full_name = optimizer.declaration, full_name_of(optimizer.module)

    def place_of(name: str, owner: Tensor) -> Place:
        if not isinstance(owner, nn.Parameter):
            return Place(ShardSpec(full_name(name)))
        found = declaration.parameters[owner]
        shard, counts = found.shard, declaration.counts(owner, is_sharded=True)
        spec = ShardSpec(found.name) if shard is None else ShardSpec(found.name, shard.axis, shard.start, shard.size)
        return Place(spec, found.is_replica or not counts)

    return place_of


def given_places(shard_spec_of: ShardSpecOf) -> PlaceOf:
    """Return the places that the caller says."""
    return lambda name, owner: Place(shard_spec_of(name, owner))


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


def random_state(rounding: torch.Generator | None = None) -> dict[str, Any]:
    """Return the state of random numbers as JSON: of Python, torch, the rounding, and numpy if it is imported.

    On a GPU torch has a second state, that of the rank's GPU.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": _text(torch.get_rng_state())}
    if (here := device()).type != "cpu":
        state[here.type] = _text(accelerator.current().rng_state(here))
    if rounding is not None:
        state["rounding"] = _text(rounding.get_state())
    if "numpy" in sys.modules:
        name, keys, *numbers = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *numbers]
    return state


def set_random_state(state: dict[str, Any], rounding: torch.Generator | None = None) -> None:
    """Restore the state of random numbers; what another kind of device has saved cannot be continued, and is left."""
    version, numbers, spare = state["python"]
    random.setstate((version, tuple(numbers), spare))
    torch.set_rng_state(_bytes(state["torch"]))
    if (here := device()).type in state:
        accelerator.current().set_rng_state(_bytes(state[here.type]), here)
    if rounding is not None and "rounding" in state:
        rounding.set_state(_bytes(state["rounding"]))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
