"""`Ring`, a rank's two neighbours in its group, and the all-reduce by hand that is made of exchanges with them.

Chapter: book/cp/ring-all-reduce.  In: a tensor per rank, a group of N ranks.  Out: the sum, on every rank.
In one exchange every rank sends one block and receives one: all links are busy, each in one direction.
Elsewhere: `torch.distributed.all_reduce` (GLOO's ring goes the opposite way); NCCL's ring; Horovod; for the exchange
ring-flash-attention `RingComm.send_recv`, torch `_AllToAllRotater`, picotron `ContextCommunicate`.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.call import check_tensors
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.launch.record.traffic import split


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
        # In one batch: if all ranks completed their send first, none would receive.  All ranks launch exchanges in one
        # order, also where two are in flight, so that these need no tags, which NCCL does not have.
        return comm.Pending(comm.batch_isend_irecv(messages, self.group), lambda: recv)


def recv_buffer(shape: tuple[int, ...], sent: Tensor) -> Tensor:
    """Return memory for the next block: that of a block already sent, if it has this shape, else a new tensor.

    A ring therefore needs two buffers, one to send from and one to receive into.
    """
    return sent if sent.shape == shape else sent.new_empty(shape)


def ring_all_reduce(tensor: Tensor, group: Group | None = None) -> None:
    """Replace `tensor` on every rank by its sum over the ranks.

    Chunks of S / N bytes are summed while they travel once round the ring, then the sums travel round.  A rank sends
    2 (N - 1) / N * S bytes, and no algorithm sends less, in 2 (N - 1) messages one after the other.  The order of
    addition differs from chunk to chunk, since each sum starts one rank downstream of the rank that keeps it.  All
    ranks hold the same bits, for N >= 3 not always those of another all-reduce.

    Args:
        tensor: of the same size on every rank; any size, also smaller than the number of ranks.
        group: the ranks of the ring, in its order.

    Raises:
        ValueError: a tensor that is not contiguous.
    """
    check_tensors("ring_all_reduce", group, tensor)
    ring = Ring(group)
    chunks = list(tensor.detach().view(-1).split(split(tensor.numel(), ring.size)))
    local = (ring.position + 1) % ring.size  # so that chunk r is the first that rank r sends
    ring_reduce_scatter(chunks, ring, local)
    ring_all_gather(chunks, ring, local)


def ring_reduce_scatter(chunks: Sequence[Tensor], ring: Ring, local: int) -> None:
    """Replace `chunks[local]` by its sum over the ranks; the other chunks are left as partial sums.

    Args:
        chunks: one contiguous tensor per rank, of the same sizes on every rank.
        ring: this rank's ring.
        local: the chunk whose sum this rank keeps; the next rank keeps the next chunk.
    """
    for step in range(ring.size - 1):
        sent, received = (local - 1 - step) % ring.size, (local - 2 - step) % ring.size
        arrived = ring.send_recv(chunks[sent], torch.empty_like(chunks[received]), label=f"chunk {sent}").wait()
        chunks[received].add_(arrived)


def ring_all_gather(chunks: Sequence[Tensor], ring: Ring, local: int) -> None:
    """Copy `chunks[local]` of every rank to all other ranks; arguments as in `ring_reduce_scatter`."""
    for step in range(ring.size - 1):
        sent, received = (local - step) % ring.size, (local - 1 - step) % ring.size
        ring.send_recv(chunks[sent], chunks[received], label=f"chunk {sent}").wait()
