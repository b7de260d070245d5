"""Collectives on any dimension of a tensor, returning new tensors: what the backwards of this part are written with.

Chapter: book/tp/column-parallel.  In: a tensor of this rank.  Out: a new one, now or after `wait`.
  start_sum             all-reduce                            2 (t - 1) / t * S bytes sent per rank
  start_gather          all-gather along a dimension              (t - 1) / t * S
  start_reduce_scatter  sum, of which each rank keeps its part    (t - 1) / t * S
with S the bytes of the whole tensor.  Collectives concatenate along the first dimension, and a batch comes first, so
another dimension costs a copy; with one sequence per batch it costs none.
"""

from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm import Work
from dualpipe_lab.comm.groups import Group


class Pending:
    """A tensor that is on its way."""

    def __init__(self, work: Work | None, tensor: Tensor, dim: int | None = None) -> None:
        self._work, self._tensor, self._dim = work, tensor, dim

    def wait(self) -> Tensor:
        """The tensor, when it is there."""
        if self._work is not None:
            self._work.wait()
        return self._tensor if self._dim is None else self._tensor.movedim(0, self._dim).flatten(*self._joined())

    def _joined(self) -> tuple[int, int]:
        assert self._dim is not None
        return self._dim, self._dim + 1


def start_sum(own: Tensor, group: Group | None) -> Pending:
    """Begin to sum a tensor over the ranks, in place: it must be the caller's own, and nobody else's."""
    own = own.contiguous()
    return Pending(comm.all_reduce(own, group=group, async_op=True), own)


def start_gather(x: Tensor, dim: int, group: Group | None) -> Pending:
    """Begin to join the ranks' tensors, all of one shape, along a dimension."""
    x = x.contiguous()
    parts = x.new_empty(comm.get_world_size(group), *x.shape)
    work = comm.all_gather_single(parts.flatten(0, 1), x, group, async_op=True)
    return Pending(work, parts, dim % x.dim())


def start_reduce_scatter(x: Tensor, dim: int, group: Group | None) -> Pending:
    """Begin to sum a tensor over the ranks, each of which keeps its part along a dimension.

    Raises:
        ValueError: the dimension does not divide among the ranks.
    """
    size = comm.get_world_size(group)
    check_divides(x.shape[dim], size, "a reduce-scatter")
    parts = x.unflatten(dim, (size, -1)).movedim(dim % x.dim(), 0).contiguous()
    own = parts.new_empty(parts.shape[1:])
    return Pending(comm.reduce_scatter_single(own, parts.flatten(0, 1), group=group, async_op=True), own)


def own_slice(x: Tensor, dim: int, group: Group | None) -> Tensor:
    """This rank's part of a tensor that every rank has; no message.

    Raises:
        ValueError: the dimension does not divide among the ranks.
    """
    size = comm.get_world_size(group)
    check_divides(x.shape[dim], size, "a slice")
    return x.chunk(size, dim)[comm.get_rank(group)]


def check_divides(length: int, num_ranks: int, what: str) -> None:
    """Refuse a dimension that does not divide, before any message is sent.

    Raises:
        ValueError: naming the length and the ranks.
    """
    if length % num_ranks:
        raise ValueError(
            f"{what} needs a dimension that divides among the ranks, got {length} on {num_ranks} ranks; "
            f"pad it to {-(-length // num_ranks) * num_ranks}"
        )
