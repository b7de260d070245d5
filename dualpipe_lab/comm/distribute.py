"""Collectives that distribute: every rank of the group sends or receives different data.

Chapters: book/start/ranks-and-messages, book/ep/all-to-all.  In: contiguous tensors on each of N ranks.
  bytes sent   all_to_all: every block but the local one     gather, scatter: one block, straight to or from the root
Elsewhere: `torch.distributed`, whose names and arguments these are.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dualpipe_lab.comm.call import Collective, Work, num_bytes
from dualpipe_lab.comm.collectives import all_gather_single
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.launch import payload
from dualpipe_lab.launch.record import traffic


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the j-th block of rows of `input` to rank j, and fill the j-th block of rows of `output` from rank j.

    Args:
        output: `(sum(output_split_sizes), ...)`.
        input: `(sum(input_split_sizes), ...)`.
        output_split_sizes: rows received from each rank; None divides `output` evenly.
        input_split_sizes: rows sent to each rank; None divides `input` evenly.
        group: the ranks that take part; by default the world.
        async_op: return a `Work` without waiting.

    Raises:
        ValueError: sizes do not add up to the rows, a tensor is not contiguous, or this rank is not in `group`.
    """
    call = Collective("all_to_all_single", group, output, input)
    receives = call.block_bytes("output", output, output_split_sizes)
    sends = call.block_bytes("input", input, input_split_sizes)
    moved = traffic.all_to_all(sends, receives, call.position)
    splits = [None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes)]
    with call.moves(moved, input, sent_to=call.bytes_by_peer(sends)):
        call.handle = dist.all_to_all_single(output, input, *splits, group=call.carrier, async_op=True)
    return call.wait_unless(async_op)


def all_to_all(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Send `inputs[j]` to rank j and fill `outputs[j]` from rank j; every tensor may have its own shape.

    Raises:
        ValueError: a list has not one tensor per rank, one is not contiguous, or this rank is not in `group`.
    """
    call = Collective("all_to_all", group, *outputs, *inputs)
    call.check_count("outputs", outputs)
    call.check_count("inputs", inputs)
    sends, receives = [num_bytes(block) for block in inputs], [num_bytes(block) for block in outputs]
    moved = traffic.all_to_all(sends, receives, call.position)
    # GLOO's own list form insists on equal sizes, its flat form does not
    flat_in = torch.cat([block.reshape(-1) for block in inputs])
    flat_out = flat_in.new_empty(sum(block.numel() for block in outputs))
    splits = [block.numel() for block in outputs], [block.numel() for block in inputs]

    def unpack() -> None:
        for block, part in zip(outputs, flat_out.split(splits[0]), strict=True):
            block.copy_(part.view_as(block))

    with call.moves(moved, flat_in, unpack, call.bytes_by_peer(sends)):
        call.handle = dist.all_to_all_single(flat_out, flat_in, *splits, group=call.carrier, async_op=True)
    return call.wait_unless(async_op)


def gather(
    tensor: torch.Tensor,
    outputs: list[torch.Tensor] | None,
    dst: int,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `outputs[j]` on global rank `dst` with rank j's `tensor`; on the other ranks `outputs` is None.

    Raises:
        ValueError: `outputs` is on the wrong rank or has not one tensor per rank, a tensor is not contiguous, or this
            rank or `dst` is not in `group`.
    """
    call = Collective("gather", group, tensor, *(outputs or []), root=dst)
    root = call.position_of(dst)
    if (outputs is not None) != (call.position == root):
        raise ValueError(f"gather: outputs belong on rank {dst} and on no other; elsewhere pass None")
    if outputs is not None:
        call.check_count("outputs", outputs)
    moved = traffic.gather(num_bytes(tensor), call.size, call.position, root)
    with call.moves(moved, tensor, sent_to={dst: moved.sent}, tensor_bytes=call.size * num_bytes(tensor)):
        call.handle = dist.gather(tensor, outputs, dst, call.carrier, async_op=True)
    return call.wait_unless(async_op)


def scatter(
    tensor: torch.Tensor,
    inputs: list[torch.Tensor] | None,
    src: int,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `tensor` on rank j with `inputs[j]` of global rank `src`; on the other ranks `inputs` is None.

    Raises:
        ValueError: `inputs` is on the wrong rank or has not one tensor per rank, a tensor is not contiguous, or this
            rank or `src` is not in `group`.
    """
    call = Collective("scatter", group, tensor, *(inputs or []), root=src)
    root = call.position_of(src)
    if (inputs is not None) != (call.position == root):
        raise ValueError(f"scatter: inputs belong on rank {src} and on no other; elsewhere pass None")
    if inputs is not None:
        call.check_count("inputs", inputs)
    moved = traffic.scatter(num_bytes(tensor), call.size, call.position, root)
    sends = call.bytes_by_peer([num_bytes(block) for block in inputs or [tensor[:0]] * call.size])
    with call.moves(moved, tensor, sent_to=sends, tensor_bytes=call.size * num_bytes(tensor)):
        call.handle = dist.scatter(tensor, inputs, src, call.carrier, async_op=True)
    return call.wait_unless(async_op)


def all_gather_object(value: object, group: Group | None = None) -> list[Any]:
    """Return the values of all ranks in rank order: one all-gather of the pickles' sizes, one of the padded pickles.

    The pickles travel over GLOO, and tensors in them arrive on the CPU, wherever they were.

    Raises:
        ValueError: this rank is not in `group`.
    """
    size = len(members(group))
    data = torch.frombuffer(bytearray(payload.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(size, dtype=torch.int64, device="cpu")
    all_gather_single(sizes, torch.tensor([data.numel()], device="cpu"), group)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: data.numel()] = data
    gathered = torch.empty(size * longest, dtype=torch.uint8, device="cpu")
    all_gather_single(gathered, padded, group)
    rows = gathered.view(size, longest)
    return [payload.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, sizes.tolist(), strict=True)]
