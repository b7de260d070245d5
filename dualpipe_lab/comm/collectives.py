"""Collectives that copy or reduce: every rank of the group contributes or receives the same tensor or its chunk.

Chapters: book/start/ranks-and-messages, book/dp/zero-1, book/tp/block.  In: contiguous tensors on each of N ranks.
  bytes sent   all_reduce 2 (N - 1) / N * S     reduce_scatter, all_gather (N - 1) / N * S     (S: the full tensor)
Reduce-scatter: NCCL has it.  GLOO of torch 2.13 runs an all-reduce instead, which sends twice the bytes, and keeps a
slice.  On GLOO each rank therefore sends chunk j to rank j with one all-to-all, and `wait` adds the received chunks in
rank order: 16-bit types in fp32, rounded once.  The order is fixed, so a repeated run has the same bits; an all-reduce
adds in another order and differs in the last digits.  On an emulated link every rank takes the time of NCCL's ring.
GLOO's all-reduce and reduce run round the ring the other way: each rank sends to the one before it.
  memory       the N received chunks, from the call to the wait; `output` may be this rank's chunk of `input`
Elsewhere: `torch.distributed`, whose names and arguments these are.
"""

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dualpipe_lab.comm.call import Work
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.launch.record import traffic
from dualpipe_lab.launch.record.operation import Moved


class _Reductions(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(f"a reduction is one of {', '.join(self)}, got {name!r}")


_NAMES = "sum", "avg", "max", "min", "product"
_REDUCTIONS = _Reductions({name: getattr(dist.ReduceOp, name.upper()) for name in _NAMES})

# torch 2.13 renamed both and warns, in every rank, under the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_IN_PLACE = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "max": lambda total, chunk: torch.maximum(total, chunk, out=total),
    "min": lambda total, chunk: torch.minimum(total, chunk, out=total),
}


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Replace `tensor` on every rank by the element-wise reduction of all ranks' tensors.

    Args:
        tensor: any shape and dtype, the same on all ranks.
        op: `sum`, `avg`, `max`, `min` or `product`.
        group: the ranks that take part; by default the world.
        async_op: return a `Work` without waiting.

    Raises:
        ValueError: unknown `op`, `tensor` is not contiguous, or this rank is not in `group`.
    """
    call, operator = Work("all_reduce", _all_reduce_bytes, group, tensor), _REDUCTIONS[op]
    with call:
        call.handle = dist.all_reduce(tensor, operator, call.carrier, async_op=True)
    return call.wait_unless(async_op)


def _all_reduce_bytes(call: Work) -> Moved:
    moved = traffic.all_reduce(call.ring_chunks(), call.position)
    return Moved(moved, addressed={call.neighbour(-1): moved.sent} if call.on_gloo else None)


def reduce(
    tensor: torch.Tensor, dst: int, op: str = "sum", group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Replace `tensor` on global rank `dst` by the reduction of all ranks' tensors; undefined on the other ranks.

    Shapes, `op`, `group` and `async_op` are those of `all_reduce`.

    Raises:
        ValueError: as `all_reduce`, or `dst` is not in `group`.
    """
    call, operator = Work("reduce", _reduce_bytes, group, tensor, root=dst), _REDUCTIONS[op]
    with call:
        call.handle = dist.reduce(tensor, dst, operator, call.carrier, async_op=True)
    return call.wait_unless(async_op)


def _reduce_bytes(call: Work) -> Moved:
    chunks, root = call.ring_chunks(), call.root_position
    moved = traffic.reduce(chunks, call.position, root)
    to_root = chunks[call.position] * (call.position != root)
    sent_to, addressed = (Counter({peer: moved.sent - to_root}) for peer in map(call.neighbour, (1, -1)))
    sent_to[call.group[root]] += to_root
    addressed[call.group[root]] += to_root
    return Moved(moved, sent_to, addressed if call.on_gloo else None)


def broadcast(tensor: torch.Tensor, src: int, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Copy the `tensor` of global rank `src` into `tensor` on every rank; one shape and dtype on all ranks.

    Raises:
        ValueError: `tensor` is not contiguous, or this rank or `src` is not in `group`.
    """
    call = Work("broadcast", _broadcast_bytes, group, tensor, root=src)
    with call:
        call.handle = dist.broadcast(tensor, src, call.carrier, async_op=True)
    return call.wait_unless(async_op)


def _broadcast_bytes(call: Work) -> Moved:
    size, place = call.tensor_bytes, (call.size, call.position, call.root_position)
    return Moved(traffic.broadcast(size, *place), {call.group[child]: size for child in traffic.children(*place)})


def all_gather_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `output` on every rank with the `input` of all ranks, concatenated in rank order.

    Args:
        output: N times the elements of `input`, e.g. `(N * rows, columns)`.
        input: `(rows, columns)` or any shape; the same on all N ranks.
        group: the ranks that take part; by default the world.
        async_op: return a `Work` without waiting.

    Raises:
        ValueError: `output` has another size, a tensor is not contiguous, or this rank is not in `group`.
    """
    call = Work("all_gather_single", _all_gather_bytes, group, input, output)
    call.check_numel("output", output, call.size * input.numel())
    call.tensor_bytes = output.nbytes
    with call:
        call.handle = _all_gather_single(output, input, group=call.carrier, async_op=True)
    return call.wait_unless(async_op)


def _all_gather_bytes(call: Work) -> Moved:
    return Moved(traffic.all_gather([call.tensor_bytes // call.size] * call.size, call.position))


def all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Fill `outputs[j]` on every rank with the `tensor` of the group's j-th rank; all N + 1 tensors have one size.

    Raises:
        ValueError: `outputs` has not N tensors of that size, one is not contiguous, or this rank is not in `group`.
    """
    call = Work("all_gather", _all_gather_bytes, group, tensor, *outputs)
    call.check_count("outputs", outputs)
    for output in outputs:
        call.check_numel("each output (pad uneven tensors, or use all_to_all_single)", output, tensor.numel())
    call.tensor_bytes *= call.size
    with call:
        call.handle = dist.all_gather(outputs, tensor, call.carrier, async_op=True)
    return call.wait_unless(async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    op: str = "sum",
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce all ranks' `input` element by element and fill `output` on rank j with the j-th of its N chunks.

    Args:
        output: one chunk; it may be this rank's chunk of `input` itself.
        input: N times the elements of `output`, one shape on all ranks.
        op: as for `all_reduce`; `avg` needs a floating or complex dtype.
        group: the ranks that take part; by default the world.
        async_op: return a `Work` without waiting.

    Raises:
        ValueError: sizes or dtypes do not fit, `op` is unknown, a tensor is not contiguous, or this rank is not in
            `group`.
    """
    call, operator = Work("reduce_scatter_single", _reduce_scatter_bytes, group, input, output), _REDUCTIONS[op]
    call.check_numel("input", input, call.size * output.numel())
    if output.dtype != input.dtype:
        raise ValueError(f"{call.name}: output is {output.dtype}, the input {input.dtype}; give both one type")
    if op == "avg" and not (output.is_floating_point() or output.is_complex()):
        raise ValueError(f"{call.name}: an average of {output.dtype} is no whole number; sum, then divide")
    if not call.on_gloo:
        with call:
            call.handle = _reduce_scatter_single(output, input, op=operator, group=call.carrier, async_op=True)
        return call.wait_unless(async_op)
    received = torch.empty_like(input).view(-1)
    call.finish = partial(_reduce_chunks, output, received.view(call.size, -1), op)
    with call:
        call.handle = dist.all_to_all_single(received, input.view(-1), group=call.carrier, async_op=True)
    return call.wait_unless(async_op)


def _reduce_scatter_bytes(call: Work) -> Moved:
    blocks = [call.tensor_bytes // call.size] * call.size
    moved = traffic.reduce_scatter(blocks, call.position)
    return Moved(moved, addressed=call.by_peer(blocks) if call.on_gloo else None)


def barrier(group: Group | None = None) -> None:
    """Block until every rank of the group has called `barrier`.

    Raises:
        ValueError: this rank is not in `group`.
    """
    call = Work("barrier", lambda call: Moved(traffic.barrier(call.size)), group)
    with call:
        call.handle = dist.barrier(call.carrier, async_op=True)
    call.wait_unless(False)


def _reduce_chunks(output: torch.Tensor, chunks: torch.Tensor, op: str) -> None:
    """Reduce the received chunks in rank order into `output`."""
    with torch.no_grad():  # the output may be a leaf
        is_narrow = output.is_floating_point() and output.element_size() < 4
        total = chunks[0].float() if is_narrow else chunks[0]
        for chunk in chunks[1:].unbind():
            _IN_PLACE[op](total, chunk)
        if op == "avg":
            total.div_(len(chunks))
        output.copy_(total.view_as(output))
