"""What the runtime adds to a schedule, beside torch's runtime on the same program.

    python benchmarks/pp.py [--ranks 2 4 8] [--rounds 7] [--unit-ms 10] [--only 1f1b zbv] [--skip-real]
    python benchmarks/pp.py --ranks --rounds 41 --only 1f1b        real compute alone

  emulated   F, I and W last a unit each (divided among a rank's stages), asleep inside of autograd Functions, so that
             many ranks share few cores; messages, autograd, Python and waiting are real.  A pair takes F + B.
             hop     from the call that sends, on a rank that has worked a unit, to the end of the other's receive
             ratio   measured step / (simulated makespan with the hop and the sleep overshoot measured in the same run)
             added   the same with the overshoot of the actions instead: what the same F and B take, beyond the sleep
                     asked for, on the same ranks without a pipeline (autograd, and waking up inside of it)
  real       steps of an MLP and of transformer blocks on 2 ranks
  calls      Python and C calls of a third step on 2 ranks, as `sys.setprofile` sees them, under a recording launch
Every round runs every contender once, one after the other, every second round from the last to the first.  A step
lasts from the first rank's start to the last rank's end; medians over the rounds.  CPU time is that of all ranks in one
step.  lab/torch is the median of the rounds' ratios with the least and the most.
Torch loads the program as CSV.  It cannot run a stage on two ranks (DualPipe), and does I and W of its first stage
together, where the W stands.  What the split backward costs by itself: benchmarks/pp_split.py.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _paired import in_turns, spread
from _stages import REAL, ROWS, WIDTH, Emulated
from torch import Tensor, nn

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.pp import Program, schedules, to_torch_csv

MICROBATCHES = {2: 8, 4: 8, 8: 16}
SIDES = "lab", "torch"
Step = Callable[[], Any]
Spans = dict[tuple[str, int], list[tuple[float, float]]]  # by contender and program, per round: seconds, CPU seconds
ALONE = 4  # F and B of each stage that calibrate what an action takes


def torch_can(program: Program) -> bool:
    homes = {stage: rank for (stage, _), rank in program.placement.items()}
    return all(homes[stage] == rank for (stage, _), rank in program.placement.items())


def in_lab(program: Program, modules: dict[int, nn.Module], x: Tensor) -> Step:
    runtime = lab.PipelineRuntime(program, modules, nn.functional.mse_loss, x)
    batch = [x] * program.num_microbatches
    return lambda: runtime.step(batch, batch)


def in_torch(program: Program, modules: dict[int, nn.Module], x: Tensor, csv: str) -> Step:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    stages = [PipelineStage(modules[s], s, program.num_stages, torch.device("cpu")) for s in sorted(modules)]
    runtime = _PipelineScheduleRuntime(stages, program.num_microbatches, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(csv, format="compute_only")
    batch = torch.cat([x] * program.num_microbatches)
    args = [batch] if 0 in modules else []
    last = program.num_stages - 1 in modules
    return lambda: runtime.step(*args, **({"target": batch, "losses": []} if last else {}))


def alone(modules: dict[int, nn.Module], x: Tensor) -> Step:
    """F and B of the rank's stages, one after the other, without messages."""
    inputs = {stage: x.clone().requires_grad_(stage > 0) for stage in modules}

    def step() -> None:
        for stage, module in modules.items():
            for _ in range(ALONE):
                module(inputs[stage]).backward(x)

    return step


def hop(rank: int, x: Tensor, unit: float, times: int = 5) -> list[float]:
    """When messages from rank 0, each after a unit of work, were given away there, or had come to rank 1."""
    stamps = []
    for _ in range(times):
        comm.barrier()
        if rank == 0:
            time.sleep(unit)
            stamps.append(time.perf_counter())
            comm.send(x, 1)
        elif rank == 1:
            comm.recv(x, 0)
            stamps.append(time.perf_counter())
    return stamps


def measure(
    rank: int, num_ranks: int, programs: list[Program], make: Callable[[Program, int], nn.Module], x: Tensor,
    folder: str, rounds: int, unit: float,
) -> dict[Any, list[Any]]:  # fmt: skip
    """Steps of every contender, by round: (start, end, CPU seconds); hops and overshoots."""
    contenders: dict[Any, Step] = {}
    for number, program in enumerate(programs):
        modules = {action.stage: make(program, action.stage) for action in program.actions(rank)}
        contenders["lab", number] = in_lab(program, modules, x)
        if torch_can(program):
            contenders["torch", number] = in_torch(program, modules, x, f"{folder}/{number}.csv")
        if unit:
            contenders["alone", number] = alone(modules, x)
    found: dict[Any, list[Any]] = {key: [] for key in (*contenders, "hop", "sleep")}
    for number in range(rounds + 1):  # the first one warms up
        comm.barrier()
        found["hop"].append(hop(rank, x.clone(), unit))
        comm.barrier()
        began = time.perf_counter()
        for _ in range(5):
            time.sleep(unit)
        found["sleep"].append((time.perf_counter() - began) / (5 * unit) if unit else 1.0)
        for key, step in in_turns(contenders.items(), number):
            comm.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            step()
            found[key].append((began, time.perf_counter(), time.process_time() - cpu))
    return found


def cost_of(program: Program, unit: float, latency: float = 0) -> lab.Cost:
    """F, I and W of a stage in nanoseconds: a unit per rank, divided among its stages."""
    ticks = int(unit * program.num_ranks / program.num_stages * 1e9)
    return lab.Cost(F=ticks, I=ticks, W=ticks, latency=int(latency * 1e9))


def run(programs: list[Program], make: Any, x: Tensor, rounds: int, unit: float) -> tuple[Spans, float, float]:
    """Per contender what each round took; the hop in seconds and the sleep overshoot."""
    with tempfile.TemporaryDirectory() as folder:
        for number, program in enumerate(programs):
            if torch_can(program):
                Path(folder, f"{number}.csv").write_text(to_torch_csv(program))
        p = programs[0].num_ranks
        ranks = lab.launch(measure, p, programs, make, x, folder, rounds, unit, timeout=900, output="collect")
    results: Spans = {}
    for key in ranks[0]:
        if isinstance(key, tuple):
            steps = list(zip(*(found[key][1:] for found in ranks), strict=True))
            if key[0] == "alone":
                spans = [median(end - start for start, end, _ in step) for step in steps]
            else:
                spans = [max(end for _, end, _ in step) - min(start for start, *_ in step) for step in steps]
            results[key] = [(span, sum(cpu for *_, cpu in step)) for span, step in zip(spans, steps, strict=True)]
    away, there = (chain.from_iterable(ranks[rank]["hop"][1:]) for rank in (0, 1))
    latency = median(end - start for start, end in zip(away, there, strict=True))
    return results, latency, median(median(found["sleep"][1:]) for found in ranks)


def seconds_of(results: Spans, side: str, number: int) -> tuple[float, float]:
    """Medians over the rounds, on the wall and of CPU."""
    wall, cpu = zip(*results[side, number], strict=True)
    return median(wall), median(cpu)


def beside(results: Spans, number: int) -> str:
    """The median of the rounds' ratios to torch, with the least and the most."""
    if ("torch", number) not in results:
        return ""
    both = zip(results["lab", number], results["torch", number], strict=True)
    ratios = [ours[0] / theirs[0] for ours, theirs in both]
    return f"    {spread(ratios)}"


def emulated(num_ranks: int, rounds: int, unit: float, names: list[str]) -> None:
    """Print one row per schedule: ratios to the simulation, CPU time."""
    programs = [schedules.build(name, num_ranks, MICROBATCHES[num_ranks]) for name in names]

    def make(program: Program, stage: int) -> nn.Module:
        return Emulated(cost_of(program, unit).F / 1e9, first=stage == 0)

    results, latency, overshoot = run(programs, make, torch.zeros(ROWS, WIDTH), rounds, unit)
    microbatches = MICROBATCHES[num_ranks]
    print(f"\n{num_ranks} ranks, {microbatches} microbatches: hop {latency * 1e6:.0f} us, sleep x {overshoot:.4f}")
    print(f"{'':<22}{'actions x':>10}", end="")
    print("".join(f"{side:>11}{'ratio':>7}{'added':>7}{'CPU ms':>8}" for side in SIDES) + f"{'lab/torch':>10}")
    for number, program in enumerate(programs):
        cost = cost_of(program, unit, latency)
        simulated = lab.simulate(program, cost).makespan / 1e9
        num_stages = len({action.stage for action in program.actions(0)})
        actions = seconds_of(results, "alone", number)[0] / (3 * cost.F / 1e9 * ALONE * num_stages)
        row = f"{program.name:<22}{actions:>10.3f}"
        for side in SIDES:
            if (side, number) in results:
                step, cpu = seconds_of(results, side, number)
                row += f"{step * 1e3:>8.1f} ms{step / (simulated * overshoot):>7.3f}"
                row += f"{step / (simulated * actions):>7.3f}{cpu * 1e3:>8.1f}"
        print(row + beside(results, number), flush=True)


def real(rounds: int, names: list[str]) -> None:
    """Print steps with real compute on 2 ranks."""
    for title, (layer, x) in REAL.items():
        programs = [schedules.build(name, 2, 8) for name in names]
        torch.manual_seed(0)
        results, *_ = run(programs, lambda program, stage, layer=layer: layer(), x, rounds, 0)
        print(f"\n{title}, 2 ranks, 8 microbatches: ms per step, CPU ms, lab/torch")
        for number, program in enumerate(programs):
            cells = []
            for side in SIDES:
                step, cpu = seconds_of(results, side, number)
                cells.append(f"{side} {step * 1e3:8.1f}{cpu * 1e3:8.1f}")
            print(f"{program.name:<22}" + "   ".join(cells) + beside(results, number), flush=True)


def count_calls(rank: int, num_ranks: int, program: Program, csv: str) -> tuple[int, int]:
    """Calls of a third step on this rank, of lab and of torch, each of which infers shapes and splits a batch."""
    torch.manual_seed(0)
    here = program.stages_of(rank)
    x, found = torch.randn(64, 64), []
    for side in SIDES:
        modules = {stage: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for stage in here}
        if side == "lab":
            step = partial(lab.PipelineRuntime(program, modules, nn.functional.mse_loss).step, x, x)
        else:
            step = in_torch(program, modules, x[:8], csv)
        for _ in range(2):
            step()
        events: list[str] = []
        sys.setprofile(lambda frame, event, arg, seen=events: seen.append(event))
        step()
        sys.setprofile(None)
        found.append(sum(event in ("call", "c_call") for event in events) - 1)  # the last one ends the count
    return found[0], found[1]


def calls(names: list[str]) -> None:
    """Print the calls of both ranks, and their ratio to torch's."""
    print(f"\n{'calls of a third step':<22}{'rank':>5}{'lab':>8}{'torch':>8}{'lab/torch':>11}")
    for program in (schedules.build(name, 2, MICROBATCHES[2]) for name in names):
        if torch_can(program):
            with tempfile.TemporaryDirectory() as folder:
                csv = Path(folder, "program.csv")
                csv.write_text(to_torch_csv(program))
                for rank, (ours, theirs) in enumerate(lab.launch(count_calls, 2, program, str(csv))):
                    print(f"{program.name:<22}{rank:>5}{ours:>8}{theirs:>8}{ours / theirs:>11.2f}", flush=True)


def main() -> None:
    """Run all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--unit-ms", type=float, default=10)
    parser.add_argument("--only", nargs="+", default=schedules.names(synchronous=True))
    parser.add_argument("--skip-real", action="store_true")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    for num_ranks in arguments.ranks:
        emulated(num_ranks, arguments.rounds, arguments.unit_ms / 1e3, arguments.only)
    calls(arguments.only)
    if not arguments.skip_real:
        real(arguments.rounds, [name for name in arguments.only if name not in ("easy_dualpipe", "dualpipe")])


if __name__ == "__main__":
    main()
