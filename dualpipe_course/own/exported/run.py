"""One of the four runs on 4 processes: torchrun --nproc-per-node=4 run.py together

Each is compared with a training of one process in plain torch: losses, raw gradients of the first step, weights.
"""

import sys
from time import perf_counter

import torch.distributed as dist
from trainings import CASES, Found, difference


def main(name, num_steps):
    dist.init_process_group("gloo")
    rank, worst = dist.get_rank(), 0.0
    for case in CASES[name](num_steps):
        if rank < case.num_ranks:
            start = perf_counter()
            ours = Found(*case.run(rank, *case.args), frozenset())
            seconds = perf_counter() - start
            off, words = difference(case, rank, ours, Found(*case.reference(), frozenset()))
            if words:
                sys.exit(f"{name}, {case.words}: rank {rank}: {words}")
            worst = max(worst, off)
            if rank == 0:
                print(f"{name}, {case.words}: rank 0 worked {seconds:.2f} s")
        dist.barrier()
    print(f"{name}: rank {rank} is equal to one process, the largest difference is {worst:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
