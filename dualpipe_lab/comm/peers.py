"""Messages between two ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dualpipe_lab.comm.groups import Group, carrier, members, name_of
from dualpipe_lab.comm.work import Work, check_contiguous, dtype_name, issue, num_bytes
from dualpipe_lab.world.context import rank_context
from dualpipe_lab.world.record.operation import Operation
from dualpipe_lab.world.record.traffic import Traffic
from dualpipe_lab.world.record.wire import MESSAGES


class P2P(NamedTuple):
    """One message of a batch: `P2P("isend", tensor, peer)` or `P2P("irecv", tensor, peer)`; `label` is for sends."""

    kind: Literal["isend", "irecv"]
    tensor: torch.Tensor
    peer: int
    tag: int = 0
    label: str = ""


def isend(tensor: torch.Tensor, dst: int, tag: int = 0, group: Group | None = None, label: str = "") -> Work:
    """Start sending `tensor` to global rank `dst`; `label` names the message in the timeline."""
    operation = _message("isend", tensor, dst, tag, group)
    operation.label = label
    work = issue(operation, partial(dist.isend, tensor, dst, _carrier(group), tag), True)
    assert work is not None
    return work


def irecv(tensor: torch.Tensor, src: int | None = None, tag: int = 0, group: Group | None = None) -> Work:
    """Start filling `tensor` with a message from global rank `src` (None: from whichever rank sends first)."""
    work = issue(
        _message("irecv", tensor, src, tag, group), partial(dist.irecv, tensor, src, _carrier(group), tag), True
    )
    assert work is not None
    return work


def send(tensor: torch.Tensor, dst: int, tag: int = 0, group: Group | None = None) -> None:
    """Send `tensor` to global rank `dst`; return when it has left, which on GLOO is not before `dst` asks for it."""
    issue(_message("send", tensor, dst, tag, group), partial(dist.isend, tensor, dst, _carrier(group), tag), False)


def recv(tensor: torch.Tensor, src: int | None = None, tag: int = 0, group: Group | None = None) -> int:
    """Fill `tensor` with a message from global rank `src` (None: any); return who sent it."""
    operation = _message("recv", tensor, src, tag, group)
    issue(operation, partial(dist.irecv, tensor, src, _carrier(group), tag), False)
    assert operation.peer is not None
    return operation.peer


def batch_isend_irecv(messages: Sequence[P2P], group: Group | None = None) -> list[Work]:
    """Start several messages together (NCCL then cannot deadlock on their order); one `Work` each."""
    if not messages:
        return []
    context = rank_context()
    operations = [_message(message.kind, message.tensor, message.peer, message.tag, group) for message in messages]
    for operation, message in zip(operations, messages, strict=True):
        operation.label = message.label
        context.begin(operation)
    functions = {"isend": dist.isend, "irecv": dist.irecv}
    group = _carrier(group)
    handles: list[Any] = dist.batch_isend_irecv(
        [dist.P2POp(functions[message.kind], message.tensor, message.peer, group, message.tag) for message in messages]
    )
    # NCCL returns one handle for the whole batch, GLOO one for each message
    return [
        Work(context, operation, handles[min(position, len(handles) - 1)])
        for position, operation in enumerate(operations)
    ]


def _carrier(group: Group | None) -> Group | None:
    if rank_context().wire is None:  # the common case, at no cost
        return group
    return carrier(MESSAGES, members(group), name_of(group), group)


def _message(name: str, tensor: torch.Tensor, peer: int | None, tag: int, group: Group | None) -> Operation:
    """Describe a message and refuse what could only hang."""
    check_contiguous(name, tensor)
    ranks, rank = members(group), rank_context().rank
    if peer is not None and peer not in ranks:
        raise ValueError(f"{name}: rank {peer} is not among the ranks {list(ranks)}")
    if peer == rank:
        raise ValueError(f"{name}: rank {rank} cannot exchange messages with itself; copy the tensor")
    if tag < 0:
        raise ValueError(f"{name}: a tag is at least 0, got {tag}")
    sends, size = name.endswith("send"), num_bytes(tensor)
    traffic = Traffic(size, 0, 1) if sends else Traffic(0, size, 1)
    operation = Operation(name, ranks, traffic, tuple(tensor.shape), peer, tag, sends=sends)
    operation.tensor_bytes = size * sends
    operation.group_name, operation.dtype = name_of(group), dtype_name(tensor.dtype)
    return operation
