"""Data parallelism by hand against one process: unequal shares, a rank without a token, parameters of every kind."""

import pytest
import torch
from models import assert_close, grads, launch, make_batch
from torch import nn
from zero_runs import Rare, reference_grads

from dualpipe_lab.dp.data_parallel import all_reduce_gradients, broadcast_module, num_valid_tokens, token_loss
from dualpipe_lab.sharding import shard_slice


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_gradient_is_that_of_the_whole_batch(num_ranks):
    """Rows have unequal numbers of valid tokens, so a mean of means would be wrong; each gradient is sent once."""
    tokens, targets = make_batch()

    def fn(rank, world_size):
        rows = shard_slice(len(tokens), world_size, rank)
        model = Rare(seed=rank)  # ranks start unequal; the broadcast makes them equal
        broadcast_module(model)
        num_tokens = num_valid_tokens(list(targets[rows]))
        if len(tokens[rows]):  # a rank may have no row at all
            token_loss(model(tokens[rows]), targets[rows], num_tokens).backward()
        all_reduce_gradients(model.parameters())
        return grads(model), num_tokens, model.blocks[1][0].bias.grad

    out = launch(fn, num_ranks)
    for ours, num_tokens, frozen in out:
        assert num_tokens == int((targets != -100).sum())
        assert_close(ours, reference_grads(tokens, targets))
        assert frozen is None
    numel = sum(grad.numel() for grad in out[0][0].values())
    assert out.ledger.sent("all_reduce") == 2 * (num_ranks - 1) * 8 * (numel + 1)  # and the number of tokens
    for name in out[0][0]:
        assert all(torch.equal(other[name], out[0][0][name]) for other, *_ in out)


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
