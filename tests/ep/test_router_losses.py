"""Losses of a router against autograd: balance, per sequence, and z, of one rank and of all."""

import pytest
import torch
from ep_runs import close
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import A1, distance, draw, leaf

import dualpipe_lab as lab
from dualpipe_lab import comm
from dualpipe_lab.ep.router import tokens_per_expert, top_experts
from dualpipe_lab.ep.router_losses import balance_loss, sequence_loss, sum_over_ranks, z_loss

E = 8


def by_autograd(logits, indices, length, scoring):
    """The balance loss of every `length` tokens, in the mean."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    shares = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (-1, length)).mean(1)
    chosen = torch.nn.functional.one_hot(indices, logits.shape[1]).sum(1).to(logits.dtype)
    f = logits.shape[1] / indices.shape[1] * chosen.unflatten(0, (-1, length)).mean(1)
    return (f * shares).sum(1).mean()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    num_sequences=st.integers(1, 3),
    length=st.integers(1, 4),
    experts=st.integers(1, 7).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
)
def test_the_losses_against_autograd(seed, num_sequences, length, experts, scoring):
    num_experts, k = experts
    drawn = 3 * draw(seed, num_sequences * length, num_experts)
    indices = top_experts(drawn, k)
    load = tokens_per_expert(indices, num_experts)
    for ours_of, theirs_of in (
        (lambda x: balance_loss(x, load, scoring=scoring), lambda x: by_autograd(x, indices, len(x), scoring)),
        (
            lambda x: sequence_loss(x, indices, length, scoring=scoring),
            lambda x: by_autograd(x, indices, length, scoring),
        ),
        (z_loss, lambda x: x.logsumexp(-1).square().mean()),
    ):
        ours, theirs = leaf(drawn), leaf(drawn)
        found, expected = ours_of(ours), theirs_of(theirs)
        (3 * found).backward()
        (3 * expected).backward()
        assert close(found.detach(), expected.detach())
        assert close(ours.grad, theirs.grad)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_shares_of_the_loss_per_sequence_add_up_and_an_even_choice_costs_1(scoring):
    logits = draw(3, 12, E)
    indices, options = top_experts(logits, 2), {"num_sequences": 3, "scoring": scoring}
    parts = [sequence_loss(logits[s], indices[s], 4, **options) for s in (slice(0, 8), slice(8, 12))]
    assert distance(sum(parts), by_autograd(logits, indices, 4, scoring)) <= A1  # shares of two ranks
    assert float(sequence_loss(logits[:0], indices[:0], 4, **options)) == 0
    even = torch.stack([torch.arange(E), (torch.arange(E) + 1) % E], 1)
    assert float(sequence_loss(torch.zeros(E, E), even, E, scoring=scoring)) == pytest.approx(1)
    with pytest.raises(ValueError, match="got 12 tokens in sequences of 5"):
        sequence_loss(logits, indices, 5)


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
