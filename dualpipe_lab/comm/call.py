"""A communication call from check to end, and what carries its tensors: GLOO those of the CPU, NCCL those of GPUs.

In: a name, a group and contiguous tensors.  Out: a `Work`.  Every function of `comm` reads the same way:
  call = Collective(name, group, tensor)              check the tensors and the group
  with call.moves(traffic, tensor):                   bytes and shape; before: number it, keep it for ledger and reports
      call.handle = dist.all_reduce(..., async_op=True)
  return call.wait_unless(async_op)                   wait for torch; after: let its emulated time pass, keep its end
Without a recorder (a script that made its process group itself) the `with` block and the wait are torch's alone.
A run on GLOO and one on NCCL fail alike, before the call begins, and none of them hangs:
  both    strided tensors (GLOO sums them wrong without an error), tensors of two devices in one call
  NCCL    a tag, a receive from any rank, integers of 16 bits, and a message to a rank from which one
          is under way, or the other way round: NCCL runs the messages of a pair of ranks one after the other, in the
          order of the calls, so each rank may wait for what the other has queued behind
Elsewhere: `check_gpu_single_tensor` in torch's ProcessGroupNCCL.cpp; NCCL manual, "Point-to-point communication".
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from dualpipe_lab._private import source_rank
from dualpipe_lab.comm.groups import Group, carrier, members, name_of
from dualpipe_lab.launch.context import RankContext, rank_context
from dualpipe_lab.launch.record import traffic
from dualpipe_lab.launch.record.operation import Operation
from dualpipe_lab.launch.record.traffic import Traffic

T = TypeVar("T")
_REDUCTIONS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "avg", "max", "min", "product")}
_NCCL_TYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_NO_COMPLEX = ("reduce", "gather", "reduce_scatter", "reduce_scatter_single")  # elsewhere torch sends pairs of reals


class Work(Operation):
    """Handle of an operation that this rank has issued.

    Until `wait` returns, the caller must not change the input tensors and must not read the output tensors.
    `comm` issues the operation inside a `with` block and stores torch's handle in `handle`.

    Attributes:
        carrier: process group to pass to torch: the caller's, or with `launch(..., wire=True)` the one for this name.
    """

    def __init__(self, context: RankContext, name: str, ranks: tuple[int, ...], group_name: str) -> None:
        self.context, self.recorder = context, context.active_recorder
        self.name, self.group, self.group_name = name, ranks, group_name
        self.carrier: Group | None = None
        self.handle: Any = None
        self._finish: Callable[[], None] | None = None
        self._done = False

    def __enter__(self) -> "Work":
        if self.recorder is not None:
            self.recorder.before(self)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None and self.recorder is not None:
            self.recorder.status.current = None

    def wait(self) -> None:
        """Block until the operation is complete; a second call returns at once."""
        if self._done:
            return
        if self.recorder is None:
            self._complete(0)
        else:
            waited_from = self.recorder.clock.now()
            self.recorder.status.wait(self)
            self._complete(waited_from)
        del self.context.in_flight[id(self)]

    def wait_unless(self, async_op: bool) -> "Work | None":
        """Return this work if `async_op`; otherwise wait for it and return None."""
        if not async_op:
            self._complete(self.issued_ns)
            return None
        return self.under_way()

    def under_way(self) -> "Work":
        """Keep this work until its `wait`, because torch drops the message with its handle, and return it."""
        if self.recorder is not None:
            self.recorder.status.current = None
        self.context.in_flight[id(self)] = self
        return self

    def _complete(self, waited_from: int) -> None:
        handle, finish = self.handle, self._finish
        if handle is not None:
            handle.wait()
        if self.sends is False and self.peer is None:
            self.peer = source_rank(handle)
        if finish is not None:
            finish()
        if self.recorder is not None:
            self.recorder.after(self, waited_from)
        self._done, self.handle, self._finish = True, None, None  # the recorder keeps this object, not its tensors

    @property
    def has_left(self) -> bool:
        """Whether the last byte of a send has left on the emulated link; True without a link."""
        recorder = self.recorder
        return recorder is None or recorder.emulator is None or self.due_ns <= recorder.clock.now()

    def __repr__(self) -> str:
        return f"<Work {self.describe()}, {'done' if self._done else 'under way'}>"


class Collective(Work):
    """One rank's call of a collective, checked before it can hang the other ranks.

    Attributes:
        group: global ranks of the members, in group order.
        size: number of these ranks.
        position: index of this rank among them.
        root: global rank of the root; None for a collective without one.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: no back end of the group carries a tensor, or this rank is not in the group.
    """

    def __init__(self, name: str, group: Group | None, *tensors: torch.Tensor, root: int | None = None) -> None:
        check_tensors(name, group, *tensors)
        context = rank_context()
        ranks, named = (context.everyone, "") if group is None else (members(group), name_of(group))
        super().__init__(context, name, ranks, named)
        self.root, self.size, self.position = root, len(ranks), ranks.index(context.rank)
        self.carrier = group if context.wire is None else carrier(name, ranks, named, group)

    def moves(
        self,
        moved: Traffic,
        tensor: torch.Tensor | None,
        finish: Callable[[], None] | None = None,
        sent_to: dict[int, int] | None = None,
        tensor_bytes: int | None = None,
        addressed: dict[int, int] | None = None,
    ) -> "Collective":
        """Describe the operation; the caller then issues it in a `with` block.

        Args:
            moved: bytes that this rank sends and receives.
            tensor: gives the shape and dtype of reports; None for a barrier.
            finish: runs in `wait`, after torch's part is complete.
            sent_to: bytes sent to each global rank; None for a ring in the order of the ranks.
            tensor_bytes: bytes of the full tensor, where `tensor` is a shard of it.
            addressed: bytes sent to each global rank where GLOO takes another way than the ring.
        """
        self.traffic, self._finish, self.sent_to, self.addressed = moved, finish, sent_to, addressed
        self.shape = () if tensor is None else tuple(tensor.shape)
        if tensor is not None:
            self.dtype = dtype_name(tensor.dtype)
            self.tensor_bytes = num_bytes(tensor) if tensor_bytes is None else tensor_bytes
        return self

    @property
    def next(self) -> int:
        """Global rank of the member after this one; the first one follows the last."""
        return self.group[(self.position + 1) % self.size]

    @property
    def previous(self) -> int:
        """Global rank of the member before this one; the last one precedes the first."""
        return self.group[self.position - 1]

    def position_of(self, root: int) -> int:
        """Position of the global rank `root`; ValueError if it is not in the group."""
        if root not in self.group:
            raise ValueError(f"{self.name}: rank {root} is not among the ranks {list(self.group)}")
        return self.group.index(root)

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

    def ring_chunks(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Bytes of the chunks into which a ring divides `tensor`; the larger chunks come first."""
        return traffic.chunk_bytes(tensor.numel(), tensor.element_size(), self.size)

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
        by_rank = zip(self.group, sends, strict=True)
        return {rank: sent for position, (rank, sent) in enumerate(by_rank) if position != self.position}


class Pending(Generic[T]):
    """Handle of a result whose operations are still running; every function named `start_...` returns one.

    Until `wait` returns, the caller must not change the input tensors of the function and must not read its outputs.
    Elsewhere: `torch.futures.Future.then`; `AsyncCollectiveTensor` of torch's functional collectives.

    Args:
        works: operations to wait for, in this order; None stands for an operation that was not needed.
        finish: builds the result after all of them are complete; it keeps alive the tensors that it refers to.
    """

    def __init__(self, works: Sequence[Work | None], finish: Callable[[], T]) -> None:
        self._works, self._finish = works, finish
        self._result: list[T] = []

    def wait(self) -> T:
        """Wait for the operations and return the result; a second call returns it at once."""
        if not self._result:
            for work in self._works:
                if work is not None:
                    work.wait()
            self._result.append(self._finish())
            del self._works, self._finish
        return self._result[0]


def check_tensors(name: str, group: Group | None, *tensors: torch.Tensor) -> None:
    """Refuse what no back end of the group carries.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a tensor is not contiguous, on another device than the others or than the group, or of a type that
            NCCL does not know.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} works on tensors, got {type(tensor).__name__}; use all_gather_object for objects")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} needs a contiguous tensor, got shape {tuple(tensor.shape)} with strides {tensor.stride()}: "
                "GLOO reads past the gaps and NCCL refuses it; pass tensor.contiguous() and copy the result back"
            )
    if not tensors:
        return
    place = tensors[0].device
    if len(tensors) > 1 and any(tensor.device != place for tensor in tensors):
        names = " and ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise ValueError(f"{name}: one call works on tensors of one device, got {names}; move them with .to(...)")
    if group is dist.GroupMember.NON_GROUP_MEMBER or not dist.is_initialized():
        return  # `members` refuses the first; nothing can be sent in the second
    carried = _carried_types(dist.get_backend_config(group))
    if place.type not in carried:
        raise ValueError(
            f"{name}: the group carries tensors on {', '.join(carried)}, got one on {place}; move it with "
            'tensor.to(lab.device()), or make the group with backend="cpu:gloo,cuda:nccl"'
        )
    if place.type != "cpu":
        _check_types(name, tensors)


@cache
def _carried_types(config: str) -> tuple[str, ...]:
    """`("cpu", "cuda")` for `"cpu:gloo,cuda:nccl"`."""
    return tuple(part.split(":")[0] for part in str(config).split(","))


def _check_types(name: str, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        viewed_as_real = tensor.is_complex() and name not in _NO_COMPLEX
        if tensor.dtype not in _NCCL_TYPES and not viewed_as_real:
            remedy = "torch.view_as_real(tensor)" if tensor.is_complex() else "tensor.view(torch.uint8), or 32 bits"
            raise ValueError(f"{name}: NCCL does not know {tensor.dtype}; pass {remedy}")


def runs_on_gloo(tensor: torch.Tensor) -> bool:
    """Whether GLOO carries this tensor."""
    return bool(tensor.is_cpu)


def reduction(name: str) -> Any:
    """Torch's reduce operator of this name; ValueError if there is none."""
    if name not in _REDUCTIONS:
        raise ValueError(f"a reduction is one of {', '.join(_REDUCTIONS)}, got {name!r}")
    return _REDUCTIONS[name]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())
