"""A plan's prediction of messages and bytes equals the ledger of a step, on every rank and for every operation."""

import pytest
from traffic_runs import assert_exact

import dualpipe_lab as lab
from dualpipe_lab.models import LlamaConfig, V3MoEConfig

CONFIG = LlamaConfig(
    vocabulary_size=19, hidden_size=8, ffn_size=10, num_layers=5, num_heads=4, num_kv_heads=2, qk_norm=True
)
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
    copies = [lab.Plan(tp=4), lab.Plan(tp=4, sequence_parallel=True)]  # more ranks than key heads
    nodes = [lab.Plan(dp=4, zero=zero, hybrid=True, ranks_per_node=2) for zero in (1, 3)]
    assert_exact(pipelines + sharded + uneven + copies + nodes, CONFIG)


def test_three_axes_send_what_the_plan_says():
    fields = {"num_microbatches": 4, "cp": 2, "tp": 2, "pp": 2, "layout": "striped", "sequence_parallel": True}
    assert_exact([lab.Plan(**fields, schedule=name, zero=2) for name in ("dualpipe", "dualpipev")], CONFIG)


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
        ({"ep": 2}, V3MoEConfig(), 2, "counted for a LlamaConfig, whose messages do not depend on a router"),
        ({"pp": 2}, LlamaConfig(tied=True), 2, "counted without tied stages, got pp 2"),
        ({"tp": 3}, CONFIG, 3, "num_heads must divide among the ranks"),
    ],
)
def test_what_is_not_known_exactly_is_refused(fields, config, batch_size, message):
    with pytest.raises(ValueError, match=message):
        lab.Plan(**fields).traffic(config, batch_size, LENGTH)
