"""A step's time from the compact program is that from a record of every step of the `Program`, to the last bit."""

import random
from dataclasses import fields, replace

import pytest

from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import Cluster, Plan
from dualpipe_lab.plan.gradient_times import Pass
from dualpipe_lab.plan.step_time import StepTimer
from dualpipe_lab.plan.time_rules import LAB_TIME, MEGATRON_TIME
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.simulator import simulate

DENSE = LlamaConfig(32000, 512, 1408, 40, 8, 4)
EXPERTS = V3MoEConfig(
    vocabulary_size=32000, hidden_size=512, num_layers=37, num_dense_layers=3, num_heads=8, num_kv_heads=4,
    ffn_size=2048, expert_ffn_size=256, num_experts=16, num_experts_per_token=4,
)  # fmt: skip
SIZES = [(2, 4), (3, 12), (4, 8), (4, 19), (4, 32), (6, 24)]


class Recorded(StepTimer):
    """The same step with the times of the full simulator's spans, and counts of the program's actions."""

    @property
    def spans(self):
        if "_spans" not in self.__dict__:
            self._spans = simulate(self.plan.program, self.cost, "ns").spans_by_rank
        return self._spans

    @property
    def stages(self):
        found = [self.times.of(stage) for stage in range(self.plan.program.num_stages)]
        for stage, seconds in enumerate(found if self.plan.zero > 1 else ()):
            self.sums.add_zero(stage, seconds)
        return found

    @property
    def _pipeline(self):
        ends = [row[-1].end / 10**9 for row in self.spans]
        return ends, [sum(span.end - span.start for span in row) / 10**9 for row in self.spans]

    def _passes(self, pp_rank):
        firsts, lasts = {}, {}
        for span in self.spans[pp_rank]:
            for stage, kind, _ in span.actions:
                found = Pass(span.start / 10**9, span.end / 10**9)
                if kind == "F":
                    firsts.setdefault(stage, found)
                else:
                    lasts[stage] = found
        return {stage: (firsts[stage], lasts[stage]) for stage in firsts}

    def _counts(self, pp_rank):
        counts = {}
        for stage, kind, _ in self.plan.program.actions(pp_rank):
            counts[stage, kind] = counts.get((stage, kind), 0) + 1
        return [(*key, count) for key, count in counts.items()]


def plans(name, draw):
    """Plans of one schedule: sizes, stages of ZeRO, with and without experts, overlapped where there are pairs."""
    for pp, num_microbatches in SIZES:
        plan = Plan(pp=pp, dp=4, schedule=name, num_microbatches=num_microbatches, precision="bfloat16")
        try:
            has_pairs, num_stages = plan.has_pairs, plan.num_stages
        except ValueError:  # sizes that the schedule cannot have
            with pytest.raises(ValueError, match=name.split("_")[0]):
                _ = plan.program
            continue
        again, zero = draw.random() < 0.5, draw.randrange(4)
        yield DENSE, replace(plan, zero=zero, recompute=again)
        first = draw.randrange(1, 9)
        rest = [(40 - first) // (num_stages - 1)] * (num_stages - 1)
        rest[-1] += 40 - first - sum(rest)
        yield DENSE, replace(plan, zero=(zero + 1) % 4, layers=(first, *rest))
        for overlap in {False, has_pairs}:
            yield EXPERTS, replace(plan, ep=4, experts_in_data=True, zero=(zero + 2) % 4, overlap=overlap)
        yield EXPERTS, replace(plan, zero=3, multi_token=0.3)


@pytest.mark.parametrize("name", schedules.names(synchronous=True))
def test_a_step_has_the_times_of_the_full_simulator(name):
    draw, seen = random.Random(name), 0
    for model, plan in plans(name, draw):
        nodes = draw.choice([2, 4, 8])
        cluster = Cluster.of("h100", plan.world_size, nodes if plan.world_size % nodes == 0 else 2)
        slower = draw.choice([1, 30])  # exchanges of experts behind the rest, or the rest behind them
        cluster = replace(cluster, between=replace(cluster.between, bandwidth=cluster.between.bandwidth / slower))
        for rules in (LAB_TIME, MEGATRON_TIME):
            shape = model, plan, cluster, 1024, 4 * plan.num_microbatches, rules
            found, expected = StepTimer(*shape).result, Recorded(*shape).result
            assert all(getattr(found, one.name) == getattr(expected, one.name) for one in fields(found)), plan
            assert [list(parts) for parts in found.spent] == [list(parts) for parts in expected.spent]
            seen += 1
    assert seen >= 20


def refusal(plan, what):
    """The text of a ValueError; "" if there is none."""
    try:
        getattr(plan, what)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", schedules.names(synchronous=True))
@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (2, 4), (4, 8), (4, 19)])
def test_ranks_have_the_stages_of_the_program(name, pp, num_microbatches):
    plan = Plan(pp=pp, schedule=name, num_microbatches=num_microbatches)
    refused = {refusal(plan, what) for what in ("program", "compact", "num_stages")}
    if refused != {""}:
        assert len(refused) == 1
        return
    program = plan.program
    if program is None:
        assert (plan.compact, plan.stages(0), plan.holders(0), plan.num_stages) == (None, (0,), (0,), 1)
        return
    assert plan.num_stages == program.num_stages
    assert plan.compact.to_program() == program
    for rank in range(pp):
        assert set(plan.stages(rank)) == {action.stage for action in program.actions(rank)}
    for stage in range(plan.num_stages):
        ranks = {rank for (one, _), rank in program.placement.items() if one == stage}
        assert plan.holders(stage) == tuple(sorted(ranks))
