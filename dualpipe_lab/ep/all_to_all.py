"""All-to-all: every rank sends each other rank a block of rows of its own, now or while other work runs.

Chapters: book/ep/all-to-all, book/ep/async-all-to-all.  In: rows in the order of their destinations.  Out: rows in the
order of their sources.
  output        the blocks addressed to this rank, source 0 first: as many rows as column r of the matrix of counts has
  backward      the same exchange with sends and receives swapped: it puts every row's gradient where the row came from
  bytes sent    sum over the others of rows * bytes per row; with even blocks (e - 1) / e * S
  counts        8 bytes per number to each other rank, before the rows: nobody knows what the others send
`dispatch` and `combine` are one exchange in its two directions, each the backward of the other.
Every backward is an exchange of all ranks: rows need a gradient on all of them or on none, and a rank whose result has
no part in its loss makes the others wait.
The asynchronous form has an issue and a wait in both directions.  `start_dispatch(x, splits)` issues; `.wait()` gives
the rows.  The backward of `.wait()` issues the exchange of the gradient, the backward of the issue waits for it, and
autograd runs what the forward had between the two, between the two.  `start_rows` is the exchange without autograd.
Elsewhere: torch `all_to_all_single`, `_functional_collectives.all_to_all_single_autograd`; Megatron `_AllToAll`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.comm import Work
from dualpipe_lab.comm.groups import Group


class Splits(NamedTuple):
    """How many rows this rank sends to each rank of the group, and how many come from each.

    >>> Splits((2, 0, 1), (2, 0, 1)).transposed == Splits((2, 0, 1), (2, 0, 1))
    True
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @property
    def transposed(self) -> "Splits":
        """The way back."""
        return Splits(self.receives, self.sends)

    @property
    def num_sent(self) -> int:
        """Rows that this rank hands over, those to itself included."""
        return sum(self.sends)

    @property
    def num_received(self) -> int:
        """Rows that this rank is given, its own included."""
        return sum(self.receives)


def exchange_counts(counts: Tensor, group: Group | None = None) -> Tensor:
    """What the others are about to send: row j of the result is row r of rank j's `counts`.

    Args:
        counts: `counts_NC` of whole numbers; N: ranks of the group, C: numbers for each of them, such as experts.
        group: the ranks (default: the world); all of them call this, also those that send nothing.
    """
    received = torch.empty_like(counts, memory_format=torch.contiguous_format)
    comm.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def agree(sends: Sequence[int], group: Group | None = None) -> Splits:
    """The splits of an exchange in which this rank sends `sends[j]` rows to rank j of the group.

    Raises:
        ValueError: not one number from 0 for each rank.
    """
    size = comm.get_world_size(group)
    if len(sends) != size or min(sends) < 0:
        raise ValueError(f"an all-to-all needs one number of rows from 0 for each of {size} ranks, got {list(sends)}")
    receives = exchange_counts(torch.tensor([[rows] for rows in sends], dtype=torch.int64), group)
    return Splits(tuple(int(rows) for rows in sends), tuple(receives.flatten().tolist()))


class Arriving:
    """Rows that are on their way; `wait` may be called again."""

    def __init__(self, work: Work | None, rows: Tensor, sent: Tensor) -> None:
        self._work, self._rows, self._sent = work, rows, sent  # what is sent must live until it has left

    def wait(self) -> Tensor:
        """The rows, when they are there."""
        if self._work is not None:
            self._work.wait()
        return self._rows


def start_rows(x: Tensor, splits: Splits, group: Group | None = None) -> Arriving:
    """Issue an exchange of rows, outside of autograd; `x` must not change before the wait.

    Args:
        x: `x_R...`; R: rows in the order of their destinations; strided slices are copied.
        splits: how many go to, and come from, each rank.
        group: the ranks; all of them call this, in the same order as their other collectives, also without rows.

    Raises:
        ValueError: the splits do not sum to the rows of `x`, or are not one per rank.
    """
    x = x.detach().contiguous()
    rows = x.new_empty(splits.num_received, *x.shape[1:])
    return Arriving(comm.all_to_all_single(rows, x, splits.receives, splits.sends, group, async_op=True), rows, x)


def dispatch(x: Tensor, splits: Splits, group: Group | None = None) -> Tensor:
    """The rows that the ranks address to this one, in the order of their sources; its backward is `combine`."""
    out: Tensor = Exchange.apply(x, splits, group)
    return out


def combine(y: Tensor, splits: Splits, group: Group | None = None) -> Tensor:
    """Send rows back along the `splits` by which they were dispatched; its backward is `dispatch`."""
    return dispatch(y, splits.transposed, group)


class Exchange(torch.autograd.Function):
    """All-to-all / all-to-all with sends and receives swapped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Splits, group: Group | None) -> Tensor:
        ctx.splits, ctx.group = splits, group
        return start_rows(x, splits, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_rows(grad, ctx.splits.transposed, ctx.group).wait(), None, None


class Issued:
    """An exchange under way, as autograd sees it: made by `start_dispatch` and `start_combine`."""

    def __init__(self, x: Tensor, splits: Splits, group: Group | None) -> None:
        self._travel = _Travel(splits, group)
        self._token: Tensor | None = _Issue.apply(x, self._travel)

    def wait(self) -> Tensor:
        """The rows, when they are there; their gradient's backward starts with the issue of its exchange.

        Raises:
            RuntimeError: the second time.
        """
        if self._token is None:
            raise RuntimeError(
                "an issued exchange is waited for once, or its gradient would travel twice; keep the rows"
            )
        token, self._token = self._token, None
        rows: Tensor = _Wait.apply(token, self._travel)
        return rows


def start_dispatch(x: Tensor, splits: Splits, group: Group | None = None) -> Issued:
    """`dispatch` that returns at once: `.wait()` gives the rows."""
    return Issued(x, splits, group)


def start_combine(y: Tensor, splits: Splits, group: Group | None = None) -> Issued:
    """`combine` that returns at once: `.wait()` gives the rows."""
    return Issued(y, splits.transposed, group)


class _Travel:
    """What the two halves of an issued exchange share."""

    def __init__(self, splits: Splits, group: Group | None) -> None:
        self.splits, self.group = splits, group
        self.arriving: Arriving | None = None

    def start(self, x: Tensor, splits: Splits) -> None:
        self.arriving = start_rows(x, splits, self.group)

    def end(self) -> Tensor:
        assert self.arriving is not None
        arriving, self.arriving = self.arriving, None
        return arriving.wait()


class _Issue(torch.autograd.Function):
    """Forward: issue.  Backward: wait for the gradient that `_Wait` has issued."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        travel.start(x, travel.splits)
        return x.new_empty(0)  # a token: it ties the two halves together in autograd's graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.end(), None


class _Wait(torch.autograd.Function):
    """Forward: wait.  Backward: issue the exchange of the gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, travel: _Travel) -> Tensor:
        ctx.travel = travel
        return travel.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.travel.start(grad, ctx.travel.splits.transposed)
        return grad.new_empty(0), None
