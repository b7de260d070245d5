"""`Ring`: a rank's two neighbours in its group, and the exchange with them that every ring algorithm is made of.

Chapter: book/cp/ring-all-reduce.  In: a group of N ranks.  Out: messages to the next rank and from the previous one.
  one exchange    every rank sends one block and receives one; all links are busy, each in one direction
Both messages are launched in one batch.  If all ranks completed their send first, none would receive.  Exchanges need
no tags, which NCCL does not have, also where two are in flight: all ranks launch them in one order.
Elsewhere: ring-flash-attention `RingComm.send_recv`; torch `_AllToAllRotater`; picotron `ContextCommunicate`.
"""

from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.launch.context import rank_context


class Ring:
    """The ring of a group's ranks, in group order, as seen from this rank.

    Attributes:
        size: number of ranks on the ring.
        position: this rank's number in the group.
        next_rank, prev_rank: the global ranks of its neighbours.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group, ranks = group, members(group)
        self.size, self.position = len(ranks), ranks.index(rank_context().rank)
        self.next_rank, self.prev_rank = ranks[(self.position + 1) % self.size], ranks[self.position - 1]

    def source(self, step: int) -> int:
        """Return the position of the rank whose block this rank holds after `step` exchanges: `step` hops upstream."""
        return (self.position - step) % self.size

    def send_recv(self, send: Tensor, recv: Tensor, label: str = "") -> comm.Pending[Tensor]:
        """Launch the send of `send` to the next rank and the receive of `recv` from the previous one.

        `wait()` returns `recv`, filled.  Before that, `send` must not change.  An empty block is not sent, since both
        ranks know its size.

        Raises:
            ValueError: a ring of one rank, which has no neighbours, or a tensor that is not contiguous.
        """
        messages = []
        if recv.numel():
            messages.append(comm.P2P("irecv", recv, self.prev_rank))
        if send.numel():
            messages.append(comm.P2P("isend", send, self.next_rank, label=label))
        return comm.Pending(comm.batch_isend_irecv(messages, self.group), lambda: recv)


def recv_buffer(shape: tuple[int, ...], sent: Tensor) -> Tensor:
    """Return memory for the next block: that of a block already sent, if it has this shape, else a new tensor.

    A ring therefore needs two buffers, one to send from and one to receive into.
    """
    return sent if sent.shape == shape else sent.new_empty(shape)
