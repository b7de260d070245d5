"""`Ring`: a rank's two neighbours in its group, and the turn of the ring that every algorithm of this part takes.

Chapter: book/cp/ring-all-reduce.  In: a group of N ranks.  Out: messages to the next rank and from the one before.
  one turn    every rank sends one block and receives one; all links are busy, each in one direction
Both messages of a turn are started before either is waited for: ranks that all send first would wait for one another.
Elsewhere: torch `_AllToAllRotater`; picotron `ContextCommunicate`.
"""

from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.comm.work import Work
from dualpipe_lab.world.context import rank_context


class Turn:
    """A block on its way to the next rank, and one that comes from the rank before."""

    def __init__(self, works: list[Work], arriving: Tensor) -> None:
        self._works, self._arriving = works, arriving

    def wait(self) -> Tensor:
        """Return the block that came; the one that was sent may be changed again."""
        for work in self._works:
            work.wait()
        return self._arriving


class Ring:
    """This rank's place on the ring of a group's ranks, in group order.

    Attributes:
        size: number of ranks on the ring.
        position: this rank's number in the group.
        next_rank, prev_rank: the global ranks of its neighbours.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group, ranks = group, members(group)
        self.size, self.position = len(ranks), ranks.index(rank_context().rank)
        self.next_rank, self.prev_rank = ranks[(self.position + 1) % self.size], ranks[self.position - 1]

    def behind(self, hops: int) -> int:
        """Position of the rank so many hops back: what it sent off first is here after as many turns."""
        return (self.position - hops) % self.size

    def turn(self, leaving: Tensor, arriving: Tensor, tag: int = 0, label: str = "") -> Turn:
        """Start one turn; `arriving` is filled and `leaving` must not change before its `wait` returns.

        An empty block does not travel: both sides know its size.

        Raises:
            ValueError: a ring of one rank, which has no neighbours, or a tensor that is not contiguous.
        """
        messages = []
        if arriving.numel():
            messages.append(comm.P2P("irecv", arriving, self.prev_rank, tag))
        if leaving.numel():
            messages.append(comm.P2P("isend", leaving, self.next_rank, tag, label))
        return Turn(comm.batch_isend_irecv(messages, self.group), arriving)


def room(shape: tuple[int, ...], spare: Tensor) -> Tensor:
    """A buffer for a block that comes: one whose block has left, if it fits; two of them are enough for a ring."""
    return spare if spare.shape == shape else spare.new_empty(shape)
