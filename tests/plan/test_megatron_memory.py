"""Estimates of memory beside Megatron's own measurements, the golden values of its tests: states and peaks.

`pytest -s tests/plan/test_megatron_memory.py` prints every row.
Read in NVIDIA/Megatron-LM, tests/functional_tests/test_cases, commit d98e8a64: bytes of torch's allocator on the last
rank, behind a step and at the peak.
"""

from dataclasses import dataclass

import pytest
from published import GIB, MIB, report, with_workspaces

import dualpipe_lab as lab
from dualpipe_lab.plan import MEGATRON_DROPOUT, Cluster, GptConfig, estimate
from dualpipe_lab.plan.states import parts_of_place


@dataclass(frozen=True)
class Run:
    """A measured run on 8 ranks: model, plan, accelerator, tokens of a sequence; bytes behind a step, at the peak."""

    name: str
    model: object
    plan: lab.Plan
    where: str
    length: int
    held: int
    peak: int

    def estimate(self):
        """The memory of its last rank; all of these rows set CUBLAS_WORKSPACE_CONFIG."""
        plan, rules = self.plan, with_workspaces(MEGATRON_DROPOUT, self.where, ":4096:8")
        cluster, rows = Cluster.of("h100", plan.world_size), plan.data_size * plan.num_microbatches
        return estimate(self.model, plan, cluster, self.length, rows * self.rows, rules).of(plan.world_size - 1)

    @property
    def rows(self):
        """Sequences of a microbatch."""
        return {"7B tp4": 2, "7B pp4": 1}.get(self.name, 4)


def runs(name, model, plan, length, measured):
    return [Run(name, model, plan, where, length, *values) for where, *values in measured]


# dense rows of at least 2 GB: gpt3_7b_tp4_pp1_memory_speed, gpt3_7b_tp1_pp4_memory_speed
SEVEN_B = {"num_kv_heads": 8, "num_positions": 8192, "tied": False}
TP4 = lab.Plan(tp=4, dp=2, zero=1, num_microbatches=2, precision="bfloat16")
PP4 = lab.Plan(
    pp=4, dp=2, zero=1, num_microbatches=4, precision="bfloat16", schedule="interleaved", chunks=8, layers=(1,) * 32
)
DENSE = [
    *runs("7B tp4", GptConfig(131584, 4096, 32, 32, **SEVEN_B), TP4, 8192, [
        ("a100", 20634103808, 58188115968), ("h100", 20663519232, 57143791616), ("gb200", 20663463936, 58217476096),
    ]),
    *runs("7B pp4", GptConfig(131200, 4096, 32, 32, **SEVEN_B), PP4, 8192, [
        ("a100", 24510808064, 60489064448), ("h100", 24808996864, 60720852992), ("gb200", 24540168192, 60519342080),
    ]),
]  # fmt: skip

# small rows, gpt3_mcore_te_: tp1_pp1_resume_torch_dist_dist_optimizer, tp4_pp1_resume_torch_dist_dist_optimizer_
# overlap_grad_reduce, tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce; the last one on H100 is that of its resumption
SMALL = GptConfig(50304, 512, 12, 8, num_positions=1024)
ONE = {"zero": 1, "num_microbatches": 4, "precision": "bfloat16"}
SMALL_RUNS = [
    *runs("small dp8", SMALL, lab.Plan(dp=8, **ONE), 1024, [("a100", 552128512, 0), ("h100", 581489664, 0)]),
    *runs("small tp4", GptConfig(50688, 512, 12, 8, num_positions=1024), lab.Plan(tp=4, dp=2, **ONE), 1024, [
        ("a100", 269842944, 0), ("h100", 299204096, 0),
    ]),
    *runs("small pp4", SMALL, lab.Plan(pp=4, dp=2, schedule="interleaved", chunks=3, layers=(1,) * 12, **ONE), 1024, [
        ("a100", 522845696, 0), ("h100", 551148032, 0),
    ]),
]  # fmt: skip


def test_parameters_of_megatron_s_last_rank_are_the_known_ones():
    """Counted from its modules."""
    for run, expected in ((DENSE[0], 1_713_299_456), (DENSE[3], 1_947_066_368)):
        place = (run.plan.pp - 1, 3 if run.plan.tp == 4 else 0)
        assert sum(part.numel for part in parts_of_place(run.model, run.plan, *place)) == expected


def test_golden_values_of_dense_models():
    held, peaks = [], []
    for run in DENSE:
        found = run.estimate()
        held.append(found.behind_step / run.held - 1)
        peaks.append(found.allocated / run.peak - 1)
        print(f"{run.name}, {run.where}: states {held[-1]:+.2%}, peak {peaks[-1]:+.2%} of {run.peak / GIB:.2f} GiB")
    states, peak = report("states", held), report("peak", peaks)
    assert states[0] < 0.005
    assert states[1] < 0.05
    assert peak[0] < 0.03
    assert peak[1] < 0.08


@pytest.mark.parametrize("run", SMALL_RUNS, ids=lambda run: f"{run.name} {run.where}")
def test_what_stays_beside_a_small_model_is_workspaces_and_received_inputs(run):
    """To 6 MiB, where a 16-bit copy of the head would be 49 MiB, and the causal mask is 1 MiB."""
    found = run.estimate()
    rest = (run.held - found.behind_step) / MIB
    print(f"{run.name}, {run.where}: {found.staying / MIB:.2f} MiB beside the states, {rest:+.2f} MiB more are held")
    assert -0.1 < rest < 6
