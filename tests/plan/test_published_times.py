"""Seconds per step of MLPerf's Llama 3.1 405B series, with one calibration point per machine.

mlcommons/training_results_v5.0 at 0fdc28f0, medians of `train_step_time` of the first of three runs, which differ by
less than 0.5%.  Sequences of 8,192, one per microbatch; fp8 products; no recomputation; sequence parallelism and all
overlaps of Megatron; interleaved, 8 stages per rank; embedding and head each in the place of a layer; cp 2.
A machine's first row is its calibration point, and the others are predicted.  `pytest -s` prints the table.
"""

from dataclasses import replace

import pytest

from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import Cluster, Plan
from dualpipe_lab.plan.step_time import step_time
from dualpipe_lab.plan.time_rules import MEGATRON_TIME

LLAMA_405B = LlamaConfig(128256, 16384, 53248, 126, 128, 8)
LAYERS = (1, *[2] * 62, 1)
NODES = {"h100": 8, "h200": 8, "gb200": 64}
SERIES = {  # name: tp, then ranks, dp, sequences of a step, seconds
    "h100": (8, [(512, 4, 1152, 55.10), (2048, 16, 1152, 14.21), (2432, 19, 1216, 12.70), (2560, 20, 1120, 11.18),
                 (8192, 64, 1536, 5.182)]),
    "gb200": (4, [(256, 4, 448, 19.09), (512, 8, 896, 19.60), (1024, 16, 768, 8.448), (1536, 24, 1152, 8.491),
                  (2048, 32, 1280, 7.152), (2496, 39, 1248, 5.823)]),
    "h200": (4, [(512, 8, 1152, 50.02), (1024, 16, 1152, 25.35)]),
}  # fmt: skip


def predicted(name, tp, num_ranks, dp, batch):
    plan = Plan(
        pp=8, dp=dp, tp=tp, cp=2, schedule="interleaved", chunks=8, num_microbatches=batch // dp, zero=1,
        sequence_parallel=True, precision="bfloat16", layers=LAYERS,
    )  # fmt: skip
    cluster = Cluster.of(name, num_ranks, NODES[name])
    return step_time(LLAMA_405B, plan, cluster, 8192, batch, replace(MEGATRON_TIME, product_type="float8"))


@pytest.mark.parametrize("name", SERIES)
def test_a_series_is_predicted_from_its_first_row(name):
    tp, rows = SERIES[name]
    found = [predicted(name, tp, *row[:3]) for row in rows]
    factor = rows[0][3] / found[0].seconds
    print(f"\n{name}: measured over estimated {factor:.3f}")
    for row, time in zip(rows[1:], found[1:], strict=True):
        step = time.calibrated(factor)
        print(
            f"{row[0]:5} ranks: measured {row[3]:6.3f} s, predicted {step.seconds:6.3f}, "
            f"{step.seconds / row[3] - 1:+.1%}"
        )
        assert abs(step.seconds / row[3] - 1) <= 0.08
        assert step.least <= row[3] <= step.most
