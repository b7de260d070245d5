"""Ring all-reduce by hand: chunks are summed while they travel once round the ring, then the sums travel round.

Chapter: book/cp/ring-all-reduce.  In: a tensor per rank, a group of N ranks.  Out: the sum, on every rank.
  bytes sent   2 (N - 1) / N * S      each chunk of S / N bytes is sent 2 (N - 1) times; no algorithm sends less
  messages     2 (N - 1)              one after the other: latency grows with N, bytes do not
  memory       S + one chunk
Each chunk is summed along the ring, starting one rank downstream of the rank that keeps the sum.  The order of addition
therefore differs from chunk to chunk.  For N >= 3 floats the sum need not be bitwise that of another all-reduce.  All
ranks hold the same bits.
Elsewhere: `torch.distributed.all_reduce` (GLOO's ring goes the opposite way); NCCL's ring; Horovod.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpipe_lab.comm.call import check_tensors
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.cp.ring import Ring
from dualpipe_lab.launch.record.traffic import split


def ring_all_reduce(tensor: Tensor, group: Group | None = None) -> None:
    """Replace `tensor` on every rank by its sum over the ranks.

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
