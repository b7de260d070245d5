"""Reduce-scatter: every rank gets its own chunk of the sum of all ranks' tensors.

Chapters: book/dp/zero-1, book/tp/block.  In: a tensor of N chunks on each of N ranks.  Out: one chunk on each.
  bytes sent   (N - 1) / N * S
  memory       N chunks from the call to the wait, besides input and output, of which the output may be one chunk
NCCL has it.  GLOO of torch 2.13 runs an all-reduce instead, which sends twice as much, and keeps a slice.  So on GLOO
each rank sends every chunk to its owner, one all-to-all, and the owner adds them in the order of the ranks when it
waits: in fp32 for types of 16 bits, rounded once.  All ranks of an emulated link take the time of NCCL's ring.
The order is fixed, so a repeated run has the same bits; an all-reduce has another order, and other last digits.
"""

from functools import partial

import torch
import torch.distributed as dist

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.comm.place import Place, place, reduction, start
from dualpipe_lab.comm.work import Work, num_bytes
from dualpipe_lab.world.record import traffic

# torch 2.13 renamed it and warns, in every rank, under the old name
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_IN_PLACE = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "max": lambda total, chunk: torch.maximum(total, chunk, out=total),
    "min": lambda total, chunk: torch.minimum(total, chunk, out=total),
}


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    op: str = "sum",
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `output` with this rank's N-th part of the sum of all inputs; it may be that part of `input` itself."""
    where = place("reduce_scatter_single", group, output, input)
    where.check_numel("input", input, where.size * output.numel())
    _check(where, output, input, op)
    moved = traffic.reduce_scatter([num_bytes(output)] * where.size, where.position)
    if dist.get_backend(where.group) != "gloo":
        begin = partial(_reduce_scatter_single, output, input, op=reduction(op), group=where.group, async_op=True)
        return start(where, moved, input, begin, async_op)
    received = torch.empty_like(input).view(-1)
    begin = partial(dist.all_to_all_single, received, input.view(-1), group=where.group, async_op=True)
    return start(where, moved, input, begin, async_op, partial(_reduce, output, received.view(where.size, -1), op))


def reduce_scatter(
    output: torch.Tensor,
    inputs: list[torch.Tensor],
    op: str = "sum",
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `output` on rank j with the sum over the ranks of their `inputs[j]`; the blocks may differ in size."""
    where = place("reduce_scatter", group, output, *inputs)
    where.check_count("inputs", inputs)
    where.check_numel("output", output, inputs[where.position].numel())
    _check(where, output, inputs[where.position], op)
    moved = traffic.reduce_scatter([num_bytes(block) for block in inputs], where.position)
    if dist.get_backend(where.group) != "gloo":
        begin = partial(dist.reduce_scatter, output, inputs, reduction(op), where.group, True)
        return start(where, moved, output, begin, async_op, tensor_bytes=sum(map(num_bytes, inputs)))
    flat = torch.cat([block.reshape(-1) for block in inputs])
    received = flat.new_empty(where.size, output.numel())
    splits = [output.numel()] * where.size, [block.numel() for block in inputs]
    begin = partial(dist.all_to_all_single, received.view(-1), flat, *splits, group=where.group, async_op=True)
    add = partial(_reduce, output, received, op)
    return start(where, moved, output, begin, async_op, add, tensor_bytes=num_bytes(flat))


def _check(where: Place, output: torch.Tensor, chunk: torch.Tensor, op: str) -> None:
    """Refuse what the owner could not write into its output."""
    reduction(op)
    if output.dtype != chunk.dtype:
        raise ValueError(f"{where.name}: output is {output.dtype}, the input {chunk.dtype}; give both one type")
    if op == "avg" and not (output.is_floating_point() or output.is_complex()):
        raise ValueError(f"{where.name}: an average of {output.dtype} is no whole number; sum, then divide")


def _reduce(output: torch.Tensor, chunks: torch.Tensor, op: str) -> None:
    """Combine the ranks' chunks in the order of the ranks."""
    with torch.no_grad():  # the output may be a leaf
        is_narrow = output.is_floating_point() and output.element_size() < 4
        total = chunks[0].float() if is_narrow else chunks[0]
        for chunk in chunks[1:].unbind():
            _IN_PLACE[op](total, chunk)
        if op == "avg":
            total.div_(len(chunks))
        output.copy_(total.view_as(output))
