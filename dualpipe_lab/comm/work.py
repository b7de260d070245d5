"""Issuing an operation and waiting for it: the one path that every call of `comm` takes."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from dualpipe_lab._private import source_rank
from dualpipe_lab.world.context import RankContext, rank_context
from dualpipe_lab.world.record.operation import Operation


class Work:
    """An operation under way.

    The tensors it was given must not be changed, and those it fills must not be read, before `wait` returns.
    """

    def __init__(
        self, context: RankContext, operation: Operation, handle: Any, finish: Callable[[], None] | None = None
    ) -> None:
        self._context, self._operation, self._handle, self._finish = context, operation, handle, finish
        self._done = False
        context.in_flight[id(self)] = self  # a dropped handle would take the message with it

    def wait(self) -> None:
        """Return when the operation is over; the second time, at once."""
        if self._done:
            return
        waited_from = self._context.clock.now()
        self._context.books.progress.wait(self._operation)
        if self._handle is not None:
            self._handle.wait()
        if self._operation.sends is False and self._operation.peer is None:
            self._operation.peer = source_rank(self._handle)
        if self._finish is not None:
            self._finish()
        self._context.settle(self._operation, waited_from)
        self._done = True
        del self._context.in_flight[id(self)]

    @property
    def has_left(self) -> bool:
        """For a send on an emulated link: whether its last byte is on the way by now; without one, True."""
        return self._context.emulator is None or self._operation.due_ns <= self._context.clock.now()

    def __repr__(self) -> str:
        return f"<Work {self._operation.describe()}, {'done' if self._done else 'under way'}>"


def issue(
    operation: Operation, start: Callable[[], Any], async_op: bool, finish: Callable[[], None] | None = None
) -> Work | None:
    """Start an operation and, unless `async_op`, wait for it; `finish` runs when it is over."""
    context = rank_context()
    context.begin(operation)
    work = Work(context, operation, _started(context, operation, start), finish)
    if async_op:
        return work
    work.wait()
    return None


def _started(context: RankContext, operation: Operation, start: Callable[[], Any]) -> Any:
    context.books.progress.wait(operation)  # some back ends block here already
    try:
        return start()
    finally:
        context.books.progress.current = None


def check_contiguous(name: str, *tensors: torch.Tensor) -> None:
    """Refuse strided slices, which GLOO sums silently wrong.

    Raises:
        ValueError: naming the shape and strides, and the remedy.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} works on tensors, got {type(tensor).__name__}; use all_gather_object for objects")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} needs a contiguous tensor, got shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
                "GLOO reads past the gaps; pass tensor.contiguous() and copy the result back"
            )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())
