"""Collectives and peer messages, thin over `torch.distributed`: counted, traced, timed and explained when they hang.

Chapter: book/start/ranks-and-messages.  In: contiguous tensors of this rank.  Out: the same tensors, filled.
Every function takes and means what its namesake in `torch.distributed` does, under torch's newest names.  A call
returns a `Work` when `async_op=True` (and always for `isend`, `irecv`); otherwise it returns when it is done.
"""

from dualpipe_lab.world.comm.collectives import (
    all_gather,
    all_gather_single,
    all_reduce,
    barrier,
    broadcast,
    reduce,
)
from dualpipe_lab.world.comm.exchange import all_gather_object, all_to_all, all_to_all_single, gather, scatter
from dualpipe_lab.world.comm.groups import get_rank, get_world_size, new_group
from dualpipe_lab.world.comm.peers import P2P, batch_isend_irecv, irecv, isend, recv, send
from dualpipe_lab.world.comm.scatter_sum import reduce_scatter, reduce_scatter_single
from dualpipe_lab.world.comm.work import Work

__all__ = [
    "P2P",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "get_rank",
    "get_world_size",
    "irecv",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "send",
]
