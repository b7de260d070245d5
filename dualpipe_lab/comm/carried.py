"""What carries a tensor, and what that refuses: GLOO the tensors of the CPU, NCCL those of GPUs.

Chapter: book/appendix/gpus.  In: the tensors of a call and its group.  Out: nothing, or one sentence with the remedy.
`comm` asks before a call begins, so that a run on GLOO and one on NCCL fail alike, and none of them hangs:
  both    strided tensors (GLOO sums them wrong without an error), tensors of two devices in one call
  NCCL    a tag, a receive from any rank, integers of 16 bits, and a message to a rank from which one
          is under way, or the other way round: NCCL runs the messages of a pair of ranks one after the other, in the
          order of the calls, so each rank may wait for what the other has queued behind
Elsewhere: `check_gpu_single_tensor` in torch's ProcessGroupNCCL.cpp; NCCL manual, "Point-to-point communication".
"""

from collections.abc import Iterable
from functools import cache

import torch
import torch.distributed as dist

from dualpipe_lab.world.record.operation import Operation

_NCCL_TYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
_NO_COMPLEX = ("reduce", "gather", "reduce_scatter", "reduce_scatter_single")  # elsewhere torch sends pairs of reals


def runs_on_gloo(tensor: torch.Tensor) -> bool:
    """Whether GLOO carries this tensor."""
    return bool(tensor.is_cpu)


def check_tensors(name: str, group: dist.ProcessGroup | None, *tensors: torch.Tensor) -> None:
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
    _check_place(name, group, place)
    if not tensors[0].is_cpu:
        _check_types(name, tensors)


def _check_place(name: str, group: dist.ProcessGroup | None, place: torch.device) -> None:
    if group is dist.GroupMember.NON_GROUP_MEMBER or not dist.is_initialized():
        return  # `members` refuses the first; nothing can be sent in the second
    carried = _carried_types(dist.get_backend_config(group))
    if place.type not in carried:
        raise ValueError(
            f"{name}: the group carries tensors on {', '.join(carried)}, got one on {place}; move it with "
            'tensor.to(lab.device()), or make the group with backend="cpu:gloo,cuda:nccl"'
        )


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


def check_message(name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> None:
    """Refuse a message that NCCL cannot match; ValueError with the remedy."""
    if runs_on_gloo(tensor):
        return
    if peer is None:
        raise ValueError(f"{name}: NCCL receives from a given rank, got src=None; name the sender")
    if tag:
        raise ValueError(
            f"{name}: NCCL has no tags and matches messages in the order of the calls, got tag={tag} for rank {peer}; "
            "leave the tag out and post receives in the order of the sends"
        )


def check_order(operation: Operation, in_flight: Iterable[Operation]) -> None:
    """Refuse a message on NCCL that may wait for one of the other direction; ValueError with the remedy."""
    name, peer = operation.name, operation.peer
    for other in in_flight:
        if (other.peer, other.group_name, other.sends) == (peer, operation.group_name, not operation.sends):
            raise ValueError(
                f"{name} with rank {peer}: NCCL runs the messages of two ranks in the order of the calls, and "
                f"{other.describe()} is not waited for; start both in one batch_isend_irecv, or wait first"
            )
