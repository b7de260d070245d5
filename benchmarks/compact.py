"""How fast compact programs are built, validated and simulated, and in how much memory, beside the full simulator.

    python benchmarks/compact.py            up to 1,024 ranks x 4,096 microbatches (about two minutes)
    python benchmarks/compact.py --quick    up to 256 x 1,024

Small: every schedule on 8 ranks with 32 microbatches, as a search over costs runs it: the program is built and
validated once; each simulation has links with latency and transfer.  Medians of alternating rounds, in milliseconds.
Large: every size in a process of its own; MB is its largest resident set, of which a bare process has about 20 (full)
and 33 (compact: numpy).  Both sides state the same makespan; the full simulator runs where its objects fit.
Times are CPU seconds.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from dualpipe_lab.pp import (
    CompactProgram,
    Cost,
    Program,
    compact_build,
    compact_simulate,
    schedules,
    simulate,
    validate,
)

COST = Cost(F=30, I=35, W=25, latency=1, transfer=2)
FRACTIONS = Cost(F=Fraction(10, 3), I=Fraction(7, 2), W=Fraction(5, 7), latency=Fraction(1, 9), transfer=Fraction(2, 9))
LARGE = [("1f1b", 256, 1024), ("zero_bubble_h1", 256, 1024)]
HUGE = [(name, 1024, 4096) for name in ("gpipe", "1f1b", "zero_bubble_h1", "interleaved", "paired_1f1b", "dualpipev")]
MOST_OBJECTS = 2**20  # actions that the full simulator is given


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Run a function once; return its CPU seconds and its value."""
    start = time.process_time()
    value = function()
    return time.process_time() - start, value


def small(num_rounds: int) -> None:
    """Print the milliseconds of one simulation of every schedule on 8 ranks."""
    titles = ("compact", "fractions", "full", "ratio")
    print(f"\n{'8 x 32':<24}{'actions':>9}" + "".join(f"{title:>11}" for title in titles) + "   (ms)")
    for name in schedules.names():
        num_actions, ours, fractions, full = small_row(validate(schedules.build(name, 8, 32)), num_rounds)
        print(f"{name:<24}{num_actions:>9}{ours:>11.3f}{fractions:>11.3f}{full:>11.2f}{full / ours:>10.0f}x")


def small_row(program: Program, num_rounds: int) -> tuple[float, ...]:
    """Return the number of actions, and milliseconds of both simulators; the compact one with fractions too."""
    compact = CompactProgram.of(program)
    runs = [lambda: compact_simulate(compact, COST), lambda: compact_simulate(compact, FRACTIONS)]
    runs.append(lambda: simulate(program, COST))
    assert runs[0]().makespan == runs[2]().makespan
    rounds = [[timed(run)[0] for run in runs] for _ in range(num_rounds)]
    return compact.num_actions, *(1e3 * statistics.median(times) for times in zip(*rounds, strict=True))


def one(side: str, name: str, num_ranks: int, num_microbatches: int) -> dict[str, Any]:
    """Build, validate and simulate one program in this process."""
    build = {"compact": compact_build, "full": schedules.build}[side]
    found: dict[str, Any] = {}
    found["build"], program = timed(lambda: build(name, num_ranks, num_microbatches))
    check = program.check if side == "compact" else lambda: validate(program)
    found["validate"], _ = timed(check)
    run = {"compact": compact_simulate, "full": simulate}[side]
    found["simulate"], result = timed(lambda: run(program, COST))
    found["again"], _ = timed(lambda: run(program, COST))
    found["makespan"] = result.makespan
    found["actions"] = program.num_actions if side == "compact" else 0
    found["MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def apart(side: str, *size: Any) -> dict[str, Any]:
    """Return what `one` finds in a process of its own."""
    command = [sys.executable, __file__, "--one", side, *map(str, size)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def large(sizes: list[tuple[str, int, int]]) -> None:
    """Print seconds and memory of large programs."""
    titles = ("build", "validate", "simulate", "again", "sum", "MB")
    print(f"\n{'':<8}{'':<16}{'ranks x microb.':<17}{'actions':>10}" + "".join(f"{title:>10}" for title in titles))
    for size in sizes:
        ours = apart("compact", *size)
        line("compact", size, ours["actions"], ours)
        if ours["actions"] <= MOST_OBJECTS:
            full = apart("full", *size)
            line("full", size, ours["actions"], full)
            assert full["makespan"] == ours["makespan"]


def line(side: str, size: tuple[str, int, int], num_actions: int, found: dict[str, Any]) -> None:
    """Print one line of the table of large programs."""
    name, num_ranks, num_microbatches = size
    seconds = [found[key] for key in ("build", "validate", "simulate", "again")]
    cells = "".join(f"{second:>10.2f}" for second in (*seconds, sum(seconds[:3])))
    sizes = f"{num_ranks:>6} x {num_microbatches:<6}"
    print(f"{side:<8}{name:<16}{sizes:<17}{num_actions:>10}{cells}{found['MB']:>10.0f}", flush=True)


def main() -> None:
    """Run both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and no huge programs")
    parser.add_argument("--one", nargs=4, metavar=("SIDE", "NAME", "RANKS", "MICROBATCHES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        side, name, *size = arguments.one
        print(json.dumps(one(side, name, *map(int, size))))
        return
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    small(num_rounds=5 if arguments.quick else 21)
    large(LARGE if arguments.quick else LARGE + HUGE)


if __name__ == "__main__":
    main()
