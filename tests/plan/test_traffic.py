"""A plan's prediction of messages and bytes equals the ledger of a step, for every operation and receiver."""

from dataclasses import replace

import pytest
from dry_run import dry_run, numbers, second_step
from saved_runs import CONFIG, LENGTH, V3

import dualpipe_lab as lab
from dualpipe_lab.dp.buckets import BUCKET_BYTES
from dualpipe_lab.models import LlamaConfig, PlainV3MoE
from dualpipe_lab.plan import parameters
from dualpipe_lab.tp import LatentSizes

TIED = replace(CONFIG, tied=True)
QWEN3_MOE = replace(
    V3, num_groups=1, num_groups_per_token=1, num_shared_experts=0, scoring="softmax", normalise=False, scale=1.0,
    selection_bias=False, qk_norm=True, num_kv_heads=1,
)  # fmt: skip
LATENT = replace(V3, num_layers=3, num_heads=2, latent=LatentSizes(6, 5, content=4, position=2, value=3))
DIRECT = replace(LATENT, latent=replace(LATENT.latent, query_rank=None, kv_rank=30))  # longer than keys and values
WIDE = replace(LATENT, latent=replace(LATENT.latent, kv_rank=40, value=9))
ODD = replace(LATENT, latent=replace(LATENT.latent, position=3))
DENSE_FIRST = replace(V3, num_dense_layers=3)
SHARDED, AGAIN, CHUNK, SECOND = {"sequence_parallel": True}, {"recompute": True}, {"loss_chunk": 3}, {"mtp": 0.3}
TP = [fields | more for fields in ({}, SHARDED) for more in ({}, AGAIN)]
WITHIN = {"dp": 2, "ep": 2, "experts_in_data": True}


def pipes(*rows, **fields):
    """Plans with two ranks of pp and four microbatches: schedule, other fields."""
    return [lab.Plan(pp=2, num_microbatches=4, schedule=name, **more, **fields) for name, more in rows]


TWO = {  # by number of ranks: the plans of each model
    CONFIG: [
        *(
            lab.Plan(dp=2, num_microbatches=2, zero=zero, precision=precision, recompute=zero == 1)
            for zero in (0, 1, 2, 3)
            for precision in ("float64", "bfloat16")
        ),
        *(lab.Plan(tp=2, num_microbatches=2, **fields) for fields in TP),
        *(lab.Plan(**fields, **CHUNK) for fields in ({"tp": 2}, {"tp": 2, **SHARDED}, {"dp": 2, "zero": 3})),
        *(lab.Plan(cp=2, layout=name, zero=zero) for zero, name in enumerate(("contiguous", "zigzag", "striped"))),
        *pipes(*((name, {}) for name in lab.schedules.names(synchronous=True))),
    ],
    V3: [
        *(lab.Plan(ep=2, zero=zero, num_microbatches=2, recompute=zero == 1) for zero in (0, 1, 2, 3)),
        *(lab.Plan(zero=zero, **WITHIN) for zero in (0, 1, 3)),
        *(lab.Plan(tp=2, **fields) for fields in (AGAIN, SHARDED)),
        *(lab.Plan(cp=2, zero=2), lab.Plan(cp=2, ep=2, experts_in_data=True, recompute=True)),
        *pipes(("dualpipe", {}), ("zbv", {}), ("1f1b", {})),
        *(lab.Plan(dp=2, zero=zero, num_microbatches=2, recompute=zero == 1, **SECOND) for zero in (0, 1, 2, 3)),
        *(lab.Plan(tp=2, **fields, **SECOND) for fields in TP),
        *(lab.Plan(**fields, **SECOND) for fields in ({"ep": 2}, WITHIN | {"zero": 3}, {"cp": 2, "zero": 2} | AGAIN)),
        *pipes(("1f1b", {}), ("dualpipe", {}), ("zbv", AGAIN), **CHUNK, **SECOND),
    ],
    QWEN3_MOE: [
        *(lab.Plan(ep=2, zero=3, num_microbatches=2), lab.Plan(tp=2, **SHARDED, **AGAIN)),
        *(lab.Plan(dp=2, zero=2, recompute=True), *pipes(("dualpipe", {}))),
    ],
}
FOUR = {
    CONFIG: [
        *pipes(
            *((name, {"dp": 2, "zero": zero}) for name in ("zero_bubble_h1", "dualpipe") for zero in (0, 1, 2, 3)),
            *((name, {"tp": 2, **SHARDED}) for name in ("dualpipe", "zbv")),
            ("dualpipev", {"tp": 2, **SHARDED, **AGAIN}),
            ("1f1b", {"cp": 2, "layout": "striped", "layers": (4, 1)}),
        ),
        *(lab.Plan(tp=4, **fields) for fields in ({}, SHARDED)),  # more ranks than KV heads
        *(lab.Plan(dp=4, zero=zero, hybrid=True, ranks_per_node=2) for zero in (1, 3)),
        lab.Plan(dp=2, cp=2, zero=3, hybrid=True, ranks_per_node=2),  # the copies on a node differ along cp
    ],
    TIED: [
        *pipes(*((name, {"zero": zero}) for zero, name in enumerate(("1f1b", "1f1b", "interleaved", "gpipe"))), dp=2),
        *pipes(("dualpipe", {"dp": 2, "zero": 1}), ("dualpipev", {"dp": 2, "zero": 2}), ("1f1b", {"tp": 2})),
        *(lab.Plan(pp=4, num_microbatches=8, schedule=name) for name in ("1f1b", "dualpipe")),
    ],
    V3: [
        *pipes(("dualpipe", {"zero": 0}), ("dualpipe", {"zero": 2}), ("dualpipev", {"zero": 3}), ep=2),
        *pipes(("zero_bubble_h1", {"ep": 2, "zero": 1})),
        *(lab.Plan(dp=2, ep=2, zero=1), lab.Plan(dp=4, ep=2, experts_in_data=True, zero=2)),
        *(lab.Plan(ep=2, tp=2, **SHARDED), lab.Plan(ep=2, cp=2, layout="striped")),
        *pipes(
            ("dualpipe", {"ep": 2}),
            ("dualpipev", {"ep": 2, **AGAIN}),
            ("paired_zero_bubble_h1", {"cp": 2, **AGAIN}),
            ("dualpipe", {"tp": 2, **SHARDED, **AGAIN}),
            ("dualpipe", {"tp": 2, **SHARDED, **CHUNK}),
            ("dualpipev", {"dp": 2, "zero": 3, **CHUNK}),
            ("paired_zero_bubble_h1", {"dp": 2, "zero": 3, **CHUNK}),
            overlap=True,
        ),
        *pipes(  # pieces of each stage are one unit of ZeRO-3; `paired_` pairs have both halves on one stage
            ("dualpipe", {}),
            ("dualpipev", AGAIN),
            ("dualpipev", {"layers": (1, 1, 1, 2)}),
            ("paired_1f1b", {}),
            ("paired_zero_bubble_h1", {"layers": (0, 5), **AGAIN}),
            ("paired_interleaved", {}),
            **WITHIN,
            zero=3,
            overlap=True,
        ),
        *pipes(
            ("1f1b", {"dp": 2, "zero": 3}),
            ("dualpipe", {"dp": 2, "zero": 1}),
            ("dualpipe", {"dp": 2, "zero": 3}),
            ("zero_bubble_h1", {"dp": 2, "zero": 3}),
            ("dualpipev", {"dp": 2, "zero": 2, "layers": (2, 1, 2, 0)}),
            ("dualpipe", {"tp": 2, **SHARDED, **AGAIN}),
            ("dualpipev", {"tp": 2}),
            ("dualpipe", {"ep": 2, "overlap": True}),
            ("dualpipe", {"tp": 2, "overlap": True, **SHARDED, **AGAIN}),
            ("dualpipev", {"cp": 2, "overlap": True, **AGAIN, **CHUNK}),
            ("dualpipev", {"dp": 2, "overlap": True, "zero": 3, **CHUNK}),
            ("paired_zero_bubble_h1", {"dp": 2, "overlap": True, "zero": 3}),
            **SECOND,
        ),
    ],
    DENSE_FIRST: pipes(("zero_bubble_h1", {"dp": 2, "zero": 3, "layers": (2, 3)})),  # on one stage with experts
    QWEN3_MOE: pipes(("dualpipe", {"tp": 2, "overlap": True})),
    LATENT: [
        *(lab.Plan(ep=2, tp=2, num_microbatches=2, zero=1), lab.Plan(cp=2, tp=2, layout="striped", **SHARDED)),
        *pipes(("dualpipe", {"ep": 2, "overlap": True, **AGAIN}), ("1f1b", {"cp": 2, "layers": (1, 2)})),
    ],
    DIRECT: [
        lab.Plan(dp=2, tp=2, precision="bfloat16", zero=3, **SHARDED, **AGAIN),
        *(lab.Plan(cp=2, ep=2, zero=2, **AGAIN), *pipes(("dualpipe", {"tp": 2, "overlap": True, **SHARDED}))),
    ],
}
EIGHT = {
    CONFIG: pipes(("dualpipe", {}), ("dualpipev", {}), cp=2, tp=2, layout="striped", zero=2, **SHARDED),
    V3: pipes(("dualpipe", {"cp": 2, "dp": 2, "zero": 3, "overlap": True, "hybrid": True, "ranks_per_node": 2})),
}


THREE = {CONFIG: [lab.Plan(cp=3, layout=name) for name in ("contiguous", "striped")]}  # a ring of unequal blocks
CASES = [(config, plan) for every in (TWO, THREE, FOUR, EIGHT) for config, plans in every.items() for plan in plans]
LAUNCHED = {
    CONFIG: [
        *(lab.Plan(tp=2, **SHARDED, **AGAIN), lab.Plan(dp=2, zero=3, num_microbatches=2, **CHUNK)),
        *(lab.Plan(cp=2, layout="striped", zero=2), *pipes(("dualpipe", {}), ("zbv", {}))),
    ],
    V3: [
        *(lab.Plan(ep=2, zero=3, num_microbatches=2, **AGAIN), lab.Plan(cp=2, ep=2, experts_in_data=True, **SECOND)),
        *(lab.Plan(dp=2, zero=1, **SECOND), *pipes(("dualpipe", {"ep": 2, "overlap": True}))),
        *pipes(("dualpipev", {"dp": 2, "ep": 2, "experts_in_data": True, "zero": 3, "overlap": True})),
    ],
    TIED: pipes(("1f1b", {"dp": 2, "zero": 2})),
    LATENT: [lab.Plan(cp=2, tp=2, layout="striped", **SHARDED)],
}  # fmt: skip


def batch_of(plan):
    return 2 * plan.data_size * plan.num_microbatches


@pytest.mark.parametrize(("config", "plan"), CASES, ids=[str(plan) for _, plan in CASES])
def test_ranks_of_a_dry_run_send_what_the_plan_says(config, plan):
    """Of experts given the routers' counts, which differ along pp and cp alone."""
    found = {rank: dry_run(plan, config, rank, 2, LENGTH) for rank in range(plan.world_size)}
    routing = {(rank, layer): load for rank, (_, loads) in found.items() for layer, load in loads.items()}
    step = plan.traffic(config, batch_of(plan), LENGTH, routing)
    for rank, (measured, _) in found.items():
        assert measured == numbers(step.ledger.ranks[rank]), f"rank {rank}"
        assert sum(sent for _, sent, *_ in measured.values()) > 0, f"rank {rank}: nothing was sent"


def test_ranks_that_exist_send_what_the_plan_says():
    """As those of a dry run; their routers choose."""

    def fn(rank, world_size, cases):
        return [second_step(plan, config, 2, LENGTH) for config, plan in cases]

    cases = [(config, plan) for config, plans in LAUNCHED.items() for plan in plans]
    for size in (2, 4):
        alike = [case for case in cases if case[1].world_size == size]
        launched = lab.launch(fn, size, alike, output="collect", timeout=240)
        for number, (config, plan) in enumerate(alike):
            found = [steps[number] for steps in launched]
            routing = {(rank, layer): load for rank, (_, loads) in enumerate(found) for layer, load in loads.items()}
            step = plan.traffic(config, batch_of(plan), LENGTH, routing)
            for rank, (measured, _) in enumerate(found):
                assert measured == numbers(step.ledger.ranks[rank]), f"rank {rank}, {plan}"


def test_latents_are_parameters_that_every_rank_copies():
    for config in (LATENT, DIRECT):
        model = PlainV3MoE(config)
        numels = [weight.numel() for weight in model.parameters()]
        assert [part.numel for part in parameters.parts_of(lab.Plan(), config, 0)] == numels
        idle = (config.num_experts - config.num_experts_per_token) * config.expert_parameters
        layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
        assert config.layer_costs == (layers[0], layers[1] - idle, layers[2] - idle)
    rows = lab.Plan(tp=2, dp=2, sequence_parallel=True).sums(LATENT)
    assert rows.of("latents").cells()[3] == "tp (0 1 and 1 more), then dp (0 2 and 1 more)"
    assert rows.of("attention").sharded == ("tp",)
    assert rows.of("latents").copied == ("dp", "tp")


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


def test_a_large_model_has_the_closed_forms_bytes():
    config = LlamaConfig(
        vocabulary_size=32_000, hidden_size=1024, ffn_size=2816, num_layers=4, num_heads=16, num_kv_heads=8
    )
    assert parameters.BUCKET_BYTES == BUCKET_BYTES, "buckets are those of the optimizers"
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
        ({"cp": 2}, WIDE, 2, "travel round the ring of cp in one width"),
        ({}, ODD, 1, "rotary positions turn pairs of features, got position=3"),
    ],
)
def test_what_does_not_divide_is_refused(fields, config, batch_size, message):
    with pytest.raises(ValueError, match=message):
        lab.Plan(**fields).traffic(config, batch_size, LENGTH)
