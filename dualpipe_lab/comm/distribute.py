"""Collectives that distribute: every rank of the group sends or receives different data.

Chapters: book/start/ranks-and-messages, book/ep/all-to-all.  In: contiguous tensors on each of N ranks.
  bytes sent   all_to_all_single: every block but the local one; gather, scatter: one block, to or from the root
Elsewhere: `torch.distributed`, whose names and arguments these are.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dualpipe_lab.comm.call import Work
from dualpipe_lab.comm.collectives import all_gather_single
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.launch import payload
from dualpipe_lab.launch.record import traffic
from dualpipe_lab.launch.record.operation import Moved


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
    call = Work("all_to_all_single", None, group, input, output)
    receives = call.block_bytes("output", output, output_split_sizes)
    call.derive = partial(_all_to_all_bytes, call.block_bytes("input", input, input_split_sizes), receives)
    splits = [None if sizes is None else list(sizes) for sizes in (output_split_sizes, input_split_sizes)]
    with call:
        call.handle = dist.all_to_all_single(output, input, *splits, group=call.carrier, async_op=True)
    return call.wait_unless(async_op)


def _all_to_all_bytes(sends: list[int], receives: list[int], call: Work) -> Moved:
    return Moved(traffic.all_to_all(sends, receives, call.position), call.by_peer(sends))


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
    call = Work("gather", _gather_bytes, group, tensor, *(outputs or []), root=dst)
    _check_at_root(call, "outputs", outputs)
    call.tensor_bytes *= call.size
    with call:
        call.handle = dist.gather(tensor, outputs, dst, call.carrier, async_op=True)
    return call.wait_unless(async_op)


def _check_at_root(call: Work, what: str, tensors: list[torch.Tensor] | None) -> None:
    if (tensors is not None) != (call.position == call.root_position):
        raise ValueError(f"{call.name}: {what} belong on rank {call.root} and on no other; elsewhere pass None")
    if tensors is not None:
        call.check_count(what, tensors)


def _gather_bytes(call: Work) -> Moved:
    root = call.root_position
    moved = traffic.gather(call.tensor_bytes // call.size, call.size, call.position, root)
    return Moved(moved, {call.group[root]: moved.sent})


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
    call = Work("scatter", None, group, tensor, *(inputs or []), root=src)
    _check_at_root(call, "inputs", inputs)
    call.derive = partial(_scatter_bytes, [block.nbytes for block in inputs or []])
    call.tensor_bytes *= call.size
    with call:
        call.handle = dist.scatter(tensor, inputs, src, call.carrier, async_op=True)
    return call.wait_unless(async_op)


def _scatter_bytes(blocks: list[int], call: Work) -> Moved:
    moved = traffic.scatter(call.tensor_bytes // call.size, call.size, call.position, call.root_position)
    return Moved(moved, call.by_peer(blocks) if blocks else {})


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
