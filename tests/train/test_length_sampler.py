"""Documents sorted by length: each once per epoch, one global batch for every plan, little padding, one curve."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_runs import LLAMA, TEXT, V3, plan

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


DOCUMENTS = [TEXT[start : start + 3 + start * 7 % 27] for start in range(0, 800, 50)]  # of 3 to 29 bytes
OPTIONS = {"global_batch": 8, "lr": 1e-2, "bias_speed": 1e-2}
ALONE = plan(num_microbatches=8)  # a document per microbatch: the sampler by length pads nothing
PIPELINE = {"pp": 2, "num_microbatches": 4}
OVERLAPPED = plan(**PIPELINE, schedule="dualpipev", ep=2, overlap=True, recompute=True)
BY_LENGTH = [
    (2, [plan(dp=2), plan(ep=2, zero=3, num_microbatches=2), plan(**PIPELINE, schedule="dualpipe")]),
    (4, [OVERLAPPED, plan(dp=4, ep=2, experts_in_data=True)]),
]
TO_ONE_LENGTH = [  # a microbatch of few tokens leaves the second rank along cp without any
    (2, [plan(cp=2, layout="contiguous", num_microbatches=8)]),
    (4, [plan(**PIPELINE, schedule="dualpipev", tp=2, sequence_parallel=True, overlap=True), plan(cp=2, ep=2)]),
]


def trained(rank, world_size, sampler, plans, length=32):
    """Losses and norms of 3 steps, and the routers' biases on this rank, by name, under each plan."""
    found = []
    for chosen in plans:
        trainer = train.Trainer(V3, chosen, train.TrainOptions(sequence_length=length, **OPTIONS))
        draws = sampler(DOCUMENTS, length, 8)
        steps = [trainer.step(trainer.batch(draws)) for _ in range(3)]
        buffers = {name: bias for stage in trainer.model.stages.values() for name, bias in stage.named_buffers()}
        found.append((torch.tensor([[step.loss, step.norm] for step in steps], dtype=torch.float64), buffers))
    return found


def check_equal(found, expected):
    for numbers, biases in found:
        assert ((numbers - expected[0]) / expected[0]).abs().max() < 1e-12
        assert biases.keys() <= expected[1].keys()
        assert all(torch.equal(bias, expected[1][name]) for name, bias in biases.items())


def test_experts_train_on_documents_as_without_any_padding_under_every_plan():
    """Padding is neither routed nor counted: losses, norms and biases of one document per microbatch."""
    (expected,) = lab.launch(trained, 1, train.LengthSampler, [ALONE])[0]
    assert sum(float(bias.abs().sum()) for name, bias in expected[1].items() if name.endswith("bias")) > 0.1
    check_equal(lab.launch(trained, 1, train.LengthSampler, [plan(), plan(num_microbatches=2)])[0], expected)
    for num_ranks, plans in BY_LENGTH:
        for found in lab.launch(trained, num_ranks, train.LengthSampler, plans, timeout=120):
            check_equal(found, expected)


def test_experts_train_equally_whatever_length_documents_are_padded_to():
    losses = {"sequence_length": 32, **OPTIONS}
    results = [train.reference(V3, DOCUMENTS, 3, **losses | {"sequence_length": length}) for length in (32, 64)]
    (expected,), (wide,) = (lab.launch(trained, 1, train.Sampler, [plan()], length)[0] for length in (32, 64))
    check_equal([wide], expected)
    for result in results:
        assert result.losses == pytest.approx(expected[0][:, 0].tolist(), rel=1e-12)
        for ours, theirs in zip(result.gradients, results[0].gradients, strict=True):
            assert all((ours[name] - theirs[name]).abs().max() < 1e-13 for name in theirs)
    for num_ranks, plans in TO_ONE_LENGTH:
        for found in lab.launch(trained, num_ranks, train.Sampler, plans, timeout=120):
            check_equal(found, expected)


def test_a_second_token_and_an_evaluation_leave_padding_out():
    second = [replace(chosen, mtp=0.3) for chosen in (ALONE, plan(), plan(num_microbatches=2), OVERLAPPED)]
    expected, *found = lab.launch(trained, 1, train.LengthSampler, second[:3])[0]
    check_equal(found, expected)
    for found in lab.launch(trained, 4, train.LengthSampler, second[3:], timeout=120):
        check_equal(found, expected)
    given = {"evaluation": DOCUMENTS, "evaluate_every": 1, "log_every": 0, **OPTIONS}
    runs = [train.run(V3, second[2], DOCUMENTS, steps=1, sequence_length=n, **given) for n in (32, 64)]
    assert runs[0].metrics[0].evaluation == pytest.approx(runs[1].metrics[0].evaluation, rel=1e-12)
