"""Evaluations, texts, averages, bytes and tied tables are the same under every plan."""

from dataclasses import replace

import pytest
import torch
from training_runs import LLAMA, OPTIONS, TEXT, V3, check, plan, run

import dualpipe_lab as lab
from dualpipe_lab import data, models, train

EXTRAS = {"evaluation": data.frozen_corpus("evaluation"), "evaluate_every": 5, "num_evaluations": 2}
SAMPLE = {"sample": "A rank ", "sample_length": 20, "temperature": 0.0}
PLANS = [
    plan(pp=2, cp=2, num_microbatches=4, schedule="dualpipe"),
    plan(dp=2, tp=2, zero=3),
    plan(pp=2, tp=2, num_microbatches=2, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def alone():
    return run(LLAMA, plan(), weights=True, **EXTRAS, **SAMPLE)


def test_an_evaluation_is_the_mean_loss_of_its_tokens(alone):
    model = models.PlainLlama(LLAMA, torch.float64)
    model.load_state_dict(alone.weights())
    sampler = train.Sampler(EXTRAS["evaluation"], 16, 8)
    with torch.no_grad():
        losses = [float(model.loss(batch.inputs[0], batch.targets[0])) for batch in map(sampler.batch, range(2))]
    assert alone.metrics[-1].evaluation == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert [row.evaluation is None for row in alone.metrics] == [True] * 4 + [False]


def test_a_text_goes_on_with_the_likeliest_byte_of_the_model(alone):
    model = models.PlainLlama(LLAMA, torch.float64)
    model.load_state_dict(alone.weights())
    text = list(b"A rank ")
    for _ in range(20):
        with torch.no_grad():
            text.append(int(model(torch.tensor([text[-16:]]))[0, -1].argmax()))
    assert alone.text == bytes(text).decode(errors="replace")


def test_a_v3_model_evaluates_and_writes_though_its_last_stage_has_a_loss_of_its_own():
    chosen = plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe")
    result = run(V3, chosen, weights=True, bias_speed=0.0, **EXTRAS, **SAMPLE)
    model = models.PlainV3MoE(replace(V3, balance=0.0), torch.float64)
    model.load_state_dict(result.weights())
    sampler = train.Sampler(EXTRAS["evaluation"], 16, 8)
    with torch.no_grad():
        losses = [float(model.loss(batch.inputs[0], batch.targets[0])) for batch in map(sampler.batch, range(2))]
    assert result.metrics[-1].evaluation == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert result.text.startswith("A rank ")
    assert "\0" not in result.text, "logits of zeros"
    assert len(result.timeline.steps()) == 1


@pytest.mark.parametrize("chosen", PLANS, ids=str)
def test_a_plan_evaluates_and_writes_as_one_rank_does(alone, chosen):
    result = run(LLAMA, chosen, **EXTRAS, **SAMPLE)
    assert result.metrics[-1].evaluation == pytest.approx(alone.metrics[-1].evaluation, rel=1e-10)
    assert result.text == alone.text


def test_averaged_weights_are_evaluated_and_the_training_goes_on_with_its_own(alone):
    single = run(LLAMA, plan(), ema=0.5, **EXTRAS)
    for zero in (2, 3):
        ranks = run(LLAMA, plan(dp=2, zero=zero), ema=0.5, **EXTRAS)
        assert ranks.losses == pytest.approx(alone.losses, rel=1e-10)
        assert ranks.metrics[-1].evaluation == pytest.approx(single.metrics[-1].evaluation, rel=1e-10)
    assert abs(single.metrics[-1].evaluation - alone.metrics[-1].evaluation) > 1e-3


@pytest.mark.parametrize(
    "chosen", [plan(dp=2, tp=2, zero=1), plan(pp=2, dp=2, num_microbatches=4, schedule="dualpipe")], ids=str
)
def test_a_step_sends_the_bytes_that_the_plan_predicts(chosen):
    result = run(LLAMA, chosen, steps=3)
    expected = chosen.traffic(LLAMA, OPTIONS["global_batch"], OPTIONS["sequence_length"])
    assert result.metrics[-1].sent_bytes == tuple(expected.sent(rank=rank) for rank in range(chosen.world_size))


def test_a_tied_table_on_two_stages_trains_as_in_one_process():
    config = replace(LLAMA, tied=True)
    expected = train.reference(config, TEXT, 5, **OPTIONS)
    for chosen in (
        plan(pp=2, num_microbatches=2),
        plan(pp=2, dp=2, num_microbatches=4, schedule="dualpipe", zero=1),
        plan(pp=2, dp=2, num_microbatches=4, schedule="dualpipev", zero=3),
    ):
        check(run(config, chosen, weights=True), expected)


def test_a_v3_model_trains_as_in_one_process_with_experts_beside_and_inside_of_dp():
    expected = train.reference(V3, TEXT, 5, **OPTIONS)
    for chosen in (
        plan(dp=2, ep=2, experts_in_data=True, zero=2),
        plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe", zero=1),
        plan(tp=2, ep=2, cp=2),
    ):
        check(run(V3, chosen, weights=True), expected)


def test_bf16_with_masters_follows_fp32():
    options = {"steps": 20}
    wide, narrow = (run(LLAMA, lab.Plan(dp=2, precision=name), **options) for name in ("float32", "bfloat16"))
    assert narrow.losses == pytest.approx(wide.losses, rel=0.03)
    assert narrow.losses[-1] < narrow.losses[0] - 0.5
