"""GShard and Switch layers: one process with masks and einsum, bytes that no load changes, what is dropped and how."""

import pytest
import torch
from runs import A1, assert_refused, counted, distance, draw, launch, leaf

from dualpipe_lab import comm
from dualpipe_lab.ep.gshard import (
    GShardMoE,
    capacity,
    exchange_bytes,
)
from dualpipe_lab.tp.shard import full_state_dict, load_full_state_dict

HIDDEN, FFN, EXPERTS, TOKENS = 6, 5, 8, 8
# tokens of each of 4 groups, k, capacity factor: even; a group of 5 and one of none; every expert, and fewer slots
CASES = (
    ((8, 8, 8, 8), 2, 1),
    ((8, 5, 0, 7), 2, 1.25),
    ((8, 3, 8, 8), 1, 1),
    ((8, 8, 8, 8), 2, 0.5),
    ((8, 8, 1, 8), 8, 1),
    ((4, 8, 8, 6), 3, 0.3),
)


def make_state(seed=0):
    return {
        "router.weight": draw(seed, EXPERTS, HIDDEN),
        "first": draw(seed + 1, EXPERTS, HIDDEN, FFN),
        "second": draw(seed + 2, EXPERTS, FFN, HIDDEN),
    }


def masks(gates, k, num_slots):
    """Algorithm 1 of the paper, token by token: dispatch mask and combine weights [T, E, C]."""
    used = [0] * gates.shape[1]
    indices = gates.argsort(dim=1, descending=True)[:, :k].tolist()
    combine = gates.new_zeros(*gates.shape, num_slots)
    dispatch = combine.clone()
    for choice in range(k):
        for token, experts in enumerate(indices):
            expert = experts[choice]
            if used[expert] < num_slots:
                total = sum(gates[token, other] for other in experts) if k > 1 else 1
                dispatch[token, expert, used[expert]] = 1
                combine[token, expert, used[expert]] = gates[token, expert] / total
            used[expert] += 1
    return dispatch, combine


def einsum_layer(x, state, k, num_slots):
    """One process, one group of tokens: y, balance loss, choices dropped."""
    gates = (x @ state["router.weight"].t()).softmax(-1)
    dispatch, combine = masks(gates, k, num_slots)
    slots = torch.einsum("tec,td->ecd", dispatch, x)
    made = torch.einsum("ecf,efd->ecd", torch.einsum("ecd,edf->ecf", slots, state["first"]).relu(), state["second"])
    first = gates.argmax(1).bincount(minlength=EXPERTS).double() / max(len(x), 1)
    balance = EXPERTS * (first * gates.sum(0) / max(len(x), 1)).sum()
    return torch.einsum("tec,ecd->td", combine, made), balance, k * len(x) - int(dispatch.sum())


def make_groups(sizes):
    return [(draw(10 + group, size, HIDDEN), draw(20 + group, size, HIDDEN)) for group, size in enumerate(sizes)]


def expected(sizes, k, factor):
    """Every group through the whole layer on one process; gradients add up."""
    num_slots = capacity(TOKENS, EXPERTS, k, factor)
    state = {name: leaf(values) for name, values in make_state().items()}
    found = []
    for x, dy in make_groups(sizes):
        x = leaf(x)
        y, balance, dropped = einsum_layer(x, state, k, num_slots)
        ((y * dy).sum() + 0.1 * balance).backward()
        found.append((y.detach(), x.grad, float(balance.detach()), dropped))
    return found, {name: values.grad for name, values in state.items()}


def step(layer, x, dy):
    x = leaf(x)
    out = layer(x)
    ((out.y * dy).sum() + 0.1 * out.balance).backward()
    return out.y.detach(), x.grad, float(out.balance.detach()), out.num_dropped


def run(rank, world_size, cases):
    """Each rank passes its share of the 4 groups through the layer, one after the other."""
    results = []
    for sizes, k, factor in cases:
        layer = GShardMoE(HIDDEN, FFN, EXPERTS, TOKENS, k, factor, dtype=torch.float64)
        torch.manual_seed(rank)  # nothing may depend on it
        load_full_state_dict(layer, make_state())
        groups = make_groups(sizes)
        mine = groups[rank * 4 // world_size : (rank + 1) * 4 // world_size]
        sent = counted(lambda layer=layer, mine=mine: results.append([step(layer, *group) for group in mine]))
        grads = full_state_dict(layer, of="grad")
        comm.all_reduce(grads["router.weight"])
        results[-1] = results[-1], grads, sent, layer.capacity
    return results


@pytest.mark.parametrize("world_size", [1, 4])
def test_a1_and_bytes_on_any_number_of_ranks(world_size):
    launched = launch(run, world_size, CASES)
    for number, (sizes, k, factor) in enumerate(CASES):
        groups, whole = expected(sizes, k, factor)
        assert factor >= 1 or sum(group[3] for group in groups) > 20  # the comparison means little without drops
        found = [group for rank in launched for group in rank[number][0]]
        for (y, dx, balance, dropped), (their_y, their_dx, their_balance, their_dropped) in zip(
            found, groups, strict=True
        ):
            assert distance(y, their_y) <= A1
            assert distance(dx, their_dx) <= A1
            assert abs(balance - their_balance) <= A1
            assert dropped == their_dropped
        for _, grads, sent, num_slots in (rank[number] for rank in launched):
            assert all(distance(grads[name], whole[name]) <= A1 for name in whole)
            calls = 4 * 4 // world_size  # four exchanges for each group of this rank
            each = exchange_bytes(EXPERTS * num_slots, HIDDEN, 8, world_size)
            assert sent == {"all_to_all_single": (calls, calls * each)}


def test_tokens_that_need_no_gradient_spare_one_exchange():
    def fn(rank, world_size):
        layer = GShardMoE(HIDDEN, FFN, EXPERTS, TOKENS, 2, 1, dtype=torch.float64)
        return counted(lambda: layer(draw(rank, TOKENS, HIDDEN)).y.sum().backward())

    each = exchange_bytes(EXPERTS * 2, HIDDEN, 8, 2)
    assert list(launch(fn, 2)) == [{"all_to_all_single": (3, 3 * each)}] * 2


def test_the_global_balance_loss_is_that_of_all_tokens():
    """Shares add up; E + 1 integers travel beside the rows."""

    def fn(rank, world_size):
        sizes = (8, 3)
        layer = GShardMoE(HIDDEN, FFN, EXPERTS, TOKENS, 2, 1, global_balance=True, dtype=torch.float64)
        load_full_state_dict(layer, make_state())
        outs = []
        sent = counted(lambda: outs.append(layer(draw(rank, sizes[rank], HIDDEN)).balance))
        outs[0].backward()
        comm.all_reduce(layer.router.weight.grad)
        return float(outs[0].detach()), layer.router.weight.grad, sent["all_reduce"]

    shares, grads, sums = zip(*launch(fn, 2), strict=True)
    x = torch.cat([draw(0, 8, HIDDEN), draw(1, 3, HIDDEN)])
    state = {name: leaf(values) for name, values in make_state().items()}
    _, balance, _ = einsum_layer(x, state, 2, 3)
    balance.backward()
    assert abs(sum(shares) - float(balance.detach())) <= A1
    assert all(distance(grad, state["router.weight"].grad) <= A1 for grad in grads)
    assert sums == ((1, (EXPERTS + 1) * 8),) * 2


def test_what_is_refused():
    def make(**options):
        GShardMoE(HIDDEN, FFN, **{"num_experts": EXPERTS, "num_tokens": TOKENS} | options)

    cases = [
        (lambda: make(num_experts=7), "experts must divide among the ranks, got 7 experts on 2 ranks; use 1, 7"),
        (lambda: make(num_experts_per_token=9), r"1\.\.8 of 8 experts, got 9"),
        (lambda: GShardMoE(HIDDEN, FFN, 4, 8)(torch.zeros(9, HIDDEN)), "slots for 8 tokens per rank, got 9"),
    ]
    assert_refused(2, cases)
    with pytest.raises(ValueError, match="6 slots do not divide among 4 ranks"):
        exchange_bytes(6, 2, 8, 4)
    for factor in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"a finite factor above 0, got 4 and {factor}"):
            capacity(4, 4, 1, factor)
