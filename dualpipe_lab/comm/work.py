"""A communication call from check to end: `Collective` describes it, `with work` issues it, `Work.wait` completes it.

In: a name, a group and contiguous tensors.  Out: a `Work`.  Every function of `comm` reads the same way:
  call = Collective(name, group, tensor)                check the tensors and the group
  work = call.describe(traffic, tensor)                 bytes and shape: for the ledger, the link, a report of a hang
  with work:                                            begin: record it, stamp it on an emulated link
      work.handle = dist.all_reduce(..., async_op=True)
  return work.wait_unless(async_op)                     `wait`: complete it, let its emulated time pass, record the end
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dualpipe_lab._private import source_rank
from dualpipe_lab.comm.carried import check_tensors
from dualpipe_lab.comm.groups import Group, carrier, members, name_of
from dualpipe_lab.world.context import RankContext, rank_context
from dualpipe_lab.world.record import traffic
from dualpipe_lab.world.record.operation import Operation
from dualpipe_lab.world.record.traffic import Traffic

_REDUCTIONS = ("sum", "avg", "max", "min", "product")


class Work:
    """Handle of an operation that this rank has issued.

    Until `wait` returns, the caller must not change the input tensors and must not read the output tensors.
    `comm` issues the operation inside `with work:` and stores torch's handle in `work.handle`.
    """

    def __init__(self, context: RankContext, operation: Operation, finish: Callable[[], None] | None = None) -> None:
        self._context, self.operation, self._finish = context, operation, finish
        self.handle: Any = None
        self._done = False

    def __enter__(self) -> "Work":
        self._context.begin(self.operation)
        self._context.recorder.status.wait(self.operation)  # some back ends block in the call itself
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._context.recorder.status.current = None
        if error is None:
            self._context.in_flight[id(self)] = self  # torch drops the message with its handle

    def wait(self) -> None:
        """Block until the operation is complete; a second call returns at once."""
        if self._done:
            return
        context, operation = self._context, self.operation
        waited_from = context.clock.now()
        context.recorder.status.wait(operation)
        if self.handle is not None:
            self.handle.wait()
        if operation.sends is False and operation.peer is None:
            operation.peer = source_rank(self.handle)
        if self._finish is not None:
            self._finish()
        context.end(operation, waited_from)
        self._done = True
        del context.in_flight[id(self)]

    def wait_unless(self, async_op: bool) -> "Work | None":
        """Return this work if `async_op`; otherwise wait for it and return None."""
        if async_op:
            return self
        self.wait()
        return None

    @property
    def has_left(self) -> bool:
        """Whether the last byte of a send has left on the emulated link; True without a link."""
        return self._context.emulator is None or self.operation.due_ns <= self._context.clock.now()

    def __repr__(self) -> str:
        return f"<Work {self.operation.describe()}, {'done' if self._done else 'under way'}>"


class Collective:
    """One rank's call of a collective, checked before it can hang the other ranks.

    Attributes:
        name: of the function of `comm`.
        ranks: global ranks of the group, in group order.
        size: number of these ranks.
        position: index of this rank among them.
        root: global rank of the root; None for a collective without one.
        group: process group to pass to torch: the caller's, or with `launch(..., wire=True)` the one for this name.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: no back end of the group carries a tensor (`carried`), or this rank is not in the group.
    """

    __slots__ = ("_context", "_group_name", "group", "name", "position", "ranks", "root", "size")

    def __init__(self, name: str, group: Group | None, *tensors: torch.Tensor, root: int | None = None) -> None:
        check_tensors(name, group, *tensors)
        self._context = rank_context()
        self.name, self.root = name, root
        self.ranks, self._group_name = members(group), name_of(group)
        self.size, self.position = len(self.ranks), self.ranks.index(self._context.rank)
        self.group = carrier(name, self.ranks, self._group_name, group)

    def describe(
        self,
        moved: Traffic,
        tensor: torch.Tensor | None,
        finish: Callable[[], None] | None = None,
        sent_to: dict[int, int] | None = None,
        tensor_bytes: int | None = None,
        addressed: dict[int, int] | None = None,
    ) -> Work:
        """Describe the operation; the caller then issues the returned work with `with`.

        Args:
            moved: bytes that this rank sends and receives.
            tensor: gives the shape and dtype of reports; None for a barrier.
            finish: runs in `wait`, after torch's part is complete.
            sent_to: bytes sent to each global rank; None for a ring in the order of the ranks.
            tensor_bytes: bytes of the full tensor, where `tensor` is a shard of it.
            addressed: bytes sent to each global rank where GLOO takes another way than the ring.
        """
        operation = Operation(self.name, self.ranks, moved, (), sent_to=sent_to, root=self.root)
        operation.group_name, operation.addressed = self._group_name, addressed
        if tensor is not None:
            operation.shape, operation.dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
            operation.tensor_bytes = num_bytes(tensor) if tensor_bytes is None else tensor_bytes
        return Work(self._context, operation, finish)

    @property
    def next(self) -> int:
        """Global rank of the member after this one; the first one follows the last."""
        return self.ranks[(self.position + 1) % self.size]

    @property
    def previous(self) -> int:
        """Global rank of the member before this one; the last one precedes the first."""
        return self.ranks[self.position - 1]

    def position_of(self, root: int) -> int:
        """Position of the global rank `root`; ValueError if it is not in the group."""
        if root not in self.ranks:
            raise ValueError(f"{self.name}: rank {root} is not among the ranks {list(self.ranks)}")
        return self.ranks.index(root)

    def check_numel(self, what: str, tensor: torch.Tensor, expected: int) -> None:
        """Raise ValueError unless `tensor` has `expected` elements."""
        if tensor.numel() != expected:
            raise ValueError(
                f"{self.name} over {self.size} ranks: {what} needs {expected} elements, got shape {tuple(tensor.shape)}"
            )

    def check_count(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ValueError unless the list holds one tensor per rank."""
        if len(tensors) != self.size:
            raise ValueError(
                f"{self.name} needs one tensor per rank in {what}, got {len(tensors)} for {self.size} ranks"
            )

    def ring_chunks(self, tensor: torch.Tensor) -> list[int]:
        """Bytes of the chunks into which a ring divides `tensor`; the larger chunks come first."""
        return [elements * tensor.element_size() for elements in traffic.split(tensor.numel(), self.size)]

    def block_bytes(self, what: str, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        """Bytes of each rank's block of rows; ValueError unless the blocks add up to the tensor."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if splits is None:
            if rows % self.size:
                raise ValueError(
                    f"{self.name}: {rows} rows of {what} do not divide among {self.size} ranks; pass {what}_split_sizes"
                )
            splits = [rows // self.size] * self.size
        if len(splits) != self.size or sum(splits) != rows:
            raise ValueError(
                f"{self.name}: {what}_split_sizes {list(splits)} must be {self.size} numbers that sum to {rows} rows"
            )
        row_bytes = num_bytes(tensor) // rows if rows else 0
        return [split * row_bytes for split in splits]

    def bytes_by_peer(self, sends: Sequence[int]) -> dict[int, int]:
        """Bytes of each block by the global rank that receives it; this rank's local block is not sent."""
        by_rank = zip(self.ranks, sends, strict=True)
        return {rank: sent for position, (rank, sent) in enumerate(by_rank) if position != self.position}


def reduction(name: str) -> Any:
    """Torch's reduce operator of this name; ValueError if there is none."""
    if name not in _REDUCTIONS:
        raise ValueError(f"a reduction is one of {', '.join(_REDUCTIONS)}, got {name!r}")
    return getattr(dist.ReduceOp, name.upper())


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())
