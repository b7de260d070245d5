"""Documents sorted by length: each once per epoch, one global batch for every plan, little padding, one curve."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_runs import LLAMA, plan

import dualpipe_lab as lab
from dualpipe_lab import train


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=8),
    steps=st.integers(1, 5),
    buffer=st.integers(1, 4),
    seed=st.integers(0, 9),
    parts=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3), (3, 4)]),
)
def test_an_epoch_has_each_document_once_and_every_plan_has_the_same_steps(lengths, steps, buffer, seed, parts):
    size, (data_size, num_microbatches) = 12, parts
    documents = [bytes([number] * lengths[number % len(lengths)]) for number in range(size * steps)]
    make = lambda: train.LengthSampler(documents, 20, size, seed, buffer)  # noqa: E731
    sampler, again = make(), make()
    for epoch in (1, 0):  # any step may be asked for first: that is how a run goes on
        rows = [row for step in range(steps) for row in sampler.rows(epoch * steps + step, 0, size)]
        assert sorted(rows) == [document[:21] for document in documents]
    for step in range(2 * steps):
        batches = [again.batch(step, num_microbatches, rank, data_size) for rank in range(data_size)]
        pairs = [pair for batch in batches for pair in zip(batch.inputs, batch.targets, strict=True)]
        full = sampler.rows(step, 0, size)
        assert {batch.num_tokens for batch in batches} == {sum(len(row) - 1 for row in full)}
        found = [(ids, to) for pair in pairs for ids, to in zip(*map(torch.Tensor.tolist, pair), strict=True)]
        for row, (ids, targets) in zip(full, found, strict=True):
            valid = len(row) - 1
            assert bytes([*ids[:valid], targets[valid - 1]]) == row
            assert set(targets[valid:]) <= {-100}
        assert all((targets >= 0).all(0).any() and (targets[:, -1] >= 0).any() for _, targets in pairs)
        assert [len(row) for row in full] == sorted(map(len, full))


def test_longer_buffers_pad_less_and_epochs_and_seeds_have_other_orders():
    documents = [bytes(2 + number * 37 % 50) for number in range(96)]

    def padded(buffer):
        sampler = train.LengthSampler(documents, 64, 12, buffer=buffer)
        targets = [each for step in range(8) for each in sampler.batch(step, 3).targets]
        return sum(int((each < 0).sum()) for each in targets)

    assert padded(8) < padded(2) < padded(1)
    named = [bytes([number] * 3) for number in range(96)]
    orders = [train.LengthSampler(named, 8, 12, seed).rows(step, 0, 12) for seed, step in ((0, 0), (0, 8), (1, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    starts = [len(train.LengthSampler(documents, 64, 12, seed).rows(0, 0, 1)[0]) for seed in range(8)]
    assert starts != sorted(starts), "the first step of an epoch is not always the shortest"


def test_documents_that_fill_no_whole_step_are_refused():
    for documents, buffer in ([b"ab"] * 5, 1), ([b"ab"] * 4, 0):
        with pytest.raises(ValueError, match=rf"leave out {len(documents) % 4} documents"):
            train.LengthSampler(documents, 8, 4, buffer=buffer)


def test_a_training_on_microbatches_of_unequal_length_equals_one_process():
    documents = [bytes([97 + number % 20] * (2 + number * 7 % 13)) for number in range(16)]

    def losses(rank, world_size, plans):
        found = []
        for chosen in plans:
            trainer = train.Trainer(LLAMA, chosen, train.TrainOptions(sequence_length=16, global_batch=8))
            sampler = train.LengthSampler(documents, 16, 8, buffer=2)
            found.append([trainer.step(trainer.batch(sampler)).loss for _ in range(3)])
        return torch.tensor(found, dtype=torch.float64)

    (alone,) = lab.launch(losses, 1, [plan()])
    plans = [plan(dp=2, num_microbatches=2), plan(dp=2, zero=3), plan(pp=2, num_microbatches=4)]
    found = lab.launch(losses, 2, plans, timeout=120)[0]
    assert (found - alone).abs().max() < 1e-12
