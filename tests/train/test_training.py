"""A training under a plan has the losses, norms and weights of the same training in one process."""

from dataclasses import replace

import pytest
from training_runs import LLAMA, OPTIONS, QWEN3_MOE, TEXT, V3, check, plan, run

from dualpipe_lab import train

DUALPIPE = {"pp": 2, "num_microbatches": 4, "schedule": "dualpipe"}
DUALPIPEV = DUALPIPE | {"schedule": "dualpipev"}
CASES = {
    "llama": (
        LLAMA,
        [
            plan(num_microbatches=2),
            plan(dp=2, num_microbatches=2),
            plan(dp=2, zero=3, num_microbatches=2, loss_chunk=5),
            plan(**DUALPIPEV, cp=2, zero=2),
            plan(pp=2, dp=2, tp=2, num_microbatches=2, zero=1, sequence_parallel=True),
        ],
    ),
    "one table on two stages": (
        replace(LLAMA, tied=True),
        [plan(pp=2, num_microbatches=2), plan(**DUALPIPE, dp=2, zero=1), plan(**DUALPIPEV, dp=2, zero=3)],
    ),
    "v3": (
        V3,
        [
            plan(dp=2, ep=2, experts_in_data=True, zero=2),
            plan(**DUALPIPE, ep=2, zero=1),
            plan(tp=2, ep=2, cp=2),
            plan(**DUALPIPE, ep=2, overlap=True),
            plan(**DUALPIPE, dp=2, ep=2, zero=2, overlap=True, recompute=True),
            plan(**DUALPIPEV, ep=2, tp=2, sequence_parallel=True, overlap=True),
        ],
    ),
    "qwen3-moe": (
        QWEN3_MOE,
        [
            plan(ep=2, tp=2, sequence_parallel=True),
            plan(pp=2, cp=2, num_microbatches=2, recompute=True, zero=2),
            plan(**DUALPIPEV, ep=2, overlap=True),
        ],
    ),
}


@pytest.fixture(scope="module")
def expected():
    return {name: train.reference(CASES[name][0], TEXT, 5, **OPTIONS | batch(name)) for name in CASES}


def batch(name):
    return {"global_batch": 16} if name == "v3" else {}


@pytest.mark.parametrize(("name", "chosen"), [(name, each) for name in CASES for each in CASES[name][1]], ids=str)
def test_a_plan_trains_as_one_process(expected, name, chosen):
    check(run(CASES[name][0], chosen, weights=True, **batch(name)), expected[name])


def test_unequal_numbers_of_targets_count_each_token_once():
    """Documents of 2 to 16 bytes: the mean over tokens is not the mean of the microbatches' means.  Another seed."""
    documents = [TEXT[start : start + 2 + start % 15] for start in range(0, 2000, 37)]
    expected = train.reference(LLAMA, documents, 5, seed=1, **OPTIONS)
    check(run(LLAMA, plan(dp=2, num_microbatches=2), text=documents, weights=True, seed=1), expected)


def test_bf16_with_masters_follows_fp32():
    wide, narrow = (run(LLAMA, plan(dp=2, precision=name), steps=20).losses for name in ("float32", "bfloat16"))
    assert narrow == pytest.approx(wide, rel=0.03)
    assert narrow[-1] < narrow[0] - 0.5


def test_bf16_weights_with_fp32_sums_train_as_without_overlap():
    """Gradients that pieces add by hand take the type in which the optimizer sums them."""
    fields = DUALPIPE | {"dp": 2, "zero": 2, "precision": "bfloat16"}
    found = [run(V3, plan(**fields, overlap=overlap), steps=2, global_batch=16) for overlap in (True, False)]
    for ours, theirs in zip(*(result.losses + result.norms for result in found), strict=True):
        assert abs(ours - theirs) < 1e-4 * theirs
