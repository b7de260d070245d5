"""vTrain's measured runs as plans on a machine of three numbers.

The largest products' part of the peak, the FLOPs of a product that reaches half of it, and the seconds of a kernel.
`python tests/plan/vtrain_runs.py` finds them from 60 of the runs on one node, by their mean error; links: the table's.
"""

import csv
import random
from dataclasses import replace
from math import log
from pathlib import Path
from typing import NamedTuple

from dualpipe_course.whole.published import vtrain
from dualpipe_lab.plan import Cluster, Efficiency, GptConfig, Plan
from dualpipe_lab.plan.step_time import StepTimer
from dualpipe_lab.plan.time_rules import TimeRules

FOLDER = Path(__file__).parent / "vtrain"
RULES = TimeRules("Megatron-DeepSpeed: nothing hides")
SIZES = [10.0**exponent for exponent in range(6, 15)]


class Run(NamedTuple):
    """A measured run."""

    model: GptConfig
    plan: Plan
    length: int
    global_batch: int
    milliseconds: float


def one_node():
    """The runs on one node."""
    sizes = ("hidden size", "# layers", "attention heads", "sequence length", "global batch", "micro batch")
    with (FOLDER / "one_node.csv").open() as file:
        for row in csv.DictReader(file):
            hidden, layers, heads, length, batch, rows = (int(row[name]) for name in sizes)
            tp, dp, pp = (int(row[f"{axis} parallelism"]) for axis in ("tensor", "data", "pipeline"))
            milliseconds = float(row["iteration time (ms)"])
            yield _run((hidden, heads, layers), (tp, dp, pp, batch // dp // rows), length, batch, milliseconds)


def many_nodes():
    """The runs on many nodes, as the course has them."""
    for size, tp, dp, pp, num_microbatches, batch, milliseconds, _ in vtrain.ROWS:
        yield _run(vtrain.MODELS[size], (tp, dp, pp, num_microbatches), 2048, batch, milliseconds)


def _run(model, cut, length, batch, milliseconds):
    (hidden, heads, layers), (tp, dp, pp, num_microbatches) = model, cut
    plan = Plan(pp=pp, dp=dp, tp=tp, num_microbatches=num_microbatches, recompute=True, precision="bfloat16")
    config = GptConfig(-(-50257 // tp) * tp, hidden, layers, heads, num_positions=length)
    return Run(config, plan, length, batch, milliseconds)


def machine(num_ranks, most, half, overhead):
    """A100 in nodes of 8, as many cards as GPUs, whose products reach `most` x / (x + half) for x FLOPs."""
    curve = Efficiency(origin="measured", points=tuple((x, most * x / (x + half)) for x in SIZES))
    cluster = Cluster.of("a100-80", num_ranks, 8)
    link = replace(cluster.between, bandwidth=12.5e9)  # 800 Gb/s for each node, as vTrain's configuration has it
    return replace(cluster, accelerator=replace(cluster.accelerator, efficiency=curve, overhead=overhead), between=link)


def estimated(run, numbers):
    """Milliseconds of a run."""
    cluster = machine(run.plan.world_size, *numbers)
    return StepTimer(run.model, run.plan, cluster, run.length, run.global_batch, RULES).result.seconds * 1e3


def error(runs, numbers):
    """The mean of |log(estimated / measured)|."""
    return sum(abs(log(estimated(run, numbers) / run.milliseconds)) for run in runs) / len(runs)


def fit(runs, numbers=(0.7, 3e9, 2e-5)):
    """The three numbers with the least error, each moved in turn by smaller and smaller factors."""
    best = error(runs, numbers)
    for factor in (1.6, 1.25, 1.1, 1.04):
        moved = True
        while moved:
            moved = False
            for place in range(3):
                for by in (factor, 1 / factor):
                    tried = tuple(x * by if place == at else x for at, x in enumerate(numbers))
                    if tried[0] <= 1 and (found := error(runs, tried)) < best:
                        numbers, best, moved = tried, found, True
    return numbers, best


if __name__ == "__main__":
    everything = list(one_node())
    chosen = random.Random(0).sample(everything, 60)
    found, mean = fit(chosen)
    others = [run for run in random.Random(1).sample(everything, 200) if run not in chosen]
    print(f"{found}: mean error {mean:.1%} of 60 runs, {error(others, found):.1%} of {len(others)} others on one node")
