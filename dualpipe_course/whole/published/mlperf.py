"""Seconds per step of MLPerf's Llama 3.1 405B series, with one calibration point per machine.

Chapter: book/whole/predictions.  Sequences of 8,192, one per microbatch; fp8 products; no recomputation; sequence
parallelism and all overlaps of Megatron; interleaved, 8 stages per rank; embedding and head each in the place of a
layer; cp 2.  A machine's first row is its calibration point, and the others are predicted.
Source: mlcommons/training_results_v5.0 at 0fdc28f0, medians of `train_step_time` of the first of three runs, which
differ by less than 0.5%.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from dualpipe_course.whole.published import Pair
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import MEGATRON_TIME, Cluster, Plan, StepTime, step_time

LLAMA_405B = LlamaConfig(128256, 16384, 53248, 126, 128, 8)
LAYERS: tuple[int, ...] = (1, *[2] * 62, 1)
NODES = {"h100": 8, "h200": 8, "gb200": 64}
RULES = replace(MEGATRON_TIME, product_type="float8")
Row: TypeAlias = tuple[int, int, int, float]  # ranks, dp, sequences of a step, seconds
# name: tp, then its rows
SERIES: dict[str, tuple[int, list[Row]]] = {
    "h100": (8, [(512, 4, 1152, 55.10), (2048, 16, 1152, 14.21), (2432, 19, 1216, 12.70), (2560, 20, 1120, 11.18),
                 (8192, 64, 1536, 5.182)]),
    "gb200": (4, [(256, 4, 448, 19.09), (512, 8, 896, 19.60), (1024, 16, 768, 8.448), (1536, 24, 1152, 8.491),
                  (2048, 32, 1280, 7.152), (2496, 39, 1248, 5.823)]),
    "h200": (4, [(512, 8, 1152, 50.02), (1024, 16, 1152, 25.35)]),
}  # fmt: skip


def steps(name: str) -> Iterator[tuple[Pair, StepTime]]:
    """The measured and the estimated seconds of a machine's rows, and the calibrated step with its interval."""
    rows = SERIES[name][1]
    found = [estimated(name, row) for row in rows]
    by = rows[0][3] / found[0].seconds
    for row, time in zip(rows, found, strict=True):
        step = time.calibrated(by)
        yield Pair(f"{name}, {row[0]} ranks", row[3], step.seconds, row is rows[0]), step


def factor(name: str) -> float:
    """Measured over estimated seconds of a machine's calibration point."""
    point = SERIES[name][1][0]
    return point[3] / estimated(name, point).seconds


def estimated(name: str, row: Row) -> StepTime:
    """The step of a machine's row, without a calibration."""
    cluster = Cluster.of(name, row[0], NODES[name])
    return step_time(LLAMA_405B, plan_of(name, row), cluster, 8192, row[2], RULES)


def plan_of(name: str, row: Row) -> Plan:
    """The plan of a machine's row."""
    _, dp, batch, _ = row
    return Plan(
        pp=8, dp=dp, tp=SERIES[name][0], cp=2, schedule="interleaved", chunks=8, num_microbatches=batch // dp, zero=1,
        sequence_parallel=True, precision="bfloat16", layers=LAYERS,
    )  # fmt: skip
