"""Messages between two ranks.

Chapter: book/start/ranks-and-messages.  In: a contiguous tensor and the peer's global rank.  Out: a `Work`.
  bytes sent   S, the bytes of the tensor, on the sender; the receiver's tensor needs the same number of bytes
Two messages between the same two ranks with the same tag arrive in the order in which they were sent.
On NCCL they arrive in the order of the calls whatever their tags, so `comm` refuses tags there.
Elsewhere: `torch.distributed`, whose names and arguments these are.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dualpipe_lab.comm.call import Work
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.launch.record.operation import Moved
from dualpipe_lab.launch.record.traffic import Traffic


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
    with _Message("isend", tensor, dst, tag, group, label) as message:
        message.handle = dist.isend(tensor, dst, message.carrier, tag)
    return message.under_way()


def irecv(tensor: torch.Tensor, src: int | None = None, tag: int = 0, group: Group | None = None) -> Work:
    """Start to fill `tensor` with a message from global rank `src` (None: from the rank that sends first).

    Raises:
        ValueError: as `isend`, with `src` for `dst`.
    """
    with _Message("irecv", tensor, src, tag, group) as message:
        message.handle = dist.irecv(tensor, src, message.carrier, tag)
    return message.under_way()


def send(tensor: torch.Tensor, dst: int, tag: int = 0, group: Group | None = None) -> None:
    """Send `tensor` to global rank `dst` and block until it has left: on GLOO, until `dst` has called its receive.

    Raises:
        ValueError: as `isend`.
    """
    with _Message("send", tensor, dst, tag, group) as message:
        message.handle = dist.isend(tensor, dst, message.carrier, tag)
    message.wait_unless(False)


def recv(tensor: torch.Tensor, src: int | None = None, tag: int = 0, group: Group | None = None) -> int:
    """Fill `tensor` with a message from global rank `src` (None: from any rank) and return the sender's global rank.

    Raises:
        ValueError: as `isend`, with `src` for `dst`.
    """
    with _Message("recv", tensor, src, tag, group) as message:
        message.handle = dist.irecv(tensor, src, message.carrier, tag)
    message.wait_unless(False)
    assert message.peer is not None
    return message.peer


def batch_isend_irecv(messages: Sequence[P2P], group: Group | None = None) -> list[Work]:
    """Start several messages in one call, so that NCCL cannot deadlock on their order; return one `Work` per message.

    Raises:
        ValueError: as `isend`, for any of the messages; none of them is then started.
    """
    if not messages:
        return []
    functions = {"isend": dist.isend, "irecv": dist.irecv}
    works = [_Message(kind, tensor, peer, tag, group, label, True) for kind, tensor, peer, tag, label in messages]
    carried_by = works[0].carrier
    with ExitStack() as issued:
        for work in works:
            issued.enter_context(work)
        handles: list[Any] = dist.batch_isend_irecv(
            [dist.P2POp(functions[kind], tensor, peer, carried_by, tag) for kind, tensor, peer, tag, _ in messages]
        )
    for position, work in enumerate(works):
        work.handle = handles[min(position, len(handles) - 1)]  # NCCL returns one for the batch, GLOO one per message
        work.under_way()
    return list(works)


class PersistentMessage:
    """A message that is checked once and then started in every step: the same peer, tag, shape and type.

    Elsewhere: MPI's persistent requests, `MPI_Send_init` and `MPI_Start`.

    Args:
        kind: "isend" or "irecv".
        like: a tensor of the shape, type and device of those that will travel.
        peer: global rank at the other end.
        tag: as for `isend`.
        group: as for `isend`.
        label: as for `isend`.

    Raises:
        ValueError: as `isend`.
    """

    def __init__(
        self,
        kind: Literal["isend", "irecv"],
        like: torch.Tensor,
        peer: int,
        tag: int = 0,
        group: Group | None = None,
        label: str = "",
    ) -> None:
        message = _Message(kind, like, peer, tag, group, label, batched=True)
        self._fields, self._dtype = vars(message), like.dtype
        carried_by = message.carrier or dist.group.WORLD
        self._function = carried_by.send if message.sends else carried_by.recv  # what `dist.isend` calls at its end
        self._place = dist.get_group_rank(carried_by, peer)

    def start(self, tensor: torch.Tensor) -> Work:
        """Start to send, or to fill, a contiguous tensor of that shape and type."""
        message = _Message.__new__(_Message)
        vars(message).update(self._fields)
        assert tensor.shape == message.shape
        assert tensor.dtype is self._dtype
        assert tensor.is_contiguous()
        with message:
            if message.on_gloo and not tensor.is_complex():
                message.handle = self._function([tensor], self._place, message.tag)
            else:  # NCCL would connect the two ranks anew outside of a batch
                function = dist.isend if message.sends else dist.irecv
                operation = dist.P2POp(function, tensor, message.peer, message.carrier, message.tag)
                (message.handle,) = dist.batch_isend_irecv([operation])
        return message.under_way()


class _Message(Work):
    """A message to issue; one that could only hang is refused."""

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        group: Group | None,
        label: str = "",
        batched: bool = False,
    ) -> None:
        super().__init__(name, _message_bytes, group, tensor)
        self.sends, self.peer, self.tag, self.label = name.endswith("send"), peer, tag, label
        ranks = self.group
        if not self.on_gloo:
            self._check_nccl(batched)
        if peer is not None and peer not in ranks:
            raise ValueError(f"{name}: rank {peer} is not among the ranks {list(ranks)}")
        if peer == self.context.rank:
            raise ValueError(f"{name}: rank {peer} cannot exchange messages with itself; copy the tensor")
        if tag < 0:
            raise ValueError(f"{name}: a tag is at least 0, got {tag}")

    def _check_nccl(self, batched: bool) -> None:
        """Refuse a message that NCCL cannot match, or on which it may wait for one of the other direction."""
        if self.peer is None:
            raise ValueError(f"{self.name}: NCCL receives from a given rank, got src=None; name the sender")
        if self.tag:
            raise ValueError(
                f"{self.name}: NCCL has no tags and matches messages in the order of the calls, got tag={self.tag} for "
                f"rank {self.peer}; leave the tag out and post receives in the order of the sends"
            )
        for other in () if batched else self.context.in_flight.values():
            opposite = (self.peer, self.group_name, not self.sends)
            if isinstance(other, Work) and (other.peer, other.group_name, other.sends) == opposite:
                raise ValueError(
                    f"{self.name} with rank {self.peer}: NCCL runs the messages of two ranks in the order of the "
                    f"calls, and {other.describe()} is not waited for; start both in one batch_isend_irecv, or wait "
                    "first"
                )


def _message_bytes(message: Work) -> Moved:
    size = message.tensor_bytes
    return Moved(Traffic(size, 0, 1) if message.sends else Traffic(0, size, 1))
