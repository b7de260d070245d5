"""The seconds of a step: their calls beside the bytes of `Plan.traffic`, and closed forms."""

from dataclasses import replace
from itertools import product

import pytest

from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import LAB, MEGATRON, Accelerator, Cluster, GptConfig, LinkClass, Plan, estimate
from dualpipe_lab.plan.call_times import Group, Links
from dualpipe_lab.plan.step_time import StepTimer, step_time
from dualpipe_lab.plan.time_rules import LAB_TIME, MEGATRON_TIME, TimeRules
from dualpipe_lab.pp import schedules

TINY = LlamaConfig(vocabulary_size=256, hidden_size=64, ffn_size=128, num_layers=8, num_heads=8, num_kv_heads=4)
EXPERTS = V3MoEConfig(num_layers=8, num_dense_layers=2, num_experts=8, num_experts_per_token=2)
LLAMA3_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
UNIT = LinkClass("a byte per second", 1.0)
FREE = LinkClass("free", 1e14)
PLANS = [
    Plan(tp=4), Plan(tp=4, sequence_parallel=True), Plan(cp=4), Plan(cp=2, tp=2), Plan(cp=2, tp=2, recompute=True),
    Plan(tp=2, sequence_parallel=True, recompute=True), Plan(dp=4),
]  # fmt: skip


def machine(num_ranks=8, inside=FREE, between=FREE, ranks_per_node=8):
    unit = Accelerator("unit", {"float32": 1e12, "bfloat16": 1e12, "float64": 1e12}, 2**40, 1e12)
    return Cluster(unit, num_ranks, min(ranks_per_node, num_ranks), inside, between)


def calls_of(times):
    kinds = [kind for stage in range(times.plan.num_stages) for kind in times.of(stage).values()]
    return {axis: sum(kind.get(axis, 0.0) for kind in kinds) for axis in ("tp", "cp", "ep")}


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_at_a_byte_per_second_calls_take_the_bytes_that_a_run_sends(plan):
    """The same calls are counted in `Plan.traffic`, which real runs equal byte for byte."""
    traffic = plan.traffic(TINY, plan.data_size * 2, 64)
    timer = StepTimer(TINY, plan, machine(plan.world_size, inside=UNIT), 64, plan.data_size * 2, LAB_TIME)
    seconds = calls_of(timer.times)
    if plan.recompute:
        without = StepTimer(TINY, replace(plan, recompute=False), timer.cluster, 64, 2, LAB_TIME).times.of(0)
        layers = {axis: sum(timer.times._layer(False)["F"][axis] for _ in range(8)) for axis in seconds}
        assert timer.times.of(0)["I"]["again"] >= sum(layers.values())
        assert without["F"]["tp"] == timer.times.of(0)["F"]["tp"]
        seconds = {axis: value + layers[axis] for axis, value in seconds.items()}
    sent = max(traffic.sent(rank, "layers") for rank in range(plan.world_size))
    assert sum(seconds.values()) == pytest.approx(sent, rel=0.02)  # shards of a few odd bytes are rounded up


@pytest.mark.parametrize("ep", [2, 4])
def test_experts_exchange_the_rows_of_a_balanced_router(ep):
    plan = Plan(dp=4, ep=ep, experts_in_data=True)
    traffic = plan.traffic(EXPERTS, 8, 64)
    timer = StepTimer(EXPERTS, plan, machine(4, inside=UNIT), 64, 8, LAB_TIME)
    sent = traffic.calls(0)["all_to_all_single"][1]
    assert calls_of(timer.times)["ep"] == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("rules", [LAB_TIME, MEGATRON_TIME], ids=["copied", "shared out"])
def test_the_optimizer_passes_over_the_weights_that_memory_counts(ep, rules):
    """Where the ranks of tp share experts out, each sums, gathers and updates its own alone."""
    plan = Plan(tp=2, dp=4, ep=ep, experts_in_data=ep > 1, sequence_parallel=True, precision="bfloat16")
    timer = StepTimer(EXPERTS, plan, machine(), 64, 8, rules)
    keeps = LAB if rules is LAB_TIME else MEGATRON
    states = estimate(EXPERTS, plan, machine(), 64, 8, keeps).of(0).states
    assert timer.sums.update(0) == pytest.approx(timer.times.machine.unit.memory_seconds(30 * states.num_parameters))


def test_a_rank_s_share_of_the_experts_moves_no_layer_to_another_stage():
    """Narrower experts would make layers beside the head cheaper, and the last stage longer."""
    plan = Plan(tp=4, pp=2, num_microbatches=4, sequence_parallel=True, precision="bfloat16")
    model = V3MoEConfig(vocabulary_size=4096, num_layers=12, num_dense_layers=2, num_experts=8, num_experts_per_token=4)
    narrow = replace(model, expert_ffn_size=model.expert_ffn_size // 4, num_shared_experts=4 * model.num_shared_experts)
    assert plan.stage_layers(narrow) != plan.stage_layers(model)
    timer = StepTimer(model, plan, machine(), 64, 4, MEGATRON_TIME)
    found = estimate(model, plan, machine(), 64, 4, MEGATRON)
    for stage in range(plan.pp):
        moved = 30 * found.places[stage, 0, 0].states.num_parameters
        assert timer.sums.update(stage) == pytest.approx(timer.times.machine.unit.memory_seconds(moved))


@pytest.mark.parametrize("ep", [1, 2])
def test_rows_travel_along_tp_too_where_its_ranks_share_experts_out(ep):
    """At a byte per second: of the rows of a rank all but those for its own experts, out and back, both ways."""
    plan = Plan(tp=2, dp=2, ep=ep, experts_in_data=ep > 1, sequence_parallel=True)
    timer = StepTimer(EXPERTS, plan, machine(4, inside=UNIT), 64, 4, MEGATRON_TIME)
    size, rows = 2 * ep, 2 * 64 // 2 * EXPERTS.num_experts_per_token
    sent = rows * EXPERTS.hidden_size * 4 * (size - 1) // size  # numbers of 32 bits
    assert calls_of(timer.times)["ep"] == pytest.approx(6 * 4 * sent, rel=0.01)  # of six layers


def test_experts_that_the_ranks_of_tp_cannot_share_out_have_no_seconds():
    plan = Plan(tp=4, dp=4, ep=4, experts_in_data=True, sequence_parallel=True)
    assert step_time(EXPERTS, plan, machine(16), 64, 16).seconds > 0
    with pytest.raises(ValueError, match="experts of a rank of ep divide among the ranks of tp, got 2 for tp 4"):
        step_time(EXPERTS, plan, machine(16), 64, 16, MEGATRON_TIME)


@pytest.mark.parametrize(("name", "pp"), list(product(schedules.names(synchronous=True), (2, 4))))
def test_a_step_is_never_faster_than_its_busiest_rank(name, pp):
    plan = Plan(pp=pp, dp=2, num_microbatches=16, schedule=name)
    config = replace(TINY, num_layers=64)
    found = step_time(config, plan, machine(2 * pp, FREE, FREE), 64, 64)
    assert max(found.busy) <= found.pipeline <= found.seconds
    assert 0 <= found.bubble < 1
    assert all(
        sum(spent.values()) == pytest.approx(busy, rel=1e-3)
        for spent, busy in zip(found.spent, found.busy, strict=True)
    )


def test_1f1b_of_equal_stages_has_its_closed_form():
    config = replace(TINY, num_layers=32)
    plan = Plan(pp=4, num_microbatches=12, layers=(8, 8, 8, 8))
    timer = StepTimer(config, plan, machine(4), 64, 12, LAB_TIME)
    table = timer.cost.per_stage(4)
    equal = replace(timer.cost, F=table["F"][1], I=table["I"][1], W=table["W"][1], latency=0, transfer=0)
    timer.__dict__["cost"] = equal
    assert timer.result.pipeline * 1e9 == pytest.approx((12 + 3) * (equal.F + equal.I + equal.W))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_and_weights_take_their_bytes(zero):
    """2 (N - 1) / N of the gradients in 32 bits; a scatter and a gather; a scatter in every backward; gathers."""
    plan = Plan(dp=4, zero=zero, num_microbatches=3)
    cluster = machine(4, inside=LinkClass("slow", 1e-3))
    found = step_time(TINY, plan, cluster, 64, 12)
    free = step_time(TINY, plan, machine(4), 64, 12)
    each = TINY.num_parameters() * 4 * 3 / 4 / 1e-3
    passes = {0: 2, 1: 2, 2: 3 + 1, 3: 3 * 3}[zero]
    assert found.seconds - free.seconds == pytest.approx(passes * each, rel=1e-3)


def test_sums_hide_behind_the_backward_where_the_rules_say_so():
    plan, cluster = Plan(pp=4, dp=2, zero=1, num_microbatches=8, precision="bfloat16"), Cluster.of("h100", 8)
    open_, hidden = (
        step_time(LLAMA3_8B, plan, cluster, 8192, 16, TimeRules("x", hides_gradients=hides)) for hides in (False, True)
    )
    assert open_.pipeline == hidden.pipeline
    assert max(hidden.gradients) < max(open_.gradients)
    assert hidden.seconds < open_.seconds


@pytest.mark.parametrize("rules", [LAB_TIME, MEGATRON_TIME])
def test_what_is_slower_takes_longer(rules):
    plan = Plan(pp=2, dp=2, cp=2, tp=2, zero=1, num_microbatches=4, precision="bfloat16", sequence_parallel=True)
    cluster = Cluster.of("h100", 16)
    base = step_time(LLAMA3_8B, plan, cluster, 8192, 32, rules).seconds
    slower = [
        replace(cluster, between=replace(cluster.between, bandwidth=cluster.between.bandwidth / 8)),
        replace(cluster, inside=replace(cluster.inside, bandwidth=cluster.inside.bandwidth / 8)),
        replace(cluster, accelerator=replace(cluster.accelerator, memory_bandwidth=1e12)),
        replace(cluster, accelerator=replace(cluster.accelerator, peaks={"bfloat16": 5e14})),
    ]
    assert all(step_time(LLAMA3_8B, plan, one, 8192, 32, rules).seconds > base for one in slower)
    assert step_time(LLAMA3_8B, replace(plan, recompute=True), cluster, 8192, 32, rules).seconds > base


@pytest.mark.parametrize(
    ("plan", "axis", "expected"),
    [
        (Plan(dp=4, tp=4), "tp", (4, 4)), (Plan(dp=4, tp=4), "dp", (4, 2)), (Plan(dp=2, tp=16), "tp", (16, 8)),
        (Plan(pp=4, tp=8), "pp", (4, 1)), (Plan(pp=4, tp=2), "pp", (4, 4)),
        (Plan(dp=16, ep=8, experts_in_data=True), "ep", (8, 8)),
        (Plan(dp=16, tp=2, ep=8, experts_in_data=True), "ep", (8, 4)),
        (Plan(dp=16, ep=4, experts_in_data=True), "edp", (4, 2)),
    ],
)  # fmt: skip
def test_groups_know_how_many_of_them_share_a_node(plan, axis, expected):
    """Counted beside the grid's own groups on nodes of eight."""
    assert Group.along(plan, axis, 8)[1:] == expected
    groups = plan.topology.groups(axis)
    shared = {max(sum(rank // 8 == node for rank in group) for node in range(64)) for group in groups}
    assert (len(groups[0]), max(shared)) == expected


def test_a_ring_through_nodes_has_a_card_for_each_of_its_ranks_there():
    cluster = Cluster(Accelerator("x", {"float32": 1.0}, 1, 1.0), 64, 8, LinkClass("in", 100.0), LinkClass("out", 10.0))
    links = Links(cluster)
    assert links.collective(Group("dp", 8, 8), 800.0) == pytest.approx(7.0)
    assert links.collective(Group("dp", 8, 1), 800.0) == pytest.approx(70.0)
    assert links.collective(Group("dp", 16, 4), 800.0) == pytest.approx(800 * 15 / 16 / 40)
    assert links.all_to_all(Group("ep", 16, 8), 1600.0) == pytest.approx(80.0)
    assert links.collective(Group("dp", 1, 1), 800.0) == 0.0


def test_a_missing_peak_and_odd_batches_are_refused():
    with pytest.raises(ValueError, match="has no peak for float32, known are bfloat16, float8"):
        step_time(TINY, Plan(), Cluster.of("h100", 1), 64, 1)
    with pytest.raises(ValueError, match="divide among"):
        step_time(TINY, Plan(dp=4), machine(4), 64, 6)
    found = step_time(TINY, Plan(), machine(1), 64, 1)
    with pytest.raises(ValueError, match="tokens above 0"):
        found.hours(0)
    with pytest.raises(ValueError, match="factor is above 0"):
        found.calibrated(0)
    with pytest.raises(ValueError, match="price"):
        found.cost(1e12, -1)


def test_a_step_says_what_it_costs():
    found = step_time(
        GptConfig(51200, 1024, 4, 16), Plan(dp=2, precision="bfloat16"), Cluster.of("a100-80", 2), 1024, 4
    )
    assert found.tokens == 4096
    assert found.hours(3.6e6 * found.tokens_per_second) == pytest.approx(1000)
    assert found.cost(3.6e3 * found.tokens_per_second, 2.0) == pytest.approx(4.0)
    again = found.calibrated(2.0)
    assert again.seconds == 2 * found.seconds
    assert again.mfu == found.mfu / 2
    assert (again.trust, again.least) == ("fitted", pytest.approx(0.92 * again.seconds))
    assert "fitted" in str(again)
