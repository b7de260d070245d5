"""Ring all-reduce by hand: chunks are summed while they travel once round the ring, then the sums travel round.

Chapter: book/cp/ring-all-reduce.  In: a tensor per rank, a group of N ranks.  Out: the sum, on every rank.
  bytes sent   2 (N - 1) / N * S      each chunk of S / N bytes passes N - 1 links twice; ranks that add need no fewer
  messages     2 (N - 1)              one after the other: latency grows with N, bytes do not
  memory       S + one chunk
Every chunk is summed along the ring from the rank behind its owner, in an order of its own: the sum of N >= 3 floats
is that order's, and need not be bitwise that of another all-reduce.  It is the same on every rank.
Elsewhere: `torch.distributed.all_reduce` (GLOO turns its ring the other way); NCCL's ring; Horovod.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.comm.work import check_contiguous
from dualpipe_lab.cp.ring import Ring
from dualpipe_lab.cp.step_log import StepLog
from dualpipe_lab.viz.steplog import Cell
from dualpipe_lab.world.record.traffic import split


def ring_all_reduce(tensor: Tensor, group: Group | None = None, log: StepLog | None = None) -> None:
    """Replace `tensor` on every rank by its sum over the ranks.

    Args:
        tensor: of the same size on every rank; any size, also smaller than the number of ranks.
        group: the ranks of the ring, in its order.
        log: filled with the chunks after each step.

    Raises:
        ValueError: a tensor that is not contiguous.
    """
    check_contiguous("ring_all_reduce", tensor)
    ring = Ring(group)
    chunks = list(tensor.detach().view(-1).split(split(tensor.numel(), ring.size)))
    if log is not None:
        log.start = _cells(chunks)
    owned = (ring.position + 1) % ring.size  # so that every rank sends its own chunk first
    ring_reduce_scatter(chunks, ring, owned, log)
    ring_all_gather(chunks, ring, owned, log)


def ring_reduce_scatter(chunks: Sequence[Tensor], ring: Ring, owned: int, log: StepLog | None = None) -> None:
    """Make chunk number `owned` the sum over the ranks; the others are left as sums of some of them.

    Args:
        chunks: one contiguous tensor per rank, of the same sizes on every rank.
        ring: this rank's place.
        owned: the chunk that stays here; the next rank owns the next chunk.
        log: filled with the chunks after each step.
    """
    for step in range(ring.size - 1):
        out, into = (owned - 1 - step) % ring.size, (owned - 2 - step) % ring.size
        arriving = torch.empty_like(chunks[into])  # what comes is added to the chunk, not put in its place
        chunks[into].add_(ring.turn(chunks[out], arriving, label=f"chunk {out}").wait())
        if log is not None:
            log.add(f"reduce-scatter {step + 1}", ring.behind(-1), [_cell(chunks, out)], _cells(chunks))


def ring_all_gather(chunks: Sequence[Tensor], ring: Ring, owned: int, log: StepLog | None = None) -> None:
    """Fill every chunk with its owner's; arguments as in `ring_reduce_scatter`."""
    for step in range(ring.size - 1):
        out, into = (owned - step) % ring.size, (owned - 1 - step) % ring.size
        ring.turn(chunks[out], chunks[into], label=f"chunk {out}").wait()
        if log is not None:
            log.add(f"all-gather {step + 1}", ring.behind(-1), [_cell(chunks, out)], _cells(chunks))


def _cell(chunks: Sequence[Tensor], index: int) -> Cell:
    """The numbers of a chunk, in the chunk's colour."""
    return ",".join(f"{value:g}" for value in chunks[index].tolist()) or "-", index


def _cells(chunks: Sequence[Tensor]) -> list[Cell]:
    return [_cell(chunks, index) for index in range(len(chunks))]
