"""A training under a plan has the losses, norms and weights of the same training in one process."""

import pytest
import torch
from training_runs import LLAMA, OPTIONS, TEXT, check, plan, run

from dualpipe_lab import train

LLAMA_PLANS = [
    plan(num_microbatches=2),
    plan(dp=2, num_microbatches=2),
    plan(dp=2, zero=3, num_microbatches=2),
    plan(pp=2, cp=2, num_microbatches=4, schedule="dualpipev", zero=2),
    plan(pp=2, dp=2, tp=2, num_microbatches=2, zero=1, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def llama():
    return train.reference(LLAMA, TEXT, 5, **OPTIONS)


@pytest.mark.parametrize("chosen", LLAMA_PLANS, ids=str)
def test_a_llama_trains_as_in_one_process(llama, chosen):
    check(run(LLAMA, chosen, weights=True), llama)


def test_unequal_numbers_of_targets_count_each_token_once():
    """Documents of 2 to 16 bytes: the mean over tokens is not the mean of the microbatches' means."""
    documents = [TEXT[start : start + 2 + start % 15] for start in range(0, 2000, 37)]
    expected = train.reference(LLAMA, documents, 5, **OPTIONS)
    check(run(LLAMA, plan(dp=2, num_microbatches=2), text=documents, weights=True), expected)


def test_equal_seeds_give_equal_bits_and_another_seed_others():
    first, again, other = (run(LLAMA, plan(dp=2, zero=1), weights=True, seed=seed) for seed in (0, 0, 1))
    assert first.losses == again.losses
    assert first.norms == again.norms
    assert all(torch.equal(tensor, again.weights()[name]) for name, tensor in first.weights().items())
    assert first.losses != other.losses
