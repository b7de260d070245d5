"""Bytes on the wire beside derived ones: every collective on 2, 3, 4 and 8 ranks, in multiples of the tensor.

    python benchmarks/wire.py

One number where all ranks send equally much, else one per rank.  A difference of more than 0.01 is marked.
"""

import torch

import dualpipe_lab as lab
from dualpipe_lab import comm

NUM_RANKS = (2, 3, 4, 8)
NUMEL = 24 * 2**15  # of float32, 3 MiB: all the numbers of ranks divide it


def every_collective(rank: int, world_size: int) -> None:
    """Call each of them once; roots are rank 0."""
    x, part = torch.ones(NUMEL), NUMEL // world_size
    full, piece = torch.empty(NUMEL), torch.empty(part)
    comm.all_reduce(x.clone())
    comm.reduce_scatter_single(piece, x)
    comm.all_gather_single(full, x[:part])
    comm.all_gather(list(full.split(part)), x[:part])
    comm.all_to_all_single(full, x)
    comm.broadcast(x, 0)
    comm.reduce(x.clone(), 0)
    comm.gather(x[:part], list(full.split(part)) if rank == 0 else None, 0)
    comm.scatter(piece, list(x.split(part)) if rank == 0 else None, 0)
    receiving = comm.irecv(full, (rank - 1) % world_size)
    comm.isend(x, (rank + 1) % world_size).wait()
    receiving.wait()


def short(values: list[float | None]) -> str:
    """`0.75`, or `2.00 1.00 0.00 0.00` where ranks differ; `-` where nothing was counted."""
    texts = ["-" if value is None else f"{value:.2f}" for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def main() -> None:
    """Print a table for each number of ranks."""
    for num_ranks in NUM_RANKS:
        ledger = lab.launch(every_collective, num_ranks, wire=True, timeout=120).ledger
        print(f"{num_ranks} ranks               {'derived':40}  on the wire")
        for name in (name for name in ledger.ranks[0].entries if name != "irecv"):
            derived = [ledger.derived(name, rank) for rank in range(num_ranks)]
            wire = [ledger.on_the_wire(name, rank) for rank in range(num_ranks)]
            pairs = [pair for pair in zip(derived, wire, strict=True) if None not in pair]
            differs = any(abs(one - other) > 0.011 for one, other in pairs)  # type: ignore[operator]
            print(f"{name:21}  {short(derived):40}  {short(wire)}{'  differs' if differs else ''}")
        print()


if __name__ == "__main__":
    main()
