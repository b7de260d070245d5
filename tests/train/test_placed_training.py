"""A training whose experts lie in slots and move every few steps has the curve of one process; what is refused."""

import pytest
from training_runs import LLAMA, OPTIONS, TEXT, V3, check, plan, run

from dualpipe_lab import train

SLOTS = {"num_slots": 6, "rebalance_every": 2, "max_moves": 2}
PLANS = [
    plan(ep=2, dp=2, zero=1, num_microbatches=2),
    plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipe"),
    plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipev", overlap=True, zero=2),
    plan(dp=4, ep=2, experts_in_data=True, zero=3),
    plan(pp=2, ep=2, num_microbatches=4, schedule="dualpipev", overlap=True, multi_token=0.3, loss_chunk=8),
]


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("chosen", PLANS, ids=str)
def test_moving_experts_do_not_change_a_training(chosen):
    """Losses, norms, weights; a checkpoint in the middle goes on without slots, and the loads are reported."""
    found = run(V3, chosen, weights=True, **SLOTS)
    check(found, train.reference(V3, TEXT, 5, multi_token=chosen.multi_token, **OPTIONS))
    loads = [(row.load, row.moved_load) for row in found.metrics]
    assert all(load >= 1 for load, _ in loads)
    assert [moved is not None for _, moved in loads] == [False, True, False, True, False]
    assert all(moved <= load for load, moved in loads if moved is not None)
    assert "moved to" in str(found.metrics[1])


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_slots_and_without(tmp_path):
    first = run(V3, plan(ep=2, zero=1), steps=3, folder=tmp_path, **SLOTS)
    expected = train.reference(V3, TEXT, 5, **OPTIONS)
    for chosen, options in ((plan(ep=4), {"num_slots": 8}), (plan(dp=2), {})):
        rest = run(V3, chosen, resume=first.checkpoint, weights=True, **options)
        for row, right in zip(rest.metrics, expected.metrics[3:], strict=True):
            assert row.loss == pytest.approx(right.loss, rel=1e-10)
            assert row.norm == pytest.approx(right.norm, rel=1e-10)


def test_slots_that_cannot_be_are_refused_before_a_process():
    for config, options, words in (
        (V3, {"num_slots": 5}, "got num_slots=5 for 4 experts on 2; use 6"),
        (V3, {"num_slots": 2}, "use 4"),
        (V3, {"rebalance_every": 2}, "give num_slots="),
        (V3, {"num_slots": 6, "rebalance_every": 0}, "rebalance_every counts from 1, got 0"),
        (LLAMA, {"num_slots": 6}, "a LlamaConfig has none"),
    ):
        with pytest.raises(ValueError, match=words):
            run(config, plan(ep=2) if config is V3 else plan(dp=2), **options)
