"""Losses of a router against autograd: balance and z, of one rank and of all."""

import pytest
import torch
from ep_runs import distance
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import A1, draw, leaf

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.ep.router import tokens_per_expert, top_experts
from dualpipe_lab.ep.router_losses import balance_loss, sum_over_ranks, z_loss


def loss_by_autograd(logits, load, scoring):
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    return logits.shape[1] * (load.double() / load.sum() * shares.mean(0)).sum()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    num_tokens=st.integers(1, 9),
    num_experts=st.integers(1, 7),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
)
def test_the_losses_against_autograd(seed, num_tokens, num_experts, scoring):
    drawn = 3 * draw(seed, num_tokens, num_experts)
    load = tokens_per_expert(top_experts(drawn, 1), num_experts)
    for ours_of, theirs_of in (
        (lambda x: balance_loss(x, load, scoring=scoring), lambda x: loss_by_autograd(x, load, scoring)),
        (z_loss, lambda x: x.logsumexp(-1).square().mean()),
    ):
        ours, theirs = leaf(drawn), leaf(drawn)
        found, expected = ours_of(ours), theirs_of(theirs)
        (3 * found).backward()
        (3 * expected).backward()
        assert distance(found.detach(), expected.detach()) <= A1
        assert distance(ours.grad, theirs.grad) <= A1


@pytest.mark.parametrize("world_size", [1, 4])
def test_shares_of_the_global_losses_add_up_and_rank_means_do_not(world_size):
    """Ranks have 5, 0, 3 and 2 tokens: values, gradients and bytes against one process that has all of them."""
    counts = {1: [5], 4: [5, 0, 3, 2]}[world_size]
    logits = 2 * draw(0, sum(counts), 6)

    def fn(rank, world_size):
        own = leaf(logits.split(counts)[rank])
        load = tokens_per_expert(top_experts(own.detach(), 2), 6)
        per_rank = balance_loss(own.detach(), load)
        total, num_tokens = sum_over_ranks(load, len(own))
        share = balance_loss(own, total, num_tokens) + z_loss(own, num_tokens)
        share.backward()
        comm.barrier()
        return float(share.detach()), float(per_rank), own.grad, total.tolist(), num_tokens

    launched = lab.launch(fn, world_size, output="collect")
    shares, per_rank, grads, totals, tokens = zip(*launched, strict=True)
    whole = leaf(logits)
    load = tokens_per_expert(top_experts(logits, 2), 6)
    balance = balance_loss(whole, load)
    (balance + z_loss(whole)).backward()
    assert set(map(tuple, totals)) == {tuple(load.tolist())}
    assert set(tokens) == {sum(counts)}
    assert abs(sum(shares) - float((balance + z_loss(whole)).detach())) < 1e-12
    assert distance(torch.cat(grads), whole.grad) <= A1
    if world_size > 1:
        mean = sum(n * loss for n, loss in zip(counts, per_rank, strict=True)) / sum(counts)
        assert abs(mean - float(balance.detach())) > 1e-3
    for rank in range(world_size):
        assert launched.ledger.sent("all_reduce", rank) <= 2 * 7 * 8
    total_sent = sum(launched.ledger.sent("all_reduce", rank) for rank in range(world_size))
    assert total_sent == 2 * (world_size - 1) * 7 * 8  # E + 1 integers, once
