"""The seconds of a step: FLOPs and seconds beside published ones, links by hand, and what must hold."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualpipe_lab as lab
from dualpipe_lab.cp.layouts import critical_path, make_layout, visible_pairs
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import (
    H100,
    H800,
    Hardware,
    Plan,
    collective_seconds,
    estimate,
    message_seconds,
    model_of,
)
from dualpipe_lab.plan.estimate import PARTS, _bubble, causal_pairs, model_flops
from dualpipe_lab.plan.hardware import Range, compute_seconds, exchange_seconds

LLAMA = LlamaConfig(vocabulary_size=1024, hidden_size=256, ffn_size=512, num_layers=8, num_heads=8, num_kv_heads=4)
V3 = V3MoEConfig(num_layers=4, num_heads=8, num_kv_heads=4)
BF16 = {"precision": "bfloat16"}


@pytest.mark.parametrize(("name", "full", "halved"), [("llama3-405b", 2625.4, 2524.0), ("llama3-70b", 481.4, 449.2)])
def test_a_token_of_llama_3_has_the_flops_that_frameworks_print(name, full, halved):
    """GFLOP per token at 8,192 tokens: torchtitan counts all pairs, Megatron half of them."""
    model = model_of(name)
    assert model_flops(model, 8192, causal=False) / 8192 / 1e9 == pytest.approx(full, abs=0.06)
    assert model_flops(model, 8192) / 8192 / 1e9 == pytest.approx(halved, abs=0.06)


def test_the_model_s_flops_are_six_for_each_parameter_that_a_token_uses():
    v3 = model_of("deepseek-v3")
    scores = 3 * 61 * causal_pairs(4096) * 2 * 128 * (192 + 128)
    assert (model_flops(v3, 4096) - scores) / 4096 / 6 == pytest.approx(
        37e9, rel=0.02
    )  # 37B: arXiv 2412.19437, less the lookup
    assert model_flops(v3, 4096, mtp=True) > model_flops(v3, 4096)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
def test_the_closed_form_of_the_slowest_rank_is_the_layout_s_own_count(layout):
    for num_ranks, per_rank in product(range(1, 9), (4, 6, 10)):
        length = num_ranks * per_rank
        expected = critical_path(visible_pairs(make_layout(layout, length, num_ranks)))
        assert causal_pairs(length, num_ranks, layout) == expected


def test_llama_3_8b_is_not_faster_than_a_published_run():
    """FSDP on 8 H100 has 5,762 tokens/s per GPU, compiled 6,667, with some of the activations recomputed.

    torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1: 16 sequences of 8,192 tokens; cards of 500 W.
    """
    model, plan = model_of("llama3-8b"), Plan(dp=8, zero=3, **BF16)
    none, all_of = (estimate(model, replace(plan, recompute=each), 8192, 16) for each in (False, True))
    assert 16 * 8192 / 8 / all_of.seconds.high < 5762 < 6667 < 16 * 8192 / 8 / none.seconds.low
    assert max(none.mfu, all_of.mfu) < 0.4
    found = estimate(model, replace(plan, num_microbatches=8), 8192, 64)
    assert found.mfu < 0.4
    assert found.seconds.low > 1.5 * 4.58  # 4.58 s would be 74% MFU, which no run has


def test_the_published_step_of_deepseek_v3_is_of_the_size_of_the_estimate():
    """2.664e6 H800 hours for 14.8e12 tokens (arXiv 2412.19437, table 1): 1,543 tokens/s of a GPU; theirs in float8."""
    sizes = {"pp": 16, "dp": 128, "ep": 64, "experts_in_data": True, "num_microbatches": 120, "zero": 1}
    plan = Plan(**sizes, schedule="dualpipe", overlap=True, **BF16)
    found = estimate(model_of("deepseek-v3"), plan, 4096, 15360, hardware=H800)
    assert found.tokens_per_second_per_gpu == pytest.approx(1543, rel=0.25)
    assert found.parts["ep"] == 0  # DualPipe hides it
    assert estimate(model_of("deepseek-v3"), replace(plan, overlap=False), 4096, 15360, hardware=H800).parts["ep"] > 5


def test_links_by_hand():
    hardware = Hardware("X", 1e12, 1e9, inside=100.0, card=10.0, gpus_per_node=4, latency=0.5)
    assert message_seconds(50, across_nodes=True, hardware=hardware) == 5.5
    assert message_seconds(50, across_nodes=False, hardware=hardware) == 1.0
    # 8 GPUs on 2 nodes, a tensor of 800 bytes: 600 inside, and a quarter of it over the own card, half of which stays
    assert collective_seconds(700, 8, across_nodes=True, hardware=hardware) == 0.5 + max(6.0, 10.0)
    assert collective_seconds(300, 4, across_nodes=False, hardware=hardware) == 3.5
    assert collective_seconds(75, 4, across_nodes=True, hardware=hardware) == 8.0  # one on each node
    assert exchange_seconds(70, 8, per_node=4, hardware=hardware) == 0.5 + max(0.3, 4.0)
    assert collective_seconds(9, 1, across_nodes=True) == exchange_seconds(9, 1, per_node=1) == 0.0
    assert compute_seconds(1e12, hardware, 0.5) == 2.0
    assert str(Range(0.123, 12.3)) == "0.12 to 12.30 s"
    with pytest.raises(ValueError, match="X needs card above 0, got 0; such as 5e"):
        replace(hardware, card=0)
    with pytest.raises(ValueError, match="X needs a latency of 0 seconds or more, got -1; such as 20e-6"):
        replace(hardware, latency=-1)


PLANS = [
    (LLAMA, {"dp": 2}), (LLAMA, {"tp": 4, "sequence_parallel": True}), (LLAMA, {"cp": 2, "zero": 1}),
    (LLAMA, {"pp": 4, "num_microbatches": 8}), (LLAMA, {"pp": 2, "dp": 16, "num_microbatches": 4, "zero": 2}),
    (LLAMA, {"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "dualpipe"}), (V3, {"dp": 4, "zero": 3}),
    (V3, {"dp": 16, "ep": 4, "experts_in_data": True}),
    (V3, {"pp": 2, "ep": 2, "num_microbatches": 4, "schedule": "dualpipev", "overlap": True}),
    (V3, {"pp": 2, "num_microbatches": 2, "mtp": 0.3}),
    (LLAMA, {"dp": 16, "zero": 2, "hybrid": True, "ranks_per_node": 8}),
]  # fmt: skip


@given(
    st.sampled_from(PLANS),
    st.booleans(),
    st.tuples(st.floats(0.1, 1), st.floats(0.1, 1)).map(sorted),
    st.integers(1, 3),
)
def test_an_estimate_falls_as_arithmetic_reaches_more_of_the_peak(case, recompute, utilisation, num_rows):
    model, fields = case
    plan = Plan(recompute=recompute, **fields, **BF16)
    shape = 64, plan.data_size * plan.num_microbatches * num_rows
    found = estimate(model, plan, *shape, utilisation=tuple(utilisation))
    low, high = (estimate(model, plan, *shape, utilisation=each) for each in utilisation)
    assert found.seconds == (high.point, low.point)
    assert found.seconds.low <= found.point * (1 + 1e-12) <= found.seconds.high * (1 + 2e-12)  # sums round
    assert found.point == sum(found.parts.values())
    assert list(found.parts) == list(PARTS)
    assert min(found.parts.values()) >= 0
    assert 0 < found.mfu < utilisation[1]
    faster = replace(H100, inside=2 * H100.inside, card=2 * H100.card)
    assert estimate(model, plan, *shape, hardware=faster).point <= estimate(model, plan, *shape).point


def test_a_part_is_there_where_its_axis_is():
    for model, fields in PLANS:
        plan = Plan(**fields, **BF16)
        parts = estimate(model, plan, 64, plan.data_size * plan.num_microbatches).parts
        for axis in ("tp", "cp", "pp"):
            assert (parts[axis] > 0) == (getattr(plan, axis) > 1), axis
        assert (parts["bubble"] > 0) == (plan.pp > 1 and plan.schedule != "dualpipe")  # on two ranks it has none
        assert (parts["dp"] > 0) == (plan.num_copies > 1 or (plan.mtp is not None and plan.pp > 1))
        assert (parts["ep"] > 0) == (plan.ep > 1) or plan.overlap


def test_exchanges_with_the_ranks_of_a_ring_are_those_of_experts():
    """Of 2 ranks of ep within 2 of cp; overlapped pairs hide them, and not the ring."""
    plan = Plan(pp=2, cp=2, ep=2, experts_in_data=True, num_microbatches=4, schedule="dualpipev", **BF16)
    alone, paired = (estimate(V3, replace(plan, overlap=each), 64, 4).parts for each in (False, True))
    assert alone["ep"] > paired["ep"]
    assert alone["cp"] == paired["cp"] > 0


def test_recomputation_adds_a_third_of_what_is_repeated():
    plan = Plan(dp=2, **BF16)
    kept, again = (estimate(LLAMA, replace(plan, recompute=each), 512, 2).parts["arithmetic"] for each in (False, True))
    head = compute_seconds(6 * 512 * 1024 * 256)
    assert again - head == pytest.approx(4 / 3 * (kept - head))


@pytest.mark.parametrize("schedule", lab.schedules.names(synchronous=True))
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 4), (4, 10), (4, 24), (4, 38)])
def test_the_bubble_of_many_microbatches_is_that_of_the_simulation(schedule, pp, num_microbatches):
    plan = Plan(pp=pp, num_microbatches=num_microbatches, schedule=schedule)
    try:
        timeline = lab.simulate(plan.program)
    except ValueError:
        pytest.skip("this schedule takes another number of microbatches")
    idle = min(timeline.bubble_time(rank) for rank in range(pp))
    assert _bubble(plan) == pytest.approx(float(idle / (timeline.makespan - idle)))


def test_it_prints_a_range():
    lines = str(estimate(LLAMA, Plan(dp=2, **BF16), 512, 2)).splitlines()
    assert lines[0] == "dp 2 = 2 ranks, bfloat16"
    assert lines[1].endswith(" s at a utilisation of 0.5 to 0.35")
    assert lines[2].startswith("arithmetic ")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: estimate(LLAMA, Plan(dp=2), 64, 2, utilisation=(0.5, 0.4)), "the least first, got (0.5, 0.4)"),
        (lambda: estimate(LLAMA, Plan(dp=2), 64, 2, utilisation=0), "above 0 and at most 1"),
        (lambda: estimate(LLAMA, Plan(dp=2), 64, 3), "use 4"),
        (lambda: estimate(LLAMA, Plan(tp=3), 64, 3), "the nearest plan of 3 ranks"),
    ],
)
def test_bad_input_is_refused_with_what_to_use(make, words):
    with pytest.raises(ValueError, match=r".") as found:
        make()
    assert words in str(found.value)
