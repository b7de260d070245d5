"""A training of a Qwen3-MoE, with a balance loss of softmax scores and angles by yarn, has one process's curve."""

from dataclasses import replace

import pytest
import torch
from training_runs import OPTIONS, TEXT, V3, check, plan, run

from dualpipe_lab import models, tp, train

QWEN3_MOE = replace(
    V3, num_groups=1, num_groups_per_token=1, num_shared_experts=0, scale=1.0, scoring="softmax", normalise=False,
    selection_bias=False, qk_norm=True, rope_scaling=tp.YarnScaling(4.0, 8.0, beta_fast=4.0), num_kv_heads=1,
)  # fmt: skip
PLANS = [
    plan(ep=2, tp=2, sequence_parallel=True),
    plan(pp=2, cp=2, num_microbatches=2, recompute=True, zero=2),
    plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipev", overlap=True),
]


@pytest.fixture(scope="module")
def expected():
    return train.reference(QWEN3_MOE, TEXT, 5, **OPTIONS)


@pytest.mark.parametrize("chosen", PLANS, ids=str)
def test_a_qwen3_moe_trains_as_in_one_process(expected, chosen):
    check(run(QWEN3_MOE, chosen, weights=True), expected)


def test_a_qwen3_moe_goes_through_checkpoints_and_is_published(tmp_path, expected):
    run(QWEN3_MOE, plan(dp=2, zero=3), steps=3, folder=tmp_path / "saved", save_every=3)
    result = run(QWEN3_MOE, plan(ep=2), resume=tmp_path / "saved", weights=True)
    for name, weight in result.weights().items():
        assert (weight - expected.weights()[name]).abs().max() < 1e-8
    model = train.read_model(tmp_path / "saved")
    assert model.config == QWEN3_MOE
    models.save_pretrained(model, tmp_path / "published")
    again = models.PlainV3MoE(models.config_from_pretrained(tmp_path / "published"), torch.float64)
    models.load_pretrained(again, tmp_path / "published")
    assert all(map(torch.equal, again.parameters(), model.parameters()))
