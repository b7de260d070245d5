"""A communication call from check to end, and what carries its tensors: GLOO those of the CPU, NCCL those of GPUs.

In: a name, a group and contiguous tensors.  Out: a `Work`.  Every function of `comm` reads the same way:
  call = Work(name, moved, group, tensor)             check the tensors and the group
  with call:                                          before: number it, keep it for ledger and reports
      call.handle = dist.all_reduce(..., async_op=True)
  return call.wait_unless(async_op)                   wait for torch; after: let its emulated time pass, keep its end
`moved` derives the bytes from the fields of the `Work`; the recorder calls it when somebody reads ledger or trace.
A run on GLOO and one on NCCL fail alike, before the call begins, and none of them hangs.
Elsewhere: `check_gpu_single_tensor` in torch's ProcessGroupNCCL.cpp; NCCL manual, "Point-to-point communication".
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from dualpipe_lab._private import source_rank
from dualpipe_lab.comm.groups import Group, carrier, check_group, members, name_of
from dualpipe_lab.launch import context
from dualpipe_lab.launch.record import traffic
from dualpipe_lab.launch.record.operation import Moved, Operation

T = TypeVar("T")
_NCCL_TYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_NO_COMPLEX = ("reduce", "gather", "reduce_scatter_single")  # elsewhere torch sends pairs of reals


class Work(Operation):
    """Handle of an operation that this rank has issued.

    Until `wait` returns, the caller must not change the input tensors and must not read the output tensors.
    `comm` issues the operation inside a `with` block and stores torch's handle in `handle`.  The first of `tensors`
    gives the shape and dtype of reports.

    Attributes:
        size: number of ranks of the group.
        position: index of this rank among them.
        carrier: process group to pass to torch: the caller's, or with `launch(..., wire=True)` the one for this name.
        on_gloo: whether GLOO carries the tensors.
        finish: runs in `wait`, after torch's part is complete.

    Raises:
        TypeError: an argument is no tensor, or no group.
        ValueError: no back end of the group carries a tensor, or this rank or the root is not in the group.
    """

    def __init__(
        self, name: str, moved: Callable[[Any], Moved] | None, group: Group | None, *tensors: torch.Tensor,
        root: int | None = None,
    ) -> None:  # fmt: skip
        check_tensors(name, group, *tensors)
        self.context = here = context.current or context.rank_context()
        self.name, self.derive, self.root, self.recorder = name, moved, root, here.active_recorder
        self.group, self.group_name = (here.everyone, "") if group is None else (members(group), name_of(group))
        self.size, self.position = len(self.group), self.group.index(here.rank)
        if root is not None and root not in self.group:
            raise ValueError(f"{name}: rank {root} is not among the ranks {list(self.group)}")
        self.carrier = group if here.wire is None else carrier(name, self.group, self.group_name, group)
        self.shape: tuple[int, ...] = ()
        self.on_gloo = True
        if tensors:
            self.shape, self.tensor_bytes = tuple(tensors[0].shape), tensors[0].nbytes
            self.dtype, self.on_gloo = str(tensors[0].dtype).removeprefix("torch."), tensors[0].is_cpu
        self.handle: Any = None
        self.finish: Callable[[], None] | None = None
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
        if not self._done:
            self.wait_unless(False)

    def wait_unless(self, async_op: bool) -> "Work | None":
        """Return this work if `async_op`; otherwise wait for it and return None."""
        if async_op:
            return self.under_way()
        recorder, waited_from = self.recorder, self.issued_ns
        if id(self) in self.context.in_flight and recorder is not None:
            waited_from = recorder.clock.now()
            recorder.wait_for(self)
        if self.handle is not None:
            self.handle.wait()
        if self.sends is False and self.peer is None:
            self.peer = source_rank(self.handle)
        if self.finish is not None:
            self.finish()
        if recorder is not None:
            recorder.after(self, waited_from)
        self._done, self.handle, self.finish = True, None, None  # the recorder keeps this object, not its tensors
        self.context.in_flight.pop(id(self), None)
        return None

    def under_way(self) -> "Work":
        """Keep this work until its `wait`, because torch drops the message with its handle, and return it."""
        if self.recorder is not None:
            self.recorder.status.current = None
        self.context.in_flight[id(self)] = self
        return self

    @property
    def has_left(self) -> bool:
        """Whether the last byte of a send has left on the emulated link; True without a link."""
        recorder = self.recorder
        return recorder is None or recorder.emulator is None or self.due_ns <= recorder.clock.now()

    def __repr__(self) -> str:
        return f"<Work {self.describe()}, {'done' if self._done else 'under way'}>"

    def neighbour(self, step: int) -> int:
        """Global rank of the member that stands `step` places after this one in the ring."""
        return self.group[(self.position + step) % self.size]

    @property
    def root_position(self) -> int:
        """Position of the root in the group."""
        return self.group.index(self.root or 0)

    def ring_chunks(self) -> list[int]:
        """Bytes of the chunks into which a ring divides the tensor; the larger chunks come first."""
        numel = prod(self.shape)
        element_bytes = self.tensor_bytes // numel if numel else 0
        return [part * element_bytes for part in traffic.split(numel, self.size)]

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
        row_bytes = tensor.nbytes // rows if rows else 0
        return [split * row_bytes for split in splits]

    def by_peer(self, sends: Sequence[int]) -> dict[int, int]:
        """Bytes of each block by the global rank that receives it; this rank's local block is not sent."""
        by_rank = zip(self.group, sends, strict=True)
        return {rank: sent for position, (rank, sent) in enumerate(by_rank) if position != self.position}


class Pending(Generic[T]):
    """Handle of a result whose operations are still running; every function named `..._async` returns one.

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
        TypeError: an argument is no tensor, or no group.
        ValueError: a tensor is not contiguous, on another device than the others or than the group, or of a type that
            NCCL does not know.
    """
    if group is not None:
        check_group(group)
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
    config = str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl"
    if f"{place.type}:" not in config:
        carried = [part.split(":")[0] for part in config.split(",")]
        raise ValueError(
            f"{name}: the group carries tensors on {', '.join(carried)}, got one on {place}; move it with "
            'tensor.to(lab.device()), or make the group with backend="cpu:gloo,cuda:nccl"'
        )
    if place.type != "cpu":
        _check_types(name, tensors)


def _check_types(name: str, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        viewed_as_real = tensor.is_complex() and name not in _NO_COMPLEX
        if tensor.dtype not in _NCCL_TYPES and not viewed_as_real:
            remedy = "torch.view_as_real(tensor)" if tensor.is_complex() else "tensor.view(torch.uint8), or 32 bits"
            raise ValueError(f"{name}: NCCL does not know {tensor.dtype}; pass {remedy}")
