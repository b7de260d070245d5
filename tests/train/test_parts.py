"""The parts of a training that need no rank: data, learning rate, metrics, refusals."""

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_runs import LLAMA, TEXT, V3, plan, run

import dualpipe_lab as lab
from dualpipe_lab import cp, data, train

HERE = Path(__file__).parent
RUN = sys.modules[train.run.__module__]  # the function has the name of its module


def test_the_frozen_corpus_is_small_fixed_text_in_two_parts():
    first, last = data.frozen_corpus(), data.frozen_corpus("evaluation")
    assert len(first) + len(last) == 295_199 < 300_000
    assert len(last) == int(0.05 * 295_199)
    assert first.startswith(b"# Ranks and messages")
    (first + last).decode()
    with pytest.raises(ValueError, match=r"splits .* got 'test'"):
        data.frozen_corpus("test")


@given(parts=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3), (6, 2), (3, 4)]), step=st.integers(0, 5))
def test_every_cut_of_a_global_batch_holds_the_same_sequences(parts, step):
    sampler = train.Sampler(TEXT, sequence_length=8, global_batch=12, seed=3)
    data_size, num_microbatches = parts
    batches = [sampler.batch(step, num_microbatches, rank, data_size) for rank in range(data_size)]
    inputs = torch.cat([tensor for batch in batches for tensor in batch.inputs])
    targets = torch.cat([tensor for batch in batches for tensor in batch.targets])
    full = sampler.batch(step)
    assert torch.equal(inputs, full.inputs[0])
    assert torch.equal(targets, full.targets[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert {batch.num_tokens for batch in batches} == {12 * 8}
    others = train.Sampler(TEXT, 8, 12, seed=4).rows(step, 0, 12), sampler.rows(step + 1, 0, 12)
    assert len({*sampler.rows(step, 0, 12), *others[0], *others[1]}) > 30


def test_ranks_of_cp_take_their_shares_of_the_same_sequences():
    sampler, layout = train.Sampler(TEXT, 16, 2), cp.make_layout("zigzag", 16, 2)
    full = sampler.batch(0)
    shares = [sampler.batch(0, layout=layout, cp_rank=rank) for rank in range(2)]
    for rank, share in enumerate(shares):
        places = list(layout.positions(rank))
        assert torch.equal(share.inputs[0], full.inputs[0][:, places])
        assert torch.equal(share.targets[0], full.targets[0][:, places])


def test_documents_are_padded_and_their_padding_is_no_target():
    sampler = train.Sampler([b"ab", b"abcdefgh"], sequence_length=4, global_batch=16)
    batch = sampler.batch(0)
    valid = batch.targets[0] != -100
    assert batch.num_tokens == int(valid.sum()) == sampler.num_tokens(0)
    assert set(valid.sum(1).tolist()) == {1, 4}
    assert bool((batch.inputs[0][valid.sum(1) == 1, 1:] == 0).all())


@given(
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 5),
    more=st.integers(1, 20),
    final=st.floats(0, 1),
    hold=st.integers(0, 4),
)
def test_a_schedule_rises_holds_falls_and_goes_on(decay, warmup, more, final, hold):
    end = warmup + hold + more
    schedule = train.LRSchedule(decay, warmup, end, final, hold, later=[(end + 1, final / 2)])
    factors = [schedule.factor(step) for step in range(end + 3)]
    assert all(0 < a <= b <= 1 for a, b in pairwise(factors[:warmup]))
    assert set(factors[warmup : warmup + hold + 1]) == {1}
    assert all(a >= b for a, b in pairwise(factors[warmup:]))
    if decay != "constant" and more > 1:
        assert factors[end - 1] == factors[end] == pytest.approx(final)
    assert factors[end + 1 :] == [final / 2] * 2


REFUSED = [
    ({"steps": 0}, "at least 1 step, got steps=0"),
    ({"text": TEXT[:16]}, r"a window takes sequence_length \+ 1 = 17 bytes, and the corpus has 16; use a shorter"),
    ({"text": [b"long enough", b"x"]}, "document 1 has 1 bytes"),
    ({"global_batch": 6}, "does not divide among 2 data ranks x 2 microbatches = 4; use 4 or 8"),
    ({"save_every": 2}, "needs a folder"),
    ({"evaluate_every": 2}, "give evaluation="),
    ({"evaluation": b"short", "evaluate_every": 1}, "the corpus has 5"),
    ({"max_norm": 0.0}, "max_norm > 0"),
    ({"resume": "/nowhere"}, "no checkpoint in /nowhere"),
    ({"config": replace(LLAMA, vocabulary_size=100)}, "knows 100 of 256; use vocabulary_size=256"),
    ({"config": replace(LLAMA, hidden_size=15)}, "15"),
    ({"text": "a text of letters " * 9}, r"got str; use text.encode\(\)"),
    ({"text": bytearray(TEXT)}, "documents are a list of bytes, got bytearray"),
    ({"text": [b"long enough", "letters"]}, "got str"),
    ({"text": None}, "got NoneType"),
    ({"evaluation": "letters", "evaluate_every": 1}, "got str"),
    ({"evaluation": TEXT}, "got evaluate_every=None; give that number"),
    ({"seed": 1.5}, "seed is an integer, got 1.5"),
    ({"log_every": 0.5}, "log_every counts from 0, got 0.5"),
    ({"bias_speed": float("inf")}, "bias_speed is a finite number"),
    ({"bias_speed": float("nan")}, "bias_speed is a finite number of at least 0, got nan"),
    ({"max_norm": "1"}, "max_norm > 0, got '1'"),
    ({"keep": 2}, "keep=2 needs a folder"),
    ({"elastic": True}, "got folder=None; give folder="),
    ({"lr": -1e-3}, "AdamW needs betas"),
    ({"schedule": "cosine"}, "schedule is of type LRSchedule, got 'cosine'"),
    ({"batch_growth": [(2, 16), (1, 32)]}, "a batch grows by pairs of a step, one after the other from 1, and"),
    ({"batch_growth": [(2, 16.0)]}, r"got batch_growth=\[\(2, 16.0\)\]"),
    ({"batch_growth": [3]}, r"got batch_growth=\[3\]"),
    ({"batch_growth": [(2, 9)]}, "a global batch of 9 sequences does not divide"),
    ({"config": {"num_layers": 2}}, "a LlamaConfig or a V3MoEConfig, and a Plan, got dict and Plan"),
    ({"plan": "dp 2"}, "got LlamaConfig and str"),
    ({"folder": f"{__file__}/deeper"}, "test_parts.py is none that can be written; name another"),
    ({"csv": __file__}, "test_parts.py has no metrics in its first line, and would be replaced"),
    ({"csv": str(HERE)}, "csv is a file for metrics, got the folder"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_trained_is_refused_before_any_process(monkeypatch, change, message):
    def start(*arguments, **options):
        raise AssertionError("a process starts")

    monkeypatch.setattr(RUN, "launch", start)
    change = dict(change)
    with pytest.raises(ValueError, match=message):
        run(change.pop("config", LLAMA), change.pop("plan", plan(dp=2, num_microbatches=2)), **change)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("sequence_lenght", "use sequence_length"),
        ("num_warmup", r"schedule=LRSchedule\(num_warmup=...\)"),
        ("num_microbatches", r"Plan\(num_microbatches=...\)"),
        ("xyz", "it has sequence_length, global_batch, batch_growth, seed"),
    ],
)
def test_an_unknown_option_is_told_where_it_belongs(name, place):
    with pytest.raises(TypeError, match=f"no option {name}; .*{place}"):
        run(LLAMA, plan(), **{name: 1})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run(LLAMA, plan(), steps=2, folder=folder)
    return folder


FOREIGN = [
    ({"config": replace(LLAMA, vocabulary_size=300)}, "vocabulary_size=256, got vocabulary_size=300; use it with"),
    ({"config": V3}, "model=LlamaConfig, got model=V3MoEConfig"),
    ({"steps": 2}, "is of step 2, got steps=2"),
    ({"seed": 5}, "seed=0, got seed=5"),
    ({"sequence_length": 8}, "sequence_length=16, got sequence_length=8"),
    ({"ema": 0.5}, "ema=False, got ema=True"),
    ({"plan": lab.Plan()}, "precision=float64, got precision=float32"),
    ({"resume": None}, r"later steps than 0, such as step-00000002; resume it"),
]


@pytest.mark.parametrize(("change", "message"), FOREIGN, ids=[message for _, message in FOREIGN])
def test_a_checkpoint_of_another_training_is_refused(saved, monkeypatch, change, message):
    monkeypatch.setattr(RUN, "launch", None)
    change = {"resume": saved, "folder": saved} | change
    with pytest.raises(ValueError, match=message):
        run(change.pop("config", LLAMA), change.pop("plan", plan()), **change)
