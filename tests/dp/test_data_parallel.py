"""Data parallelism by hand against one process: unequal shares, a rank without a token, parameters of every kind."""

import pytest
import torch
from models import Tiny, assert_close, grads, launch, make_batch, reference_grads, row_loss
from torch import nn

from dualpipe_lab.dp.data_parallel import all_reduce_gradients, broadcast_module, num_valid_tokens, token_loss
from dualpipe_lab.sharding import shard_slice


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_gradient_is_that_of_the_whole_batch(num_ranks):
    tokens, targets = make_batch()

    def fn(rank, world_size):
        rows = shard_slice(len(tokens), world_size, rank)
        model = Tiny(seed=rank)  # ranks start unequal; the broadcast makes them equal
        broadcast_module(model)
        num_tokens = num_valid_tokens(targets[rows])
        loss = row_loss(model, tokens[rows], targets[rows], num_tokens)
        if loss.requires_grad:  # a rank may have no row at all
            loss.backward()
        all_reduce_gradients(model.parameters())
        return grads(model), num_tokens, model.frozen.grad

    out = launch(fn, num_ranks)
    for ours, num_tokens, frozen in out:
        assert num_tokens == int((targets != -100).sum())
        assert_close(ours, reference_grads(tokens, targets))
        assert frozen is None
    if num_ranks == 1:
        assert out.ledger.sent() == 0
    for name in out[0][0]:
        assert all(torch.equal(other[name], out[0][0][name]) for other, *_ in out)


def test_a_mean_of_means_would_be_wrong_here():
    """The two rows have 1 and 2 valid tokens; the sum over tokens is right, the mean of means is not."""
    logits, targets = (
        torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[2.0, 0.0], [0.0, 1.0]]]),
        torch.tensor([[0, -100], [1, 1]]),
    )

    def fn(rank, world_size):
        num_tokens = num_valid_tokens([targets[rank]])
        return float(token_loss(logits[rank], targets[rank], num_tokens))

    total = sum(launch(fn, 2))
    right = float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    wrong = sum(float(nn.functional.cross_entropy(logits[row], targets[row])) for row in range(2)) / 2
    assert total == pytest.approx(right, abs=1e-6)
    assert abs(wrong - right) > 0.05


def test_no_valid_token_at_all_is_no_gradient_and_not_nan():
    logits = torch.zeros(2, 3, requires_grad=True)
    token_loss(logits, torch.full((2,), -100), 0).backward()
    assert logits.grad.abs().max() == 0


def test_buffers_and_transposed_parameters_are_broadcast_too():
    def fn(rank, world_size):
        module = nn.BatchNorm1d(3)
        module.running_mean += rank
        module.extra = nn.Parameter((torch.arange(6.0).view(2, 3) + 10 * rank).t())
        broadcast_module(module)
        return module.running_mean, module.extra.data.clone()

    for mean, extra in launch(fn, 3):
        assert torch.equal(mean, torch.zeros(3))
        assert torch.equal(extra, torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_equal_the_closed_form(num_ranks):
    def fn(rank, world_size):
        parameter = nn.Parameter(torch.zeros(8))
        parameter.grad = torch.full((8,), float(rank))
        all_reduce_gradients([parameter])
        return parameter.grad

    out = launch(fn, num_ranks)
    assert all(out.ledger.sent("all_reduce", rank) * num_ranks == 2 * (num_ranks - 1) * 32 for rank in range(num_ranks))
    assert torch.equal(out[0], torch.full((8,), sum(range(num_ranks)) * 1.0))
