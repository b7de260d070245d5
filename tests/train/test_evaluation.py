"""Evaluations and bytes are the same under every plan."""

from dataclasses import replace

import pytest
import torch
from training_runs import LLAMA, OPTIONS, V3, plan, run

from dualpipe_lab import data, models, train

EVALUATION = data.frozen_corpus("evaluation")
EXTRAS = {"evaluation": EVALUATION, "evaluate_every": 5, "batch_growth": ()}
PLANS = [
    plan(pp=2, cp=2, num_microbatches=4, schedule="dualpipe"),
    plan(dp=2, tp=2, zero=3, loss_chunk=5),
    plan(dp=2, tp=2, zero=1),
    plan(pp=2, tp=2, num_microbatches=2, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def alone():
    return run(LLAMA, plan(), weights=True, **EXTRAS)


@torch.no_grad()
def told(make, config, weights):
    """The loss of a plain model on the first batch."""
    model = make(config, torch.float64)
    model.load_state_dict(weights)
    batch = train.Sampler(EVALUATION, 16, 8).batch(0)
    return float(model.loss(batch.inputs[0], batch.targets[0]))


def test_one_rank_evaluates_as_its_model(alone):
    loss = told(models.PlainLlama, LLAMA, alone.weights())
    assert alone.metrics[-1].evaluation == pytest.approx(loss, rel=1e-12)
    assert [row.evaluation is None for row in alone.metrics] == [True] * 4 + [False]


def test_a_v3_model_evaluates_though_its_last_stage_has_a_loss_of_its_own():
    chosen = plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe")
    result = run(V3, chosen, weights=True, bias_speed=0.0, **EXTRAS)
    loss = told(models.PlainV3MoE, replace(V3, balance=0.0), result.weights())
    assert result.metrics[-1].evaluation == pytest.approx(loss, rel=1e-12)
    assert len(result.timeline.steps()) == 1


@pytest.mark.parametrize("chosen", PLANS, ids=str)
def test_a_plan_evaluates_as_one_rank_does_and_sends_what_it_predicts(alone, chosen):
    result = run(LLAMA, chosen, **EXTRAS)
    assert result.metrics[-1].evaluation == pytest.approx(alone.metrics[-1].evaluation, rel=1e-10)
    expected = chosen.traffic(LLAMA, OPTIONS["global_batch"], OPTIONS["sequence_length"])
    assert result.metrics[-1].sent_bytes == tuple(expected.sent(rank=rank) for rank in range(chosen.world_size))
