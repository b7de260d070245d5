"""What a plan predicts of a V3-style model with latent attention: messages, sums, costs; what it refuses."""

from dataclasses import replace

import pytest
from traffic_runs import assert_exact

import dualpipe_lab as lab
from dualpipe_lab.models import PlainV3MoE, V3MoEConfig
from dualpipe_lab.plan.gradient_traffic import parts_of
from dualpipe_lab.tp import LatentSizes

SIZES = LatentSizes(query_rank=6, kv_rank=5, content=4, position=2, value=3)
V3 = V3MoEConfig(
    vocabulary_size=19, hidden_size=8, num_layers=3, num_heads=2, ffn_size=10, expert_ffn_size=6, balance=0.3,
    latent=SIZES,
)  # fmt: skip
DIRECT = replace(V3, latent=replace(SIZES, query_rank=None, kv_rank=30))  # a latent longer than keys and values

PLANS = [
    lab.Plan(ep=2, tp=2, num_microbatches=2, zero=1),
    lab.Plan(dp=2, tp=2, sequence_parallel=True, recompute=True, precision="bfloat16", zero=3),
    lab.Plan(cp=2, tp=2, sequence_parallel=True, layout="striped"),
    lab.Plan(cp=2, ep=2, recompute=True, zero=2),
    lab.Plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe", overlap=True, recompute=True),
    lab.Plan(pp=2, tp=2, num_microbatches=4, schedule="dualpipe", overlap=True, sequence_parallel=True),
    lab.Plan(pp=2, cp=2, num_microbatches=2, layers=(1, 2)),
]


def test_a_step_sends_what_the_plan_says():
    for place, config in enumerate((V3, DIRECT)):
        assert_exact(PLANS[place::2], config)


def test_costs_sums_and_parameters_are_those_of_the_model():
    for config in (V3, DIRECT):
        model = PlainV3MoE(config)
        numels = [parameter.numel() for parameter in model.parameters()]
        assert [part.numel for part in parts_of(lab.Plan(), config, 0)] == numels
        idle = (config.num_experts - config.num_experts_per_token) * config.expert_parameters
        layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
        assert config.layer_costs == (layers[0], layers[1] - idle, layers[2] - idle)
    rows = lab.Plan(tp=2, dp=2, sequence_parallel=True).sums(V3)
    assert [str(found) for found in rows.of("latents").sums] == ["tp (0 1 and 1 more)", "dp (0 2 and 1 more)"]
    assert rows.of("attention").sharded == ("tp",)
    assert rows.of("latents").copied == ("dp", "tp")


@pytest.mark.parametrize(
    ("plan", "changes", "message"),
    [
        (lab.Plan(tp=4), {}, "num_heads must divide among the ranks, got 2 on 4"),
        (lab.Plan(cp=2), {"kv_rank": 40, "value": 9}, "travel round the ring of cp in one width"),
        (lab.Plan(), {"position": 3}, "rotary positions turn pairs of features, got position=3"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_process_starts(plan, changes, message):
    with pytest.raises(ValueError, match=message):
        plan.check(replace(V3, latent=replace(SIZES, **changes)))
