"""Every collective once, and a message round the ring: what the tests of the wire send."""

import torch

from dualpipe_lab import comm


def every_collective(rank, world_size, numel):
    """In a rank: each operation on a tensor of `numel` numbers, which the ranks divide."""
    x, part = torch.ones(numel), numel // world_size
    whole, piece = torch.empty(numel), torch.empty(part)
    comm.all_reduce(x.clone())
    comm.reduce(x.clone(), world_size - 1)
    comm.broadcast(x, 1)
    comm.all_gather_single(whole, x[:part])
    comm.all_gather(list(whole.split(part)), x[:part])
    comm.reduce_scatter_single(piece, x)
    comm.all_to_all_single(whole, x)
    comm.gather(x[:part], list(whole.split(part)) if rank == 0 else None, 0)
    comm.scatter(piece, list(x.split(part)) if rank == 0 else None, 0)
    receiving = comm.irecv(whole, (rank - 1) % world_size)
    comm.isend(x, (rank + 1) % world_size).wait()
    receiving.wait()
    comm.barrier()
