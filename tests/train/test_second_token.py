"""A V3 model trained on a second token: curves of one process, resumed, evaluated and written without its layer."""

from dataclasses import replace

import pytest
import torch
from training_runs import LLAMA, OPTIONS, TEXT, V3, check, plan, run, worst

from dualpipe_lab import data, models, tp, train
from dualpipe_lab.dp.checkpoint import Checkpoint, latest
from dualpipe_lab.models.mtp import MTP_PREFIX
from dualpipe_lab.train.saved_model import is_second

WEIGHT, STEPS = 0.3, 3
EXTRAS = {"evaluation": data.frozen_corpus("evaluation"), "evaluate_every": STEPS}
PLANS = [
    plan(dp=2, num_microbatches=2, zero=3, mtp=WEIGHT),
    plan(pp=2, cp=2, num_microbatches=4, schedule="zero_bubble_h1", mtp=WEIGHT, loss_chunk=5),
    plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe", mtp=WEIGHT, overlap=True, loss_chunk=5),
    plan(pp=2, tp=2, num_microbatches=4, schedule="dualpipev", layers=(1, 1, 1, 1), mtp=WEIGHT, overlap=True,
         sequence_parallel=True, recompute=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    return train.reference(V3, TEXT, STEPS, mtp=WEIGHT, **OPTIONS)


@pytest.mark.parametrize("chosen", PLANS, ids=str)
def test_a_plan_trains_as_one_process_and_the_next_plan_goes_on(expected, chosen, tmp_path):
    """Saved after step 2 by this plan, and ended by the one before it in the list."""
    assert any(name.startswith(MTP_PREFIX) for name in expected.weights())
    first = run(V3, chosen, steps=2, folder=tmp_path)
    assert first.losses == pytest.approx(expected.losses[:2], rel=1e-10)
    other = PLANS[PLANS.index(chosen) - 1]
    result = run(V3, other, steps=STEPS, resume=tmp_path, weights=True)
    numbers, weights = worst(result, train.Result("", expected.metrics[2:], state=expected.weights()))
    assert numbers < 1e-10
    assert weights < 1e-8


def test_documents_of_unequal_length_train_as_one_process():
    """The last position of every document has no second target, wherever its padding begins."""
    texts = [TEXT[start : start + 5 + 3 * start % 17] for start in range(30)]
    result = run(V3, plan(num_microbatches=2, mtp=WEIGHT), steps=2, text=texts, weights=True)
    check(result, train.reference(V3, texts, 2, mtp=WEIGHT, **OPTIONS))
    other = train.reference(V3, texts, 2, **OPTIONS)
    assert abs(result.losses[0] - other.losses[0]) > 0.1


def test_evaluations_and_texts_are_those_of_the_next_token(tmp_path):
    chosen = plan(pp=2, num_microbatches=4, schedule="dualpipe", overlap=True, loss_chunk=5, mtp=WEIGHT)
    result = run(V3, chosen, steps=STEPS, folder=tmp_path, bias_speed=0.0, **EXTRAS)
    assert train.generate(tmp_path, "A rank ", 8).startswith("A rank ")
    model = train.read_model(tmp_path)
    assert type(model) is models.PlainV3MoE
    model.config = replace(V3, balance=0.0)
    batch = train.Sampler(EXTRAS["evaluation"], 16, 8).batch(0)
    with torch.no_grad():
        loss = float(model.loss(batch.inputs[0], batch.targets[0]))
    assert result.metrics[-1].evaluation == pytest.approx(loss, rel=1e-12)


def test_a_checkpoint_is_converted_without_the_second_token(tmp_path):
    config = replace(V3, latent=tp.LatentSizes(query_rank=6, kv_rank=5, content=4, position=2, value=4))
    saved = run(config, plan(mtp=WEIGHT), steps=1, folder=tmp_path / "saved").checkpoint
    train.convert(saved, tmp_path / "again", to="checkpoint")
    ours, theirs = (dict(train.read_model(path).named_parameters()) for path in (saved, tmp_path / "again"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    names = [Checkpoint(path).names() for path in (saved, latest(tmp_path / "again"))]
    assert [any(map(is_second, each)) for each in names] == [True, False]


def test_what_cannot_be_is_refused_before_any_process_starts(tmp_path):
    second = plan(mtp=WEIGHT)
    with pytest.raises(ValueError, match=r"without the layer of a second token, got start=there and mtp=0\.3"):
        run(V3, second, steps=1, start="there")
    run(V3, second, steps=1, folder=tmp_path)
    with pytest.raises(ValueError, match=r"saved with mtp=0\.3, got mtp=None; use it with"):
        run(V3, plan(), steps=2, resume=tmp_path)
    run(V3, replace(second, mtp=0.1), steps=2, resume=tmp_path)
    with pytest.raises(ValueError, match="predicted by a V3-style model, got a LlamaConfig"):
        train.reference(LLAMA, TEXT, 1, mtp=WEIGHT, **OPTIONS)
