"""Collectives that combine or copy: every rank of the group contributes to, or receives, the same thing."""

from functools import partial

import torch
import torch.distributed as dist

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.comm.place import even_chunks, place, reduction, start
from dualpipe_lab.comm.work import Work, num_bytes
from dualpipe_lab.world.record import traffic

# torch 2.13 renamed it and warns, in every rank, under the old name
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Replace `tensor` on every rank by its sum (or avg, max, min, product) over the ranks."""
    where = place("all_reduce", group, tensor)
    moved = traffic.all_reduce(even_chunks(tensor, where.size), where.position)
    begin = partial(dist.all_reduce, tensor, op=reduction(op), group=where.group, async_op=True)
    return start(where, moved, tensor, begin, async_op)


def reduce(
    tensor: torch.Tensor, dst: int, op: str = "sum", group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Replace `tensor` on global rank `dst` by its sum; elsewhere its content is undefined afterwards."""
    where = place("reduce", group, tensor, root=dst)
    chunks = even_chunks(tensor, where.size)
    moved = traffic.reduce(chunks, where.position, where.index(dst))
    begin = partial(dist.reduce, tensor, dst, op=reduction(op), group=where.group, async_op=True)
    to_root = chunks[where.position] * (where.position != where.index(dst))
    sent_to = {where.ranks[(where.position + 1) % where.size]: moved.sent - to_root}
    sent_to[dst] = sent_to.get(dst, 0) + to_root
    return start(where, moved, tensor, begin, async_op, sent_to=sent_to)


def broadcast(tensor: torch.Tensor, src: int, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Replace `tensor` on every rank by that of global rank `src`."""
    where = place("broadcast", group, tensor, root=src)
    root = where.index(src)
    moved = traffic.broadcast(num_bytes(tensor), where.size, where.position, root)
    sent_to = {where.ranks[child]: num_bytes(tensor) for child in traffic.children(where.size, where.position, root)}
    begin = partial(dist.broadcast, tensor, src, group=where.group, async_op=True)
    return start(where, moved, tensor, begin, async_op, sent_to=sent_to)


def all_gather_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `output` (N times `input`) on every rank with the inputs of all ranks, in rank order."""
    where = place("all_gather_single", group, output, input)
    where.check_numel("output", output, where.size * input.numel())
    moved = traffic.all_gather([num_bytes(input)] * where.size, where.position)
    begin = partial(_all_gather_single, output, input, group=where.group, async_op=True)
    return start(where, moved, input, begin, async_op, tensor_bytes=num_bytes(output))


def all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Fill `outputs[j]` on every rank with rank j's `tensor`; all of one size."""
    where = place("all_gather", group, *outputs, tensor)
    where.check_count("outputs", outputs)
    for output in outputs:
        where.check_numel("each output (pad uneven tensors, or use all_to_all)", output, tensor.numel())
    moved = traffic.all_gather([num_bytes(output) for output in outputs], where.position)
    begin = partial(dist.all_gather, outputs, tensor, where.group, True)
    return start(where, moved, tensor, begin, async_op, tensor_bytes=where.size * num_bytes(tensor))


def barrier(group: Group | None = None) -> None:
    """Return when every rank of the group has come here."""
    where = place("barrier", group)
    begin = partial(dist.barrier, group=where.group, async_op=True)
    start(where, traffic.barrier(where.size), None, begin, async_op=False)
