"""All-to-all: every rank sends a block of its rows to each rank, synchronously or while other work runs.

Chapters: book/ep/all-to-all, book/ep/async-all-to-all.  In: rows in the order of their destinations.  Out: rows in the
order of their sources: column r of the matrix of counts on rank r.
With even blocks a rank sends (e - 1) / e * S bytes.
`dispatch` and `combine` are one exchange in its two directions; each is the backward of the other.
Every backward is an exchange of all ranks.  So the rows need a gradient on all ranks or on none, and every rank's loss
has to depend on the rows that it received: a rank that does not reach the backward keeps the others waiting.
Elsewhere: torch `all_to_all_single`, `_functional_collectives.all_to_all_single_autograd`; Megatron `_AllToAll`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import Group


class Splits(NamedTuple):
    """The number of rows that this rank sends to each rank of the group, and the number that it receives from each.

    >>> splits = Splits(sends=(2, 0, 1), receives=(1, 4, 1))
    >>> splits.transposed
    Splits(sends=(1, 4, 1), receives=(2, 0, 1))
    >>> splits.num_received
    6
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @property
    def transposed(self) -> "Splits":
        """The splits of the exchange in the opposite direction: sends and receives are swapped."""
        return Splits(self.receives, self.sends)

    @property
    def num_received(self) -> int:
        """The number of rows that this rank receives, including those from itself."""
        return sum(self.receives)


def exchange_counts(counts: Tensor, group: Group | None = None) -> Tensor:
    """Exchange counts before the rows: on rank r, row j of the result is row r of rank j's `counts`.

    A rank cannot know what the others send.  Counts travel where they are, 8 bytes each: from a GPU by NCCL, and the
    host waits for them once, to size its buffers.

    Args:
        counts: `counts_NC` of whole numbers, on any device; N: ranks of the group, C: numbers for each of them, such as
            experts.
        group: the ranks (default: the world); all of them call this, also those that send nothing.
    """
    received = torch.empty_like(counts, memory_format=torch.contiguous_format)
    comm.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def exchange_splits(sends: Sequence[int], group: Group | None = None) -> Splits:
    """Return the splits of an exchange in which this rank sends `sends[j]` rows to rank j of the group.

    The numbers are known to the host and read by it, so they travel between CPUs, on GLOO, with any backend.

    Raises:
        ValueError: not one number from 0 for each rank.
    """
    size = comm.get_world_size(group)
    if len(sends) != size or min(sends) < 0:
        raise ValueError(f"an all-to-all needs one number of rows from 0 for each of {size} ranks, got {list(sends)}")
    receives = exchange_counts(torch.tensor([[rows] for rows in sends], dtype=torch.int64, device="cpu"), group)
    return Splits(tuple(int(rows) for rows in sends), tuple(receives.flatten().tolist()))


def all_to_all_rows_async(x: Tensor, splits: Splits, group: Group | None = None) -> Pending[Tensor]:
    """Launch an exchange of rows without autograd; `.wait()` returns the received rows.

    Args:
        x: `x_R...`; R: rows in the order of their destinations; strided slices are copied.  It must not change before
            the wait.
        splits: rows to and from each rank.
        group: the ranks; all of them call this, in the same order as their other collectives, also without rows.

    Raises:
        ValueError: the splits do not sum to the rows of `x`, or are not one per rank.
    """
    sent = x.detach().contiguous()
    received = sent.new_empty(splits.num_received, *sent.shape[1:])
    work = comm.all_to_all_single(received, sent, splits.receives, splits.sends, group, async_op=True)
    return Pending([work], partial(_first, received, sent))  # the rows to send must live until the wait


def _first(received: Tensor, sent: Tensor) -> Tensor:
    return received


def dispatch(x: Tensor, splits: Splits, group: Group | None = None) -> Tensor:
    """Send rows to the ranks of their experts; returns the received rows by source.  The backward is `combine`."""
    out: Tensor = _AllToAll.apply(x, splits, group)
    return out


def combine(y: Tensor, splits: Splits, group: Group | None = None) -> Tensor:
    """Send rows back along the `splits` by which they were dispatched.  The backward is `dispatch`."""
    return dispatch(y, splits.transposed, group)


class _AllToAll(torch.autograd.Function):
    """Forward: all-to-all.  Backward: all-to-all with sends and receives swapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Splits, group: Group | None) -> Tensor:
        ctx.splits, ctx.group = splits, group
        return all_to_all_rows_async(x, splits, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all_rows_async(grad, ctx.splits.transposed, ctx.group).wait(), None, None


def dispatch_async(x: Tensor, splits: Splits, group: Group | None = None) -> Pending[Tensor]:
    """Launch `dispatch`; `.wait()` returns the received rows, with their gradient."""
    return _with_gradient(x, all_to_all_rows_async(x, splits, group), splits.transposed, group)


def combine_async(y: Tensor, splits: Splits, group: Group | None = None) -> Pending[Tensor]:
    """Launch `combine`; `.wait()` returns the received rows, with their gradient."""
    return _with_gradient(y, all_to_all_rows_async(y, splits.transposed, group), splits, group)


def _with_gradient(x: Tensor, rows: Pending[Tensor], back: Splits, group: Group | None) -> Pending[Tensor]:
    """Tie the exchange that sends `x` and receives `rows` into autograd's graph; gradients return along `back`.

    The backward runs in the opposite order: that of the wait launches the exchange of the gradient, that of the start
    completes it.  So what is computed between the two in the forward overlaps with communication in the backward, too.
    """
    grads: list[Pending[Tensor]] = []  # from the backward of _AllToAllWait to that of _AllToAllStart
    token = _AllToAllStart.apply(x, grads)
    return Pending([], partial(_AllToAllWait.apply, token, rows, grads, back, group))


class _AllToAllStart(torch.autograd.Function):
    """The point in autograd's graph where an exchange was launched.  Backward: complete that of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grads: list[Pending[Tensor]]) -> Tensor:
        ctx.grads = grads
        return x.new_empty(0)  # a token: it ties the two points together

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return ctx.grads.pop().wait(), None


class _AllToAllWait(torch.autograd.Function):
    """Forward: complete an exchange.  Backward: launch that of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, rows: Pending[Tensor], grads: list[Pending[Tensor]], back: Splits, group: Group | None
    ) -> Tensor:
        ctx.grads, ctx.back, ctx.group = grads, back, group
        return rows.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.grads.append(all_to_all_rows_async(grad, ctx.back, ctx.group))
        return grad.new_empty(0), None, None, None, None
