"""Collectives that distribute: every rank sends, or receives, something different."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dualpipe_lab.comm.collectives import all_gather_single
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.comm.place import place, start
from dualpipe_lab.comm.work import Work, num_bytes
from dualpipe_lab.world import payload
from dualpipe_lab.world.record import traffic


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the j-th block of `input`'s rows to rank j and fill `output` with the blocks addressed to this rank."""
    where = place("all_to_all_single", group, output, input)
    receives = where.block_bytes("output", output, output_split_sizes)
    sends = where.block_bytes("input", input, input_split_sizes)
    moved = traffic.all_to_all(sends, receives, where.position)
    splits = [None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes)]
    begin = partial(dist.all_to_all_single, output, input, *splits, group=where.group, async_op=True)
    return start(where, moved, input, begin, async_op, sent_to=where.addressed(sends))


def all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Send `inputs[j]` to rank j and fill `outputs[j]` with what rank j addressed to this rank."""
    where = place("all_to_all", group, *outputs, *inputs)
    where.check_count("outputs", outputs)
    where.check_count("inputs", inputs)
    sends, receives = [num_bytes(block) for block in inputs], [num_bytes(block) for block in outputs]
    moved = traffic.all_to_all(sends, receives, where.position)
    # GLOO's own list form insists on equal sizes, its flat form does not
    flat_in = torch.cat([block.reshape(-1) for block in inputs])
    flat_out = flat_in.new_empty(sum(block.numel() for block in outputs))
    splits = [block.numel() for block in outputs], [block.numel() for block in inputs]

    def unpack() -> None:
        for block, part in zip(outputs, flat_out.split(splits[0]), strict=True):
            block.copy_(part.view_as(block))

    begin = partial(dist.all_to_all_single, flat_out, flat_in, *splits, group=where.group, async_op=True)
    return start(where, moved, flat_in, begin, async_op, unpack, where.addressed(sends))


def gather(
    tensor: torch.Tensor,
    outputs: list[torch.Tensor] | None,
    dst: int,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `outputs[j]` on global rank `dst` with rank j's `tensor`; elsewhere `outputs` is None."""
    where = place("gather", group, tensor, *(outputs or []), root=dst)
    if (outputs is not None) != (where.position == where.index(dst)):
        raise ValueError(f"gather: outputs belong on rank {dst} and on no other; elsewhere pass None")
    if outputs is not None:
        where.check_count("outputs", outputs)
    moved = traffic.gather(num_bytes(tensor), where.size, where.position, where.index(dst))
    begin = partial(dist.gather, tensor, outputs, dst, where.group, True)
    full = where.size * num_bytes(tensor)
    return start(where, moved, tensor, begin, async_op, sent_to={dst: moved.sent}, tensor_bytes=full)


def scatter(
    tensor: torch.Tensor,
    inputs: list[torch.Tensor] | None,
    src: int,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `tensor` on rank j with `inputs[j]` of global rank `src`; elsewhere `inputs` is None."""
    where = place("scatter", group, tensor, *(inputs or []), root=src)
    if (inputs is not None) != (where.position == where.index(src)):
        raise ValueError(f"scatter: inputs belong on rank {src} and on no other; elsewhere pass None")
    if inputs is not None:
        where.check_count("inputs", inputs)
    moved = traffic.scatter(num_bytes(tensor), where.size, where.position, where.index(src))
    begin = partial(dist.scatter, tensor, inputs, src, where.group, True)
    sends = [num_bytes(block) for block in inputs or [tensor[:0]] * where.size]
    full = where.size * num_bytes(tensor)
    return start(where, moved, tensor, begin, async_op, sent_to=where.addressed(sends), tensor_bytes=full)


def all_gather_object(value: object, group: Group | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order: their sizes travel first, then their padded pickles."""
    size = len(members(group))
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    data = torch.frombuffer(bytearray(payload.dumps(value)), dtype=torch.uint8).to(device)
    sizes = torch.empty(size, dtype=torch.int64, device=device)
    all_gather_single(sizes, torch.tensor([data.numel()], device=device), group)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    everything = torch.empty(size * longest, dtype=torch.uint8, device=device)
    all_gather_single(everything, padded, group)
    parts = everything.view(size, longest).cpu()
    return [payload.loads(part[:length].numpy().tobytes()) for part, length in zip(parts, sizes.tolist(), strict=True)]
