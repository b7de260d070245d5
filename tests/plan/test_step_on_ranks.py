"""A step's costs on real ranks with a virtual clock: their timelines equal the estimate's, digit for digit."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import dualpipe_lab as lab
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import Cluster, Plan
from dualpipe_lab.plan.step_time import StepTimer
from dualpipe_lab.plan.time_rules import LAB_TIME
from dualpipe_lab.pp.simulator import simulate

sys.path.append(str(Path(__file__).parents[1] / "pp"))
from test_runtime import run  # the runs of the pipeline's own tests

MODEL = LlamaConfig(1024, 256, 512, 8, 8, 8)


@pytest.mark.parametrize(
    ("schedule", "pp", "num_microbatches"),
    [("1f1b", 2, 5), ("zero_bubble_h1", 3, 6), ("interleaved", 2, 4), ("dualpipe", 2, 6), ("zbv", 2, 4)],
)
def test_the_virtual_clock_has_the_estimate_s_times(schedule, pp, num_microbatches):
    plan = Plan(pp=pp, schedule=schedule, num_microbatches=num_microbatches, precision="bfloat16")
    timer = StepTimer(MODEL, plan, Cluster.of("h100", pp), 512, num_microbatches, LAB_TIME)
    # the runs' messages have 96 bytes, which take 96 us on this link
    timer.__dict__["cost"] = replace(timer.cost, latency=500_000, transfer=96_000)
    out = run(plan.program, cost=timer.cost, clock="virtual", link=lab.Link(gbps=0.008, latency_ms=0.5))
    assert out.timeline == simulate(plan.program, timer.cost, "ns")
    assert out.timeline.makespan == round(timer.result.pipeline * 1e9)
