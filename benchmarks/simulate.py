"""How fast pipelines are built, validated, lowered and simulated, beside torch's construction and dry run.

    python benchmarks/simulate.py            all sizes (some minutes: torch's construction is quadratic in microbatches)
    python benchmarks/simulate.py --quick    under a minute

What is compared with what: both sides make a 1F1B order with one stage per rank and the same 2 * ranks * microbatches
compute actions.  Torch's is ScheduleInterleaved1F1B, because the order of its Schedule1F1B is wrong on the last rank.
  construction   lab: build + validate + lower           torch: the constructor (order, checks, sends and receives)
  run            lab: simulate to a Timeline with costs   torch: _simulate_comms_compute, one slot per action: no costs,
                 of work and links, messages, memory      no memory, but it moves sends and receives as actions too
The torch stages are stand-ins without a model or process group; its passes for sharded parameters run as always.
Rounds alternate between both sides.  Times are CPU seconds of one thread (so that a busy machine disturbs little):
medians, with the smallest and the largest.
"""

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dualpipe_lab.pp import lower, simulate, validate
from dualpipe_lab.pp.schedules import build

SIZES = [(8, 64), (8, 256), (64, 64)]
LARGE_SIZES = [(64, 256), (8, 1024), (64, 1024)]
LAB_SIZES = [(64, 256), (64, 1024), (128, 1024)]
SIZE = "{:>5} x {:<6}"


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Run a function once; return its CPU seconds and its value."""
    gc.collect()
    start = time.process_time()
    value = function()
    return time.process_time() - start, value


def lab(name: str, num_ranks: int, num_microbatches: int, lowered: bool = False) -> dict[str, float]:
    """Seconds of each of our passes, on a fresh program."""
    seconds = {}
    seconds["build"], program = timed(lambda: build(name, num_ranks, num_microbatches))
    seconds["validate"], _ = timed(lambda: validate(program))
    seconds["simulate"], timeline = timed(lambda: simulate(program))
    assert timeline.makespan == 3 * (num_microbatches + num_ranks - 1)
    del timeline
    if lowered:
        seconds["lower"], _ = timed(lambda: lower(program))
    return seconds


def torch_side(num_ranks: int, num_microbatches: int) -> dict[str, float]:
    """Seconds of torch's constructor and dry run."""
    from torch.distributed.pipelining import schedules

    stage = SimpleNamespace(num_stages=num_ranks, group_size=num_ranks, group_rank=0, stage_index=0)
    stage.is_first, stage.is_last = True, num_ranks == 1
    seconds = {}
    seconds["construct"], schedule = timed(
        lambda: schedules.ScheduleInterleaved1F1B([stage], num_microbatches, loss_fn=lambda *_: None)
    )
    # The dry run refuses the actions for sharded parameters, which do nothing here.
    kinds = {getattr(schedules, kind) for kind in ("F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B")}
    actions = {
        rank: [action for action in row if action.computation_type in kinds]
        for rank, row in schedule.pipeline_order_with_comms.items()
    }
    seconds["dry run"], _ = timed(
        lambda: schedules._simulate_comms_compute(actions, lambda stage: stage % num_ranks, num_ranks)
    )
    return seconds


def spread(rounds: list[dict[str, float]], *keys: str) -> tuple[float, str]:
    """Median of the sum of some passes, and its text with the smallest and the largest."""
    sums = [sum(times[key] for key in keys) for times in rounds]
    median = statistics.median(sums)
    return median, f"{median:.3f} ({min(sums):.3f}-{max(sums):.3f})"


def beside_torch(sizes: list[tuple[int, int]], num_rounds: int) -> None:
    """Print the table that compares both sides."""
    titles = ("construction: lab", "torch", "run: lab", "torch")
    print(
        f"\n{'ranks x microb.':<15}"
        + "".join(f"{title:>24}{'ratio' * (i % 2):>{8 * (i % 2)}}" for i, title in enumerate(titles))
    )
    for size in sizes:
        ours, theirs = [], []
        for _ in range(num_rounds):
            ours.append(lab("1f1b", *size, lowered=True))
            theirs.append(torch_side(*size))
        made, made_text = spread(ours, "build", "validate", "lower")
        constructed, constructed_text = spread(theirs, "construct")
        ran, ran_text = spread(ours, "simulate")
        dry, dry_text = spread(theirs, "dry run")
        cells = f"{made_text:>24}{constructed_text:>24}{constructed / made:>7.1f}x"
        print(f"{SIZE.format(*size):<15}{cells}{ran_text:>24}{dry_text:>24}{dry / ran:>7.1f}x", flush=True)


def alone(num_rounds: int) -> None:
    """Print our passes by themselves, and how they grow."""
    print(
        f"\n{'':<8}{'ranks x microb.':<15}{'actions':>9}"
        + "".join(f"{key:>23}" for key in ("build", "validate", "simulate", "sum"))
    )
    for name in ("gpipe", "1f1b"):
        results = {size: [] for size in LAB_SIZES}
        for _ in range(num_rounds):
            for size in LAB_SIZES:
                results[size].append(lab(name, *size))
        sums = {}
        for size, rounds in results.items():
            texts = [spread(rounds, key)[1] for key in ("build", "validate", "simulate")]
            sums[size], text = spread(rounds, "build", "validate", "simulate")
            cells = "".join(f"{cell:>23}" for cell in (*texts, text))
            print(f"{name:<8}{SIZE.format(*size):<15}{2 * size[0] * size[1]:>9}{cells}", flush=True)
        growth, total = sums[128, 1024] / sums[64, 1024], sums[64, 1024]
        print(
            f"{name}: 64 x 1024 takes {total:.2f} s (target: under 2 s); twice the ranks take {growth:.2f} times that"
        )


def main() -> None:
    """Run both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and torch's sizes that take seconds")
    quick = parser.parse_args().quick
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    alone(num_rounds=3 if quick else 7)
    beside_torch(SIZES if quick else SIZES + LARGE_SIZES, num_rounds=3 if quick else 5)


if __name__ == "__main__":
    main()
