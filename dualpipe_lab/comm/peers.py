"""Messages between two ranks.

Chapter: book/start/ranks-and-messages.  In: a contiguous tensor and the peer's global rank.  Out: a `Work`.
  bytes sent   S, the bytes of the tensor, on the sender; the receiver's tensor needs the same number of bytes
Two messages between the same two ranks with the same tag arrive in the order in which they were sent.
On NCCL they arrive in the order of the calls whatever their tags, so `comm` refuses tags there (`carried`).
Elsewhere: `torch.distributed`, whose names and arguments these are.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dualpipe_lab.comm.carried import check_message, check_order, check_tensors, runs_on_gloo
from dualpipe_lab.comm.groups import Group, carrier, members, name_of
from dualpipe_lab.comm.work import Work, dtype_name, num_bytes
from dualpipe_lab.world.context import rank_context
from dualpipe_lab.world.record.operation import Operation
from dualpipe_lab.world.record.traffic import Traffic
from dualpipe_lab.world.record.wire import MESSAGES


class P2P(NamedTuple):
    """One message of a batch: `P2P("isend", tensor, peer)` or `P2P("irecv", tensor, peer)`.

    `label` names a sent message in the timeline.
    """

    kind: Literal["isend", "irecv"]
    tensor: torch.Tensor
    peer: int
    tag: int = 0
    label: str = ""


def isend(tensor: torch.Tensor, dst: int, tag: int = 0, group: Group | None = None, label: str = "") -> Work:
    """Start to send `tensor` to global rank `dst`; the caller must not change `tensor` before `Work.wait` returns.

    Args:
        tensor: any shape and dtype.
        dst: global rank that receives it.
        tag: a number from 0; a receive with the same tag matches.
        group: both ranks belong to it; by default the world.
        label: name of the message in the timeline.

    Raises:
        ValueError: `dst` is this rank or not in `group`, `tag` is negative, or `tensor` is not contiguous.
    """
    work = _describe("isend", tensor, dst, tag, group, label)
    with work:
        work.handle = dist.isend(tensor, dst, _carrier(group), tag)
    return work


def irecv(tensor: torch.Tensor, src: int | None = None, tag: int = 0, group: Group | None = None) -> Work:
    """Start to fill `tensor` with a message from global rank `src` (None: from the rank that sends first).

    Raises:
        ValueError: as `isend`, with `src` for `dst`.
    """
    work = _describe("irecv", tensor, src, tag, group)
    with work:
        work.handle = dist.irecv(tensor, src, _carrier(group), tag)
    return work


def send(tensor: torch.Tensor, dst: int, tag: int = 0, group: Group | None = None) -> None:
    """Send `tensor` to global rank `dst` and block until it has left: on GLOO, until `dst` has called its receive.

    Raises:
        ValueError: as `isend`.
    """
    work = _describe("send", tensor, dst, tag, group)
    with work:
        work.handle = dist.isend(tensor, dst, _carrier(group), tag)
    work.wait()


def recv(tensor: torch.Tensor, src: int | None = None, tag: int = 0, group: Group | None = None) -> int:
    """Fill `tensor` with a message from global rank `src` (None: from any rank) and return the sender's global rank.

    Raises:
        ValueError: as `isend`, with `src` for `dst`.
    """
    work = _describe("recv", tensor, src, tag, group)
    with work:
        work.handle = dist.irecv(tensor, src, _carrier(group), tag)
    work.wait()
    assert work.operation.peer is not None
    return work.operation.peer


def batch_isend_irecv(messages: Sequence[P2P], group: Group | None = None) -> list[Work]:
    """Start several messages in one call, so that NCCL cannot deadlock on their order; return one `Work` per message.

    Raises:
        ValueError: as `isend`, for any of the messages; none of them is then started.
    """
    if not messages:
        return []
    context, functions = rank_context(), {"isend": dist.isend, "irecv": dist.irecv}
    works = [_describe(kind, tensor, peer, tag, group, label, True) for kind, tensor, peer, tag, label in messages]
    for work in works:
        context.begin(work.operation)
    group = _carrier(group)
    handles: list[Any] = dist.batch_isend_irecv(
        [dist.P2POp(functions[kind], tensor, peer, group, tag) for kind, tensor, peer, tag, _ in messages]
    )
    for position, work in enumerate(works):
        work.handle = handles[min(position, len(handles) - 1)]  # NCCL returns one for the batch, GLOO one per message
        context.in_flight[id(work)] = work
    return works


def _carrier(group: Group | None) -> Group | None:
    if rank_context().wire is None:  # the common case, at no cost
        return group
    return carrier(MESSAGES, members(group), name_of(group), group)


def _describe(
    name: str,
    tensor: torch.Tensor,
    peer: int | None,
    tag: int,
    group: Group | None,
    label: str = "",
    batched: bool = False,
) -> Work:
    """Describe a message as a work to issue, and refuse one that could only hang."""
    check_tensors(name, group, tensor)
    check_message(name, tensor, peer, tag)
    context, ranks = rank_context(), members(group)
    if peer is not None and peer not in ranks:
        raise ValueError(f"{name}: rank {peer} is not among the ranks {list(ranks)}")
    if peer == context.rank:
        raise ValueError(f"{name}: rank {peer} cannot exchange messages with itself; copy the tensor")
    if tag < 0:
        raise ValueError(f"{name}: a tag is at least 0, got {tag}")
    sends, size = name.endswith("send"), num_bytes(tensor)
    traffic = Traffic(size, 0, 1) if sends else Traffic(0, size, 1)
    operation = Operation(name, ranks, traffic, tuple(tensor.shape), peer, tag, sends=sends, label=label)
    operation.tensor_bytes = size * sends
    operation.group_name, operation.dtype = name_of(group), dtype_name(tensor.dtype)
    if not batched and not runs_on_gloo(tensor):
        check_order(operation, [work.operation for work in context.in_flight.values() if isinstance(work, Work)])
    return Work(context, operation)
