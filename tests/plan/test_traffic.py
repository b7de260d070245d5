"""A plan's prediction of messages and bytes equals the ledger of a step, on every rank and for every operation."""

from dataclasses import replace

import pytest
from traffic_runs import assert_exact

import dualpipe_lab as lab
from dualpipe_lab.models import LlamaConfig, V3MoEConfig

CONFIG = LlamaConfig(
    vocabulary_size=19, hidden_size=8, ffn_size=10, num_layers=5, num_heads=4, num_kv_heads=2, qk_norm=True
)
V3 = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, ffn_size=10, num_layers=5, num_heads=4, num_kv_heads=2, expert_ffn_size=6,
    num_experts=4, num_groups=2, num_groups_per_token=1,
)  # fmt: skip
QWEN3_MOE = replace(
    V3, num_groups=1, num_groups_per_token=1, num_shared_experts=0, scoring="softmax", normalise=False, scale=1.0,
    selection_bias=False, qk_norm=True, num_kv_heads=1,
)  # fmt: skip
LENGTH = 8
SYNCHRONOUS = lab.schedules.names(synchronous=True)


def test_two_ranks_of_data_and_of_tensors_send_what_the_plan_says():
    zeros = [
        lab.Plan(dp=2, num_microbatches=2, zero=zero, precision=precision, recompute=zero == 1)
        for zero in (0, 1, 2, 3)
        for precision in ("float64", "bfloat16")
    ]
    tensors = [
        lab.Plan(tp=2, num_microbatches=2, sequence_parallel=sharded, recompute=again)
        for sharded in (False, True)
        for again in (False, True)
    ]
    tensors += [lab.Plan(tp=2, sequence_parallel=sharded, loss_chunk=3) for sharded in (False, True)]
    zeros.append(lab.Plan(dp=2, zero=3, loss_chunk=3))
    rings = [
        lab.Plan(cp=2, layout=layout, zero=zero) for zero, layout in enumerate(("contiguous", "zigzag", "striped"))
    ]
    assert_exact(zeros + tensors + rings, CONFIG)


def test_every_synchronous_schedule_sends_what_the_plan_says():
    assert_exact([lab.Plan(pp=2, num_microbatches=4, schedule=name) for name in SYNCHRONOUS], CONFIG)


def test_two_axes_send_what_the_plan_says():
    pipelines = [
        lab.Plan(pp=2, dp=2, num_microbatches=4, schedule=name, zero=zero)
        for name in ("zero_bubble_h1", "dualpipe")
        for zero in (0, 1, 2, 3)
    ]
    sharded = [
        lab.Plan(pp=2, tp=2, num_microbatches=4, schedule=name, sequence_parallel=True, recompute=name == "dualpipev")
        for name in ("dualpipe", "dualpipev", "zbv")
    ]
    uneven = [lab.Plan(pp=2, cp=2, num_microbatches=2, layout="striped", layers=(4, 1))]
    copies = [lab.Plan(tp=4), lab.Plan(tp=4, sequence_parallel=True)]  # more ranks than KV heads
    nodes = [lab.Plan(dp=4, zero=zero, hybrid=True, ranks_per_node=2) for zero in (1, 3)]
    nodes += [lab.Plan(dp=2, cp=2, zero=3, hybrid=True, ranks_per_node=2)]  # the copies on a node differ along cp
    assert_exact(pipelines + sharded + uneven + copies + nodes, CONFIG)


def test_three_axes_send_what_the_plan_says():
    fields = {"num_microbatches": 4, "cp": 2, "tp": 2, "pp": 2, "layout": "striped", "sequence_parallel": True}
    assert_exact([lab.Plan(**fields, schedule=name, zero=2) for name in ("dualpipe", "dualpipev")], CONFIG)


def test_two_ranks_of_experts_send_what_the_plan_says_given_the_routers_counts():
    axes = [lab.Plan(ep=2, zero=zero, num_microbatches=2, recompute=zero == 1) for zero in (0, 1, 2, 3)]
    within = [lab.Plan(dp=2, ep=2, experts_in_data=True, zero=zero) for zero in (0, 1, 3)]
    tensors = [lab.Plan(tp=2, sequence_parallel=sharded, recompute=not sharded) for sharded in (False, True)]
    rings = [lab.Plan(cp=2, zero=2), lab.Plan(cp=2, ep=2, experts_in_data=True, recompute=True)]
    pipelines = [lab.Plan(pp=2, num_microbatches=4, schedule=name) for name in ("dualpipe", "zbv", "1f1b")]
    assert_exact(axes + within + tensors + rings + pipelines, V3)


def test_four_ranks_with_experts_send_what_the_plan_says_given_the_routers_counts():
    pipelines = [
        lab.Plan(pp=2, ep=2, num_microbatches=4, schedule=name, zero=zero)
        for name, zero in (("dualpipe", 0), ("dualpipe", 2), ("dualpipev", 3), ("zero_bubble_h1", 1))
    ]
    others = [
        lab.Plan(dp=2, ep=2, zero=1),
        lab.Plan(dp=4, ep=2, experts_in_data=True, zero=2),
        lab.Plan(ep=2, tp=2, sequence_parallel=True),
        lab.Plan(ep=2, cp=2, layout="striped"),
    ]
    assert_exact(pipelines + others, V3)


def test_experts_behind_normed_heads_send_what_the_plan_says_given_the_routers_counts():
    plans = [
        lab.Plan(ep=2, zero=3, num_microbatches=2),
        lab.Plan(tp=2, sequence_parallel=True, recompute=True),
        lab.Plan(dp=2, zero=2, recompute=True),
        lab.Plan(pp=2, num_microbatches=4, schedule="dualpipe"),
    ]
    assert_exact(plans, QWEN3_MOE)
    assert_exact([lab.Plan(pp=2, tp=2, num_microbatches=4, schedule="dualpipe", overlap=True)], QWEN3_MOE)


def test_overlapped_experts_send_what_the_plan_says_given_the_routers_counts():
    pipelines = [
        lab.Plan(pp=2, num_microbatches=4, schedule=name, overlap=True, recompute=again, **{axis: 2})
        for name, axis, again in (
            ("dualpipe", "ep", False), ("dualpipev", "ep", True), ("paired_zero_bubble_h1", "cp", True),
        )
    ]  # fmt: skip
    tensors = lab.Plan(
        pp=2, tp=2, num_microbatches=4, schedule="dualpipe", overlap=True, recompute=True, sequence_parallel=True
    )
    assert_exact([*pipelines, tensors], V3)


def test_stages_in_pieces_are_gathered_as_the_plan_says():
    """Each is one unit of ZeRO-3; the pairs of `paired_` schedules have both halves on one stage."""
    plans = [
        lab.Plan(pp=2, dp=2, ep=2, experts_in_data=True, num_microbatches=4, schedule=name, layers=layers, zero=3,
                 overlap=True, recompute=again)
        for name, layers, again in (
            ("dualpipe", None, False), ("dualpipev", None, True), ("dualpipev", (1, 1, 1, 2), False),
            ("paired_1f1b", None, False), ("paired_zero_bubble_h1", (0, 5), True), ("paired_interleaved", None, False),
        )
    ]  # fmt: skip
    nodes = lab.Plan(
        pp=2, cp=2, dp=2, num_microbatches=4, schedule="dualpipe", zero=3, overlap=True, hybrid=True, ranks_per_node=2
    )
    assert_exact(plans, V3)
    assert_exact([nodes], V3)


def test_a_tied_table_on_two_stages_sends_what_the_plan_says():
    plans = [
        lab.Plan(pp=2, num_microbatches=4, schedule=name, zero=zero, dp=2)
        for name, zero in (
            ("1f1b", 0),
            ("1f1b", 1),
            ("interleaved", 2),
            ("gpipe", 3),
            ("dualpipe", 1),
            ("dualpipev", 2),
        )
    ]
    assert_exact([*plans, lab.Plan(pp=2, tp=2, num_microbatches=2)], replace(CONFIG, tied=True))
    assert_exact(
        [lab.Plan(pp=4, num_microbatches=8, schedule=name) for name in ("1f1b", "dualpipe")], replace(CONFIG, tied=True)
    )


def test_two_ranks_that_predict_a_second_token_send_what_the_plan_says():
    second = {"mtp": 0.3}
    data = [lab.Plan(dp=2, zero=zero, num_microbatches=2, recompute=zero == 1, **second) for zero in (0, 1, 2, 3)]
    experts = [lab.Plan(ep=2, **second), lab.Plan(dp=2, ep=2, experts_in_data=True, zero=3, **second)]
    tensors = [
        lab.Plan(tp=2, sequence_parallel=sharded, recompute=again, **second)
        for sharded in (False, True)
        for again in (False, True)
    ]
    rings = [lab.Plan(cp=2, zero=2, recompute=True, **second)]
    pipelines = [
        lab.Plan(pp=2, num_microbatches=4, schedule=name, recompute=name == "zbv", loss_chunk=3, **second)
        for name in ("1f1b", "dualpipe", "zbv")
    ]
    assert_exact(data + experts + tensors + rings + pipelines, V3)


def test_four_ranks_that_predict_a_second_token_send_what_the_plan_says():
    second = {"mtp": 0.3, "num_microbatches": 4, "pp": 2}
    sharded = {"sequence_parallel": True, "recompute": True}
    pipelines = [
        lab.Plan(dp=2, schedule="1f1b", zero=3, **second),
        lab.Plan(dp=2, schedule="dualpipe", zero=1, **second),
        lab.Plan(dp=2, schedule="dualpipe", zero=3, **second),
        lab.Plan(dp=2, schedule="zero_bubble_h1", zero=3, **second),
        lab.Plan(dp=2, schedule="dualpipev", zero=2, layers=(2, 1, 2, 0), **second),
        lab.Plan(tp=2, schedule="dualpipe", **sharded, **second),
        lab.Plan(tp=2, schedule="dualpipev", **second),
    ]
    overlapped = [
        lab.Plan(ep=2, schedule="dualpipe", overlap=True, **second),
        lab.Plan(tp=2, schedule="dualpipe", overlap=True, **sharded, **second),
        lab.Plan(cp=2, schedule="dualpipev", overlap=True, recompute=True, loss_chunk=3, **second),
        lab.Plan(dp=2, schedule="dualpipev", overlap=True, loss_chunk=3, zero=3, **second),
        lab.Plan(dp=2, schedule="paired_zero_bubble_h1", overlap=True, zero=3, **second),
    ]
    assert_exact(pipelines + overlapped, V3)


def test_overlapped_experts_with_a_loss_in_chunks_send_what_the_plan_says():
    plans = [
        lab.Plan(pp=2, num_microbatches=4, schedule=name, overlap=True, loss_chunk=3, **fields)
        for name, fields in (
            ("dualpipe", {"tp": 2, "sequence_parallel": True}), ("dualpipev", {"dp": 2, "zero": 3}),
            ("paired_zero_bubble_h1", {"dp": 2, "zero": 3}),
        )
    ]  # fmt: skip
    assert_exact(plans, V3)


def test_without_counts_the_prediction_says_uniform_routing_and_has_the_counts_of_calls():
    plan, batch = lab.Plan(ep=2, num_microbatches=2), 8
    uniform, skewed = (
        plan.traffic(V3, batch, LENGTH),
        {(rank, layer): [64, 0, 0, 0] for rank in (0, 1) for layer in range(1, 5)},
    )
    assert str(uniform).splitlines()[0].endswith("; uniform routing")
    known = plan.traffic(V3, batch, LENGTH, skewed)
    assert "uniform" not in str(known)
    assert {name: found[0] for name, found in uniform.calls(0).items()} == {n: f[0] for n, f in known.calls(0).items()}
    # all rows are in the first rank's expert: 64 of the other rank's travel, 8 numbers of 4 bytes, there and back twice
    assert known.ledger.sent("all_to_all_single", 1) - 2 * 4 * 2 * 8 == 4 * 64 * 8 * 4 * 2
    assert uniform.ledger.sent("all_to_all_single", 1) - 2 * 4 * 2 * 8 == 4 * 64 * 8 * 4 * 2
    assert known.ledger.received("all_to_all_single", 0) == known.ledger.sent("all_to_all_single", 1)


def test_buckets_are_those_of_the_optimizers():
    from dualpipe_lab.dp.buckets import BUCKET_BYTES
    from dualpipe_lab.plan import gradient_traffic

    assert gradient_traffic.BUCKET_BYTES == BUCKET_BYTES


def test_a_large_model_has_the_closed_forms_bytes():
    config = LlamaConfig(
        vocabulary_size=32_000, hidden_size=1024, ffn_size=2816, num_layers=4, num_heads=16, num_kv_heads=8
    )
    step = lab.Plan(dp=4, zero=1, num_microbatches=2).traffic(config, batch_size=16, sequence_length=128)
    numel, padding = config.num_parameters(), 4 * len(step.ledger.ranks) * 64
    expected = lab.dp.sent_bytes("zero1", 4, numel + -numel % 4, precision=lab.dp.FP32)
    assert expected <= step.sent(0, "gradients") <= expected + padding
    tokens = 2 * 128
    step = lab.Plan(tp=4).traffic(config, batch_size=2, sequence_length=128)
    layers = 4 * lab.tp.layer_bytes(tokens, 1024, 4, 4)
    ends = 2 * 2 * 3 * tokens * 1024 * 4 // 4  # the embedding's output, the gradient of the head's input
    assert step.sent(0, "layers") == layers + ends + lab.tp.cross_entropy_bytes(tokens, 4)


def test_a_step_s_traffic_prints_and_adds_up():
    step = lab.Plan(pp=2, dp=2, num_microbatches=2).traffic(CONFIG, batch_size=8, sequence_length=LENGTH)
    assert str(step).splitlines()[0].endswith("4 ranks, float32; 8 sequences of 8 per step")
    assert "all_reduce" in str(step)
    assert "<table" in step._repr_html_()
    assert step.sent() == sum(step.sent(rank, part) for rank in range(4) for part in step.parts)
    silent = lab.Plan(pp=2, dp=2, num_microbatches=2).traffic(CONFIG, 8, LENGTH, clips=False)
    assert silent.sent(part="norm") == 0 < step.sent(part="norm")


@pytest.mark.parametrize(
    ("fields", "config", "batch_size", "message"),
    [
        ({"dp": 2, "num_microbatches": 3}, CONFIG, 8, "2 data ranks x 3 microbatches, got 8; use 12"),
        ({"dp": 2}, CONFIG, 0, "2 data ranks x 1 microbatches, got 0; use 2"),
        ({"tp": 3}, CONFIG, 3, "num_heads must divide among the ranks"),
    ],
)
def test_what_does_not_divide_is_refused(fields, config, batch_size, message):
    with pytest.raises(ValueError, match=message):
        lab.Plan(**fields).traffic(config, batch_size, LENGTH)
