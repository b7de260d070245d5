"""Padding in a layer of experts: what it returns, counts and loses is that of the tokens alone, also of none."""

import pytest
import torch
from runs import A1, distance, draw, launch, leaf

from dualpipe_lab.ep.deepseek_moe import DeepSeekMoE, DeepSeekRouter
from dualpipe_lab.ep.gshard import GShardMoE
from dualpipe_lab.ep.node_dispatch import NodeGroups
from dualpipe_lab.ep.router_losses import balance_loss, sequence_loss, z_loss
from dualpipe_lab.tp.shard import initialize_parameters

HIDDEN, FFN, E, K, LENGTH = 6, 5, 4, 2, 4
LENGTHS = {1: [(3, 1, 4)], 2: [(4, 2, 0), (0, 0, 0)]}  # tokens of each sequence of a rank; the second has none


def masked(rank, world_size):
    lengths = torch.tensor(LENGTHS[world_size][rank])
    return draw(rank, len(lengths), LENGTH, HIDDEN), torch.arange(LENGTH) >= lengths[:, None]


def make_layer(nodes=None):
    router = DeepSeekRouter(HIDDEN, E, K, dtype=torch.float64)
    layer = DeepSeekMoE(router, HIDDEN, FFN, shared=torch.tanh, dtype=torch.float64, nodes=nodes)
    initialize_parameters(layer)
    return layer


def results(layer, x, padding, is_masked):
    """y and the gradients of x at its tokens, what is outside of them, the router's gradient and its load."""
    x, keep = leaf(x), ~padding
    if is_masked:
        y, routing = layer.with_routing(x, padding)
        y, outside = y[keep], y.detach()[padding]
    else:
        y, routing = layer.with_routing(x[keep])
        outside = torch.zeros(int(padding.sum()), HIDDEN, dtype=x.dtype)
    balance = balance_loss(routing.logits, routing.load, scoring="sigmoid") + z_loss(routing.logits)
    (y.square().sum() + balance).backward()
    load = layer.router.load.clone()
    layer.router.load.zero_()
    router, layer.router.weight.grad = layer.router.weight.grad, None
    return [y.detach(), outside, x.grad, balance.detach(), router, load, routing.load]


@pytest.mark.parametrize("world_size", [1, 2])
def test_padding_is_neither_routed_nor_counted(world_size):
    def fn(rank, world_size):
        x, padding = masked(rank, world_size)
        found = []
        for layer in (make_layer(), make_layer(NodeGroups.of(world_size))):
            pairs = zip(*(results(layer, x, padding, is_masked) for is_masked in (True, False)), strict=True)
            found.append(max(distance(ours.double(), theirs.double()) for ours, theirs in pairs))
        return found

    assert max(map(max, launch(fn, world_size))) <= A1


def test_the_loss_per_sequence_is_the_mean_of_the_sequences_losses():
    lengths = (3, 1, 4, 0)
    padding = torch.arange(LENGTH) >= torch.tensor(lengths)[:, None]
    routing = DeepSeekRouter(HIDDEN, E, K, dtype=torch.float64)(draw(0, 16, HIDDEN), padding)
    rows = zip(routing.logits.split(lengths), routing.indices.split(lengths), lengths, strict=True)
    each = [sequence_loss(logits, indices, length) for logits, indices, length in rows if length]
    loss = sequence_loss(routing.logits, routing.indices, LENGTH, padding=padding)
    assert distance(loss, sum(each) / 3) <= A1, "a sequence of padding alone is none"
    share = sequence_loss(routing.logits, routing.indices, LENGTH, num_sequences=6, padding=padding)
    assert distance(share, sum(each) / 6) <= A1
    with pytest.raises(ValueError, match=r"8 of 16, got 7; give it those of router\(x, padding\)"):
        sequence_loss(routing.logits[:7], routing.indices[:7], LENGTH, padding=padding)


def test_padding_takes_no_slot_and_no_share_of_the_balance():
    def fn(rank, world_size):
        layer = GShardMoE(HIDDEN, FFN, E, 6, K, 0.5, global_balance=True, dtype=torch.float64)
        x, padding = draw(rank, 12, HIDDEN), torch.arange(12) % 2 == 0
        if rank:
            padding[:] = True
        ours, theirs = layer(x, padding), layer(x[~padding])
        assert ours.num_dropped == theirs.num_dropped
        y = torch.zeros_like(x).masked_scatter(~padding[:, None], theirs.y)
        return distance(ours.y, y), distance(ours.balance, theirs.balance)

    assert max(map(max, launch(fn, 2))) <= A1


def test_a_mask_of_another_kind_is_refused():
    def fn(rank, world_size):
        layer, x = make_layer(), torch.zeros(2, 3, HIDDEN, dtype=torch.float64)
        for wrong in (torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.bool)):
            with pytest.raises(ValueError, match=r"a bool for each of 6 positions.* use attention_mask == 0"):
                layer(x, padding=wrong)
        with pytest.raises(ValueError, match=r"4 of 6 positions, got one of 6; make it by router\(x, padding\)"):
            layer(x, layer.router(x.flatten(0, 1)), torch.tensor([[False, False, True]] * 2))

    launch(fn, 1)
