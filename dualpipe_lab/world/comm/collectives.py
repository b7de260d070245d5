"""Collectives that combine or copy: every rank of the group contributes to, or receives, the same thing."""

from functools import partial

import torch
import torch.distributed as dist

from dualpipe_lab.world import traffic
from dualpipe_lab.world.comm.groups import Group
from dualpipe_lab.world.comm.place import even_chunks, place, reduction, start
from dualpipe_lab.world.comm.work import Work, num_bytes

# torch 2.13 renamed both and warns, in every rank, under the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Replace `tensor` on every rank by its sum (or avg, max, min, product) over the ranks."""
    where = place("all_reduce", group, tensor)
    moved = traffic.all_reduce(even_chunks(tensor, where.size), where.position)
    begin = partial(dist.all_reduce, tensor, op=reduction(op), group=group, async_op=True)
    return start(where, moved, tensor, begin, async_op)


def reduce(
    tensor: torch.Tensor, dst: int, op: str = "sum", group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Replace `tensor` on global rank `dst` by its sum; elsewhere its content is undefined afterwards."""
    where = place("reduce", group, tensor, root=dst)
    moved = traffic.reduce(num_bytes(tensor), where.size, where.position, where.index(dst))
    begin = partial(dist.reduce, tensor, dst, op=reduction(op), group=group, async_op=True)
    towards_root = where.ranks[where.position - 1]
    return start(where, moved, tensor, begin, async_op, sent_to={towards_root: moved.sent})


def broadcast(tensor: torch.Tensor, src: int, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Replace `tensor` on every rank by that of global rank `src`."""
    where = place("broadcast", group, tensor, root=src)
    moved = traffic.broadcast(num_bytes(tensor), where.size, where.position, where.index(src))
    return start(where, moved, tensor, partial(dist.broadcast, tensor, src, group=group, async_op=True), async_op)


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
    return start(where, moved, input, partial(_all_gather_single, output, input, group=group, async_op=True), async_op)


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    op: str = "sum",
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `output` with this rank's N-th part of the sum of all inputs."""
    where = place("reduce_scatter_single", group, output, input)
    where.check_numel("input", input, where.size * output.numel())
    moved = traffic.reduce_scatter([num_bytes(output)] * where.size, where.position)
    begin = partial(_reduce_scatter_single, output, input, op=reduction(op), group=group, async_op=True)
    return start(where, moved, input, begin, async_op)


def all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Fill `outputs[j]` on every rank with rank j's `tensor`; all of one size."""
    where = place("all_gather", group, *outputs, tensor)
    where.check_count("outputs", outputs)
    for output in outputs:
        where.check_numel("each output (pad uneven tensors, or use all_to_all)", output, tensor.numel())
    moved = traffic.all_gather([num_bytes(output) for output in outputs], where.position)
    return start(where, moved, tensor, partial(dist.all_gather, outputs, tensor, group, True), async_op)


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
    moved = traffic.reduce_scatter([num_bytes(block) for block in inputs], where.position)
    return start(
        where, moved, output, partial(dist.reduce_scatter, output, inputs, reduction(op), group, True), async_op
    )


def barrier(group: Group | None = None) -> None:
    """Return when every rank of the group has come here."""
    where = place("barrier", group)
    begin = partial(dist.barrier, group=group, async_op=True)
    start(where, traffic.barrier(where.size), None, begin, async_op=False)
