"""The search beside an exhaustive one, its reasons, and its refusals."""

import re
from dataclasses import replace
from itertools import product

import pytest

from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import Cluster, GptConfig, Plan, estimate
from dualpipe_lab.plan.bounds import least_seconds
from dualpipe_lab.plan.estimate import fullest_ranks
from dualpipe_lab.plan.kept_tensors import LAB, MEGATRON
from dualpipe_lab.plan.planner import search
from dualpipe_lab.plan.step_time import StepTimer, step_time
from dualpipe_lab.plan.time_rules import MEGATRON_TIME
from dualpipe_lab.pp import schedules

LLAMA3_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
SMALL = LlamaConfig(32000, 2048, 5632, 16, 16, 4)
NAMES = ("1f1b", "zero_bubble_h1", "dualpipev")


def exhaustive(model, cluster, length, batch, names):
    """Seconds of every legal plan that fits, computed one by one."""
    found = {}
    rows = [rows for rows in (1, 2, 4, 8, 16) if batch % rows == 0]
    for num_microbatches, again in product(
        {batch // (dp * r) for dp in (1, 2, 4, 8) for r in rows if batch % (dp * r) == 0}, (False, True)
    ):
        plans = Plan.all(
            model, cluster.num_ranks, length, schedule_names=names, num_microbatches=num_microbatches, recompute=again,
            precision="bfloat16",
        )  # fmt: skip
        for plan in plans:
            one = replace(plan, sequence_parallel=plan.tp > 1)
            rest = batch % (one.data_size * num_microbatches)
            if rest or batch // one.data_size // num_microbatches not in rows:
                continue
            try:
                memory = estimate(model, one, cluster, length, batch, MEGATRON)
            except ValueError:
                continue
            if memory.fits:
                found[one] = step_time(model, one, cluster, length, batch, MEGATRON_TIME).seconds
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_first_plan_is_the_first_of_all(num_ranks):
    cluster = Cluster.of("a100-40", num_ranks, 2)
    everything = exhaustive(SMALL, cluster, 2048, 16, NAMES)
    found = search(SMALL, cluster, 2048, 16, count=3, schedule_names=NAMES, limit=10**6)
    assert found.complete
    fastest = sorted(everything.values())[:3]
    assert [choice.time.seconds for choice in found.best] == pytest.approx(fastest, rel=1.5e-3)
    assert all(everything[choice.plan] == choice.time.seconds for choice in found.choices)
    computed = {choice.plan for choice in found.choices}
    assert all(plan in computed or seconds >= fastest[-1] * 0.999 for plan, seconds in everything.items())


@pytest.fixture(scope="module")
def found():
    return search(LLAMA3_8B, Cluster.of("h100", 8), 8192, 32, schedule_names=["1f1b", "zbv"])


def test_the_first_plans_fit_and_come_in_order(found):
    assert found.complete
    assert len(found.best) == 5
    seconds = [choice.time.seconds for choice in found.best]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-3)
    assert all(choice.memory.fits for choice in found.choices)
    assert found.why(found.best[0].plan) == "it is the first"
    assert "number 3" in found.why(found.choices[2].plan)


def test_the_frontier_has_no_plan_that_another_beats(found):
    times = [choice.time.seconds for choice in found.frontier]
    sizes = [choice.bytes for choice in found.frontier]
    assert sizes == sorted(sizes, reverse=True)
    assert times == pytest.approx(sorted(times), rel=1e-3)


def test_plans_say_which_rank_needs_how_much_of_what(found):
    reason = found.why(Plan(dp=8, num_microbatches=4, precision="bfloat16", zero=0))
    assert "parameters, gradients, masters and moments take 145 GB" in reason
    by_rank = [lost.reason for lost in found.lost if lost.constraint == "memory" and "rank" in lost.reason]
    assert any("needs" in reason and "activations" in reason for reason in by_rank)
    assert set(found.counts) <= {"memory", "rule", "slower"}
    text = str(found)
    assert "lost by memory" in text
    assert text.startswith(f"{found.num_plans} plans")


def test_a_slower_plan_says_on_what_it_spends_the_time(found):
    last = found.choices[-1]
    said = rf"it is number {len(found.choices)}, \d+\.\d% behind the first; the largest part is .*, \d+\.\d{{3}} s more"
    assert re.fullmatch(said, found.why(last.plan))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_parts_of_a_step_sum_to_it(overlap):
    """On the busiest rank; what overlapped pairs hide is no part."""
    plan = Plan(pp=2, dp=2, ep=2, num_microbatches=8, schedule="dualpipe", overlap=overlap, precision="bfloat16")
    time = step_time(EXPERTS, plan, Cluster.of("h100", 8, 4), 512, 32, MEGATRON_TIME)
    rank = time.busy.index(max(time.busy))
    end = time.pipeline + time.gradients[rank] + time.norm + time.update[rank]
    assert sum(time.parts.values()) == pytest.approx(end, rel=1e-6)
    assert min(time.parts.values()) >= 0
    assert (time.parts["ep"] < time.spent[rank]["ep"]) is overlap


def calls_of(model, tp, num_layers):
    """Seconds of the calls along tp of so many layers with embedding and head, for a sequence on each microbatch."""
    plan = Plan(tp=tp, dp=16 // tp, sequence_parallel=True, precision="bfloat16")
    timer = StepTimer(
        replace(model, num_layers=num_layers), plan, Cluster.of("h100", 16, 8), 8192, plan.dp, MEGATRON_TIME
    )
    return sum(kind.get("tp", 0.0) for kind in timer.stages[0].values())


def test_calls_across_nodes_are_named_with_their_time_per_layer():
    """Of tp over two nodes, and inside of one; a layer's calls are what one layer more takes."""
    found = search(LLAMA3_8B, Cluster.of("h100", 16, 8), 8192, 16, schedule_names=["1f1b"], count=1)
    plain = [lost for lost in found.lost if lost.constraint == "slower" and not lost.plan.recompute]
    reasons = {
        lost.plan.tp: lost.reason
        for lost in plain
        if lost.plan.data_size * lost.plan.num_microbatches == 16 and lost.plan.cp == 1
    }
    for tp, place in ((16, "crosses nodes"), (8, "stays inside of nodes")):
        milliseconds = 1000 * (calls_of(LLAMA3_8B, tp, 3) - calls_of(LLAMA3_8B, tp, 2))
        assert reasons[tp].endswith(f"; tp {place}: {milliseconds:.3g} ms per layer of a microbatch")


def test_a_plan_that_was_no_candidate_is_refused(found):
    with pytest.raises(ValueError, match="was no candidate"):
        found.why(Plan(dp=3))


def test_without_memory_nothing_fits_and_with_more_no_first_plan_is_slower():
    cluster = Cluster.of("h100", 4)
    seconds = []
    for gigabytes in (20, 40, 60, 80):
        result = search(SMALL, cluster, 4096, 32, count=1, memory=gigabytes * 10**9, schedule_names=["1f1b"])
        seconds.append(result.best[0].time.seconds if result.best else float("inf"))
    assert seconds == sorted(seconds, reverse=True)
    assert not search(SMALL, cluster, 4096, 32, memory=10**9, schedule_names=["1f1b"]).choices


def test_a_slow_network_moves_the_first_plan():
    cluster = Cluster.of("h100", 16)
    slow = replace(cluster, between=replace(cluster.between, bandwidth=2e8, latency=1e-3))
    few = {"count": 1, "schedule_names": ["1f1b"], "zeros": [1], "recompute": [False]}
    first, other = (search(SMALL, one, 4096, 64, **few).best[0] for one in (cluster, slow))
    assert first.plan != other.plan
    assert step_time(SMALL, first.plan, slow, 4096, 64, MEGATRON_TIME).seconds > other.time.seconds


def test_a_search_that_stops_says_so():
    result = search(SMALL, Cluster.of("h100", 8), 2048, 64, count=5, limit=5, schedule_names=["1f1b"])
    assert not result.complete
    assert result.counts["limit"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "at least one plan"), ({"schedule_names": ["pipedream"]}, "synchronous"),
        ({"schedule_names": ["gpip"]}, "gpipe"), ({"precision": "float8"}, "precision is one of"),
    ],
)  # fmt: skip
def test_settings_without_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        search(SMALL, Cluster.of("h100", 8), 2048, 64, **settings)


def test_an_odd_batch_is_refused_and_a_gpt_is_planned():
    with pytest.raises(ValueError, match="use a multiple of"):
        search(SMALL, Cluster.of("h100", 8), 2048, 0)
    gpt = GptConfig(51200, 1024, 8, 16, num_positions=1024)
    assert search(gpt, Cluster.of("a100-80", 4), 1024, 16, count=1, schedule_names=["1f1b"]).best


@pytest.mark.parametrize("name", schedules.names(synchronous=True))
@pytest.mark.parametrize(("pp", "num_microbatches", "zero"), [(2, 8, 1), (4, 16, 3)])
def test_no_step_is_faster_than_its_bound(name, pp, num_microbatches, zero):
    """Stages of unequal weight: the first and the last have one layer, or the head makes the last one slow."""
    plan = Plan(pp=pp, schedule=name, num_microbatches=num_microbatches, precision="bfloat16", dp=2, zero=zero)
    config = replace(SMALL, num_layers=40)
    for layers in (None, (1, *[(40 - 2) // (plan.num_stages - 2 or 1)] * (plan.num_stages - 2), 1)):
        if layers is not None and sum(layers) != 40:
            continue
        one = replace(plan, layers=layers)
        timer = StepTimer(config, one, Cluster.of("h100", 2 * pp), 2048, 2 * num_microbatches, MEGATRON_TIME)
        assert 0 < least_seconds(one, timer.stages) <= timer.result.pipeline * (1 + 1e-6)


EXPERTS = V3MoEConfig(
    vocabulary_size=32000, hidden_size=1024, num_layers=9, num_heads=16, num_kv_heads=4, ffn_size=4096,
    expert_ffn_size=512, num_experts=32, num_experts_per_token=4,
)  # fmt: skip


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev", "paired_1f1b"])
@pytest.mark.parametrize("slower", [1, 8, 64])
def test_no_step_with_overlapped_experts_is_faster_than_its_bound(name, slower):
    """On a fast network pairs hide the exchanges, on a slow one these are all that a rank waits for."""
    cluster = Cluster.of("h100", 16)
    slow = replace(cluster, between=replace(cluster.between, bandwidth=cluster.between.bandwidth / slower))
    for ep, overlap in ((8, True), (4, True), (8, False)):
        plan = Plan(pp=2, dp=8, ep=ep, experts_in_data=True, schedule=name, num_microbatches=8, overlap=overlap,
                    precision="bfloat16")  # fmt: skip
        if overlap and not plan.has_pairs:
            continue
        timer = StepTimer(EXPERTS, plan, slow, 2048, 64, MEGATRON_TIME)
        assert 0 < least_seconds(plan, timer.stages) <= timer.result.pipeline * (1 + 1e-6)


@pytest.fixture(scope="module")
def with_experts():
    return search(EXPERTS, Cluster.of("a100-40", 8, 4), 2048, 32, schedule_names=["1f1b", "dualpipe"], count=3)


def test_a_search_with_experts_computes_what_it_says(with_experts):
    assert with_experts.complete
    assert any(choice.plan.ep > 1 for choice in with_experts.choices)
    for choice in with_experts.choices:
        again = step_time(EXPERTS, choice.plan, Cluster.of("a100-40", 8, 4), 2048, 32, MEGATRON_TIME)
        assert again.seconds == choice.time.seconds
        assert choice.memory.fits
    plans = [choice.plan for choice in with_experts.choices]
    assert len(set(plans)) == len(plans)


@pytest.mark.parametrize("keeps", [LAB, MEGATRON], ids=["copied", "spread"])
def test_experts_that_do_not_divide_along_tp_lose_by_a_rule(keeps):
    """Whether memory or seconds refuse them: other plans are ranked, and the reason is kept."""
    few = replace(EXPERTS, num_experts=4, num_experts_per_token=2, num_groups=1, num_groups_per_token=1)
    settings = {"schedule_names": ["1f1b"], "zeros": [0], "recompute": [False]}
    found = search(few, Cluster.of("a100-40", 8, 4), 2048, 8, count=400, keep_rules=keeps, **settings)
    assert found.complete
    assert found.choices
    assert all(few.num_experts % (choice.plan.ep * choice.plan.tp) == 0 for choice in found.choices)
    refused = [lost for lost in found.lost if few.num_experts % (lost.plan.ep * lost.plan.tp)]
    assert len(refused) > 5
    assert all(lost.constraint == "rule" and "divide among the ranks of tp" in lost.reason for lost in refused)


def test_no_plan_with_experts_that_lost_is_faster(with_experts):
    """Of the plans that were left because of their bounds, some are computed all the same."""
    third = with_experts.best[-1].time.seconds
    slower = [lost for lost in with_experts.lost if lost.constraint == "slower"]
    assert slower
    for lost in slower[:: max(1, len(slower) // 25)]:
        try:
            found = step_time(EXPERTS, lost.plan, Cluster.of("a100-40", 8, 4), 2048, 32, MEGATRON_TIME)
        except ValueError:
            continue  # a rule, which its turn would have shown
        assert found.seconds >= third * 0.999


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=2, tp=2, cp=2, num_microbatches=4, precision="bfloat16"),
        Plan(pp=4, dp=2, num_microbatches=8, schedule="zbv", zero=3, precision="bfloat16"),
        Plan(tp=4, cp=2, layout="contiguous", precision="bfloat16"),
    ],
    ids=str,
)
def test_the_fullest_ranks_are_the_largest_of_all(plan):
    every = estimate(SMALL, plan, Cluster.of("h100", 8), 2048, 8 * plan.data_size, MEGATRON)
    fullest = fullest_ranks(SMALL, plan, 2048, 8 * plan.data_size, MEGATRON)
    assert max(one.allocated for one in fullest) == every.largest.allocated
