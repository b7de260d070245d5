"""`recompute`: store only the inputs of a segment, and run its forward again when its backward needs saved tensors.

Chapter: book/pp/gradient-checkpointing.  In: a function of tensors, its inputs.  Out: the function's result.
The price is one forward more: 4 units of work instead of 3 where B = 2F.
Statistics that a forward writes (batch norm's averages, counters of a router) are written twice.
Elsewhere: torch.utils.checkpoint(use_reentrant=False), called activation checkpointing there; "checkpoint" means files
in this course.
Source: Chen et al. 2016 (arXiv 1604.06174), section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dualpipe_lab.launch import accelerator


def recompute(segment: Callable[..., Any], *inputs: Any, preserve_rng: bool = True) -> Any:
    """Return `segment(*inputs)`, and recompute its saved tensors in the backward.

    Args:
        segment: a module or function; both calls must compute the same.
        inputs: its arguments; the tensors among them are stored.
        preserve_rng: let the second forward draw the random numbers of the first (dropout needs it).

    Raises:
        RuntimeError: in the backward, if the second forward does not save what the first one saved.
    """
    if not torch.is_grad_enabled():
        return segment(*inputs)
    region = _Region(segment, inputs, preserve_rng)
    with saved_tensors_hooks(region.pack, region.unpack):
        return segment(*inputs)


def recompute_layers(layers: Sequence[Callable[..., Any]], x: Any, length: int) -> Any:
    """Run layers one after another, recomputing them in segments of `length` layers; the last may be shorter.

    Raises:
        ValueError: if `length` is below 1.
    """
    if length < 1:
        raise ValueError(f"a segment holds at least 1 layer, got length={length}; use 1 to {len(layers)}")
    for start in range(0, len(layers), length):
        x = recompute(_chain(layers[start : start + length]), x)
    return x


def _chain(layers: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def segment(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x

    return segment


class SavedSlot:
    """The slot of one tensor that a segment's forward saved; empty until the backward needs the tensor."""

    __slots__ = ("__weakref__", "dropped", "region", "tensor")

    def __init__(self, region: "_Region") -> None:
        self.region, self.dropped = region, False
        self.tensor: Tensor | None = None

    def drop(self) -> None:
        """Release the tensor for good: no backward will need it."""
        self.tensor, self.dropped = None, True


class _Stop(Exception):  # noqa: N818 - not an error: all slots are filled
    pass


class _Hold(torch.autograd.Function):  # type: ignore[misc]
    """A node that saves tensors as every node does, so that hooks that count or move saved tensors see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing depends on the output of this node")


class _Region:
    """One call of one segment: its inputs, and the slots of its saved tensors.

    Autograd gives every tensor that a forward saves to `pack` and calls `unpack` for it in the backward.  The first
    `unpack` runs the forward again, which saves the same tensors in the same order; each fills its slot, and the
    forward stops at the last one.
    """

    def __init__(self, segment: Callable[..., Any], inputs: Sequence[Any], preserve_rng: bool) -> None:
        self._segment, self._preserve_rng = segment, preserve_rng
        self._others = [None if isinstance(value, Tensor) else value for value in inputs]
        self._at = [position for position, value in enumerate(inputs) if isinstance(value, Tensor)]
        tensors = [inputs[position] for position in self._at]
        self._held = _Hold.apply(torch.empty(0, requires_grad=True), *tensors)
        self._slots: list[tuple[ReferenceType[SavedSlot], tuple[Any, ...]]] = []
        self._devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        self._random = self._random_states() if preserve_rng else []
        self._autocast = [
            {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
            for kind in {"cpu", *(device.type for device in self._devices)}
        ]

    def pack(self, tensor: Tensor) -> SavedSlot:
        """Return the slot of a tensor that the first forward saves."""
        slot = SavedSlot(self)
        self._slots.append((ref(slot), _kind(tensor)))
        return slot

    def unpack(self, slot: SavedSlot) -> Tensor:
        """Return the tensor of a slot for the backward; run the forward again if the slot is empty."""
        if slot.tensor is None:
            self._run_again()
        assert slot.tensor is not None
        return slot.tensor

    def _run_again(self) -> None:
        arguments = list(self._others)
        for position, tensor in zip(self._at, self._held.grad_fn.saved_tensors, strict=True):
            arguments[position] = tensor.detach().requires_grad_(tensor.requires_grad)
        waiting = iter(self._slots)
        number = len(self._slots)

        def fill(tensor: Tensor) -> None:
            nonlocal number
            slot, kind = next(waiting)
            number -= 1
            if _kind(tensor) != kind:
                raise RuntimeError(f"recompute: the second forward saved {_kind(tensor)}, the first one {kind}")
            if (empty := slot()) is not None and not empty.dropped:
                empty.tensor = tensor.detach()
            if not number:
                raise _Stop

        with self._as_before(), torch.enable_grad(), saved_tensors_hooks(fill, lambda nothing: nothing):
            try:
                self._segment(*arguments)
            except _Stop:
                return
        raise RuntimeError(f"recompute: the second forward saved {number} tensors less than the first one")

    def _random_states(self) -> list[tuple[torch.device, Tensor]]:
        states = [(device, accelerator.current().rng_state(device)) for device in self._devices]
        return [(torch.device("cpu"), torch.get_rng_state()), *states]

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Set random numbers and autocast as in the first forward; restore them afterwards."""
        now = self._random_states() if self._preserve_rng else []
        _set_random(self._random)
        try:
            with ExitStack() as stack:
                for settings in self._autocast:
                    stack.enter_context(torch.autocast(**settings))
                yield
        finally:
            _set_random(now)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _set_random(states: Sequence[tuple[torch.device, Tensor]]) -> None:
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            accelerator.current().set_rng_state(state, device)
