"""The plans that fit: legal, within the memory, in groups; and quick."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_lab.cp.layouts import Zigzag
from dualpipe_lab.models import LlamaConfig, V3MoEConfig
from dualpipe_lab.plan import Plan, estimate, fits, memory, model_of
from dualpipe_lab.plan.fits import _candidates
from dualpipe_lab.plan.hardware import H100
from dualpipe_lab.plan.stage_traffic import StageTraffic

LLAMA = LlamaConfig(vocabulary_size=1024, hidden_size=256, ffn_size=512, num_layers=8, num_heads=8, num_kv_heads=4)
V3 = V3MoEConfig(num_layers=4, num_heads=8, num_kv_heads=4)


@given(st.sampled_from([LLAMA, V3]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([3e6, 1e7, 3e7, 1e8]))
@settings(deadline=None, max_examples=15)
def test_each_plan_is_legal_and_fits(model, num_gpus, memory_bytes):
    found = fits(model, num_gpus, memory_bytes, sequence_length=128, global_batch=32, count=12)
    for fit in found:
        fit.plan.check(model, 128, num_gpus)
        assert fit.bytes == memory(model, fit.plan, 128, 32).largest.total <= memory_bytes
        assert fit.estimate == estimate(model, fit.plan, 128, 32)
    groups = [
        [fit for fit in found if fit.group == group] for group in range(1 + max((f.group for f in found), default=-1))
    ]
    assert [fit for group in groups for fit in group] == list(found)
    for group in groups:
        axes = [sum(size > 1 for size in fit.plan.sizes.values()) for fit in group]
        assert axes == sorted(axes)
        points = [fit.estimate.point for fit in group]
        assert max(points) <= 1.05 * min(points)
    firsts = [min(fit.estimate.point for fit in group) for group in groups]
    assert firsts == sorted(firsts)


def test_no_candidate_that_fits_is_faster():
    shape, limit = (128, 32), 2.5e7
    found = fits(LLAMA, 8, limit, sequence_length=128, global_batch=32, count=3)
    every = list(_candidates(LLAMA, 8, shape, H100, ("1f1b", "zero_bubble_h1", "dualpipev")))
    best = min(estimate(LLAMA, p, *shape).point for p in every if memory(LLAMA, p, *shape).fits(limit))
    assert min(fit.estimate.point for fit in found) == best


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "qwen3-30b-a3b"])
def test_64_gpus_take_seconds(name):
    start = time.process_time()
    found = fits(model_of(name), 64, sequence_length=8192, global_batch=512)
    assert time.process_time() - start < 10  # 5 s, and slack for a slow machine
    assert found
    assert all(fit.bytes <= 80e9 for fit in found)
    lines = str(found).splitlines()
    assert lines[0].split() == ["group", "seconds", "GB", "MFU", "plan"]
    assert len(lines) == len(found) + 1
    assert lines[1].endswith(str(found[0].plan))


def test_nothing_fits_into_nothing_and_sequences_must_divide():
    assert fits(LLAMA, 4, 1e3, sequence_length=128, global_batch=32) == []
    with pytest.raises(ValueError, match="1 sequences do not divide among the data ranks of 11 GPUs; use a multiple"):
        fits(LLAMA, 11, sequence_length=64, global_batch=1)


def test_without_a_pipeline_a_plan_has_no_schedule_to_choose():
    assert {plan.schedule for plan in _candidates(LLAMA, 4, (128, 32), H100, ("gpipe",)) if plan.pp == 1} == {"1f1b"}


def test_a_ring_of_many_ranks_asks_for_the_size_of_each_block_once(monkeypatch):
    """The blocks of a ring are as many as its ranks; asked for at every hop they were most of the seconds of `fits`."""
    asked, size = [], Zigzag.size
    monkeypatch.setattr(Zigzag, "size", lambda layout, rank: asked.append(rank) or size(layout, rank))
    plan = Plan(cp=64, precision="bfloat16")
    traffic = StageTraffic(plan, model_of("llama3-8b"), 0, 1, 8192)
    asked.clear()
    calls = traffic.unit("dense")
    assert len(asked) <= 64 + 1
    assert calls.ledger.entries["isend"].sent > 0
