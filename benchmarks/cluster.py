"""The cost of the watchdog under torchrun: steps with and without it in turns, and what its threads use.

    python benchmarks/cluster.py [ranks] [rounds]

A step is a forward, a backward and an all-reduce of the gradients.  The last table is the one request in which the
observer reads the beats of all ranks, with made-up ones: it takes one every 0.7 s.
"""

import os
import statistics
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _paired import in_turns, spread

from dualpipe_lab import comm
from dualpipe_lab.world import context
from dualpipe_lab.world.cluster import join, watchdog
from dualpipe_lab.world.cluster.environment import cluster
from dualpipe_lab.world.cluster.status_store import Beat, StatusStore
from dualpipe_lab.world.emulate.clock import WallClock

WIDTH, ROWS, BLOCK_SECONDS = 512, 64, 4.0
WORLDS = (4, 64, 1_024)
MODES = ("with", "without")


def take_step(model: torch.nn.Module, x: torch.Tensor) -> None:
    """One step of data parallelism, without an optimizer."""
    model.zero_grad()
    model(x).square().mean().backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)


def watchdog_seconds() -> float:
    """Processor time of the watchdog's threads so far."""
    threads = [thread for thread in threading.enumerate() if thread.name == "dualpipe-lab-watchdog"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def block(
    mode: str, environment: Any, steps: int, model: torch.nn.Module, x: torch.Tensor
) -> tuple[float, float, float]:
    """Seconds per step on the wall and of this process's CPU, and the watchdog's CPU per step."""
    watching = watchdog.watching(join.store(), environment, 600.0) if mode == "with" else nullcontext()
    with watching as watch:
        log = watch.log if watch else None
        context.install(context.RankContext(environment.rank, environment.world_size, WallClock(0), log=log))
        comm.barrier()
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            take_step(model, x)
        took = time.perf_counter() - began, time.process_time() - worked, watchdog_seconds()
        context.install(None)
    return took[0] / steps, took[1] / steps, took[2] / steps


def measure(rounds: int) -> None:
    """What one rank does; rank 0 prints the medians."""
    torch.set_num_threads(1)
    environment = cluster()
    assert environment is not None
    join.join(environment, "gloo", check=False, timeout=600.0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    x = torch.randn(ROWS, WIDTH)
    steps = torch.tensor(BLOCK_SECONDS / block("without", environment, 50, model, x)[0])
    dist.broadcast(steps, 0)
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in in_turns(MODES, number):
            found[mode].append(block(mode, environment, int(steps), model, x))
    shares = [threads / wall for wall, _, threads in found["with"]]
    everyone = comm.all_gather_object(statistics.median(shares))
    if environment.rank == 0:
        for column, name in enumerate(("wall", "CPU")):
            pair = [[row[column] for row in found[mode]] for mode in MODES]
            ratios = [one / two for one, two in zip(*pair, strict=True)]
            medians = [1e3 * statistics.median(values) for values in pair]
            print(f"{name}: {medians[0]:.2f} ms per step with, {medians[1]:.2f} without, ratio {spread(ratios)}")
        print(f"CPU of the watchdog's threads in a step: {'  '.join(f'{share:.3%}' for share in everyone)} (by rank)")
    join.leave()


def read_beats() -> None:
    """Print the time of the observer's request for worlds of several sizes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for world_size in WORLDS:
        for rank in range(world_size):
            StatusStore(store, rank, world_size, 1).beat(Beat(7))
        observer, times = StatusStore(store, 0, world_size, 1), []
        for _ in range(20):
            began = time.perf_counter()
            observer.beats(range(world_size))
            times.append(time.perf_counter() - began)
        print(f"{world_size:5} ranks: {1e3 * statistics.median(times):.2f} ms per request of the observer")


def main() -> None:
    """Start the ranks, then read made-up beats."""
    ranks, rounds = (int(text) for text in (*sys.argv[1:], *("4", "15")[len(sys.argv) - 1 :]))
    if cluster() is not None:
        measure(rounds)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    folder = str(Path(__file__).parent)
    subprocess.run([*command, __file__, str(ranks), str(rounds)], check=True, env=os.environ | {"PYTHONPATH": folder})
    read_beats()


if __name__ == "__main__":
    main()
