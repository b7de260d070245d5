"""All-to-all: rows of unequal numbers, started first and waited for later."""

from typing import Any

import torch
from torch import Tensor

from dualpipe_lab.comm import Work, get_rank, irecv, isend

FORWARD, BACKWARD = 1, 2  # tags


def start_exchange(
    x: Tensor, sends: list[int], receives: list[int], ranks: list[int], tag: int
) -> tuple[Tensor, list[Work]]:
    """Send `sends[n]` rows to each rank; return room for `receives[n]` rows of each, and what is under way."""
    out = x.new_empty(sum(receives), *x.shape[1:])
    works = []
    for peer, part, room in zip(ranks, x.contiguous().split(sends), out.split(receives), strict=True):
        if peer == get_rank():
            room.copy_(part)
            continue
        if part.numel():  # an empty message is not sent
            works.append(isend(part, peer, tag))
        if room.numel():  # posted now: two exchanges at once may be waited for in any order
            works.append(irecv(room, peer, tag))
    return out, works


class Exchange(torch.autograd.Function):
    """The exchange; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], receives: list[int], ranks: list[int]) -> Tensor:
        """Rows by receiver -> rows by sender."""
        ctx.sizes = sends, receives, ranks
        return _waited(*start_exchange(x, sends, receives, ranks, FORWARD))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        """Rows by sender -> rows by receiver."""
        sends, receives, ranks = ctx.sizes
        return _waited(*start_exchange(dy, receives, sends, ranks, BACKWARD)), None, None, None


def _waited(out: Tensor, works: list[Work]) -> Tensor:
    for work in works:
        work.wait()
    return out
