"""A V3 model trained with overlapped experts has the losses, norms and weights of the training in one process."""

import pytest
from training_runs import OPTIONS, TEXT, V3, check, plan, run

from dualpipe_lab import train

PLANS = [
    plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe", overlap=True),
    plan(pp=2, dp=2, ep=2, num_microbatches=4, schedule="dualpipe", zero=2, overlap=True, recompute=True),
    plan(pp=2, ep=2, tp=2, num_microbatches=4, schedule="dualpipev", sequence_parallel=True, overlap=True),
]


@pytest.fixture(scope="module")
def expected():
    return train.reference(V3, TEXT, 3, **{**OPTIONS, "global_batch": 16})


@pytest.mark.parametrize("chosen", PLANS, ids=str)
def test_overlapped_experts_train_as_in_one_process(expected, chosen):
    result = run(V3, chosen, steps=3, weights=True, global_batch=16)
    check(result, expected)


def test_bf16_weights_with_fp32_sums_train_as_without_overlap():
    """Gradients that pieces add by hand take the type in which the optimizer sums them."""
    fields = {"pp": 2, "dp": 2, "num_microbatches": 4, "schedule": "dualpipe", "zero": 2, "precision": "bfloat16"}
    found = [run(V3, plan(**fields, overlap=overlap), steps=2, global_batch=16) for overlap in (True, False)]
    for ours, theirs in zip(*(result.losses + result.norms for result in found), strict=True):
        assert abs(ours - theirs) < 1e-4 * theirs
