"""What a rank has to save: parts of tensors, each with its place in the whole; and the state of its random numbers.

Chapter: book/dp/io.  In: an optimizer.  Out: named, flat views; loading writes into the same views.
"""

import base64
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualpipe_lab.dp.checkpoint.region import Region, whole
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.dp.zero3 import Zero3


class Place(NamedTuple):
    """Where a rank's parameter lies in the whole model: its name there, and its slice along one axis.

    A parameter that tensor parallelism cut into columns on 2 ranks: `Place("head.weight", axis=0, start=512,
    size=1024)` on the second.  A stage of a pipeline only has other names: `Place("blocks.3.weight")`.
    """

    name: str
    axis: int = 0
    start: int = 0
    size: int | None = None  # of the whole tensor along `axis`; None: the rank has all of it


PlaceOf = Callable[[str, Tensor], Place]


class Fragment(NamedTuple):
    """Some elements of a whole tensor: a flat view of what this rank holds."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    region: Region
    view: Tensor


def fragments(optimizer: ShardedOptimizer, place_of: PlaceOf | None = None) -> Iterator[Fragment]:
    """Everything that this rank holds of the model and its optimizer; replicas yield equal fragments.

    Weights come at their best precision: the master copy where there is one.
    """
    seen: set[nn.Parameter] = set()
    for held in optimizer.held:
        state = held.adam.state()
        for part in held.bucket.layout.between(held.first, held.last):
            parameter = held.bucket.parameters[part.tensor]
            begin = held.bucket.layout.offsets[part.tensor] + part.start - held.first
            for kind, tensor in state.items():
                view = tensor[begin : begin + part.stop - part.start]
                yield _fragment(kind, optimizer.names[parameter], parameter, view, part.start, place_of)
        seen.update(held.bucket.parameters)
    yield from _frozen(optimizer, seen, place_of)
    persistent = optimizer.module.state_dict(keep_vars=True)
    for name, buffer in optimizer.module.named_buffers():
        if name in persistent:
            yield _fragment("buffer", name, buffer, buffer.detach().view(-1), 0, place_of)


def _frozen(optimizer: ShardedOptimizer, seen: set[nn.Parameter], place_of: PlaceOf | None) -> Iterator[Fragment]:
    """The parameters without an optimizer state."""
    if isinstance(optimizer, Zero3):
        for flat in optimizer.flats:
            layout = flat.bucket.layout
            for part in layout.parts(optimizer.group_rank) if not flat.is_trained else ():
                parameter = flat.bucket.parameters[part.tensor]
                begin = layout.offsets[part.tensor] + part.start - layout.span(optimizer.group_rank)[0]
                view = flat.shard[begin : begin + part.stop - part.start]
                yield _fragment("parameter", optimizer.names[parameter], parameter, view, part.start, place_of)
        return
    for parameter, name in optimizer.names.items():
        if parameter not in seen:
            yield _fragment("parameter", name, parameter, parameter.detach().view(-1), 0, place_of)


def _fragment(kind: str, name: str, owner: Tensor, view: Tensor, first: int, place_of: PlaceOf | None) -> Fragment:
    place = place_of(name, owner) if place_of else Place(name)
    shape = list(owner.shape)
    region = whole(tuple(shape))
    if shape:
        length = shape[place.axis]
        shape[place.axis] = length if place.size is None else place.size
        region = Region(tuple(shape), place.axis, place.start, place.start + length, 0, 0)
    region = region._replace(first=first, last=first + view.numel())
    return Fragment(f"{kind}/{place.name}", tuple(shape), region, view)


def random_state(rounding: torch.Generator | None = None) -> dict[str, Any]:
    """The random numbers of this rank: Python's, torch's, numpy's if it is loaded, those of rounding; as JSON."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": _text(torch.get_rng_state())}
    if rounding is not None:
        state["rounding"] = _text(rounding.get_state())
    if "numpy" in sys.modules:
        name, keys, *numbers = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *numbers]
    return state


def set_random_state(state: dict[str, Any], rounding: torch.Generator | None = None) -> None:
    """Go on with these random numbers."""
    version, numbers, spare = state["python"]
    random.setstate((version, tuple(numbers), spare))
    torch.set_rng_state(_bytes(state["torch"]))
    if rounding is not None and "rounding" in state:
        rounding.set_state(_bytes(state["rounding"]))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
