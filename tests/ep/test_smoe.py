"""The layer of experts against a loop over experts: on 1, 2 and 4 ranks; bits, bytes, order, a shared expert."""

from functools import partial

import pytest
import torch
from ep_runs import whole
from moe_cases import FFN, HIDDEN, all_cases, check, linear, make_case
from runs import counted, draw, launch, leaf

import dualpipe_lab as lab
from dualpipe_lab.ep.all_to_all import all_to_all_rows_async
from dualpipe_lab.ep.moe import ExpertParallel, Experts, MoE
from dualpipe_lab.ep.moe.experts import (
    experts_forward,
    experts_input_grad,
    experts_weight_grad,
    grouped_product,
    grouped_weight_grad,
)
from dualpipe_lab.ep.moe.operators import (
    permute,
    permute_grad,
    sort_by_expert,
    unpermute,
    unpermute_grad,
    unsort_by_expert,
    weighted_sum,
    weighted_sum_grad,
)
from dualpipe_lab.ep.moe.permutation import plan_routes
from dualpipe_lab.ep.router import TopKRouter
from dualpipe_lab.tp.shard import full_state_dict

ROW = HIDDEN * 8


def by_layer(case, rank):
    """Through the module and autograd; the gradients of all experts, gathered."""
    torch.manual_seed(rank)
    layer = Experts.from_full(case.gate, case.up, case.down)
    x, weights, experts, dy = case.of(rank)
    x, weights = leaf(x), leaf(weights)
    y = layer(x, weights, experts)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad} | full_state_dict(layer, of="grad")


def by_pieces(case, rank, forward=experts_forward, input_grad=experts_input_grad, weight_grad=experts_weight_grad):
    """Through the plain functions, in the order of the package's docstring."""
    layer, ep = Experts.from_full(case.gate, case.up, case.down), ExpertParallel()
    x, weights, experts, dy = case.of(rank)
    routes = plan_routes(experts, len(case.gate), ep)
    back = routes.splits.transposed
    rows = sort_by_expert(all_to_all_rows_async(permute(x, routes), routes.splits).wait(), routes)
    y, kept = forward(rows, routes.counts, layer.weights)
    results = unpermute(all_to_all_rows_async(unsort_by_expert(y, routes), back).wait(), routes)
    y = weighted_sum(results, weights)
    grad, dweights = weighted_sum_grad(dy, results, weights)
    grad = sort_by_expert(all_to_all_rows_async(unpermute_grad(grad, routes), routes.splits).wait(), routes)
    grad, late = input_grad(grad, layer.weights, kept)
    dx = permute_grad(all_to_all_rows_async(unsort_by_expert(grad, routes), back).wait(), routes)
    for parameter, dw in zip(layer.weights, weight_grad(late), strict=True):
        parameter.grad = dw
    return {"y": y, "x": dx, "weights": dweights} | full_state_dict(layer, of="grad")


@torch.no_grad()
def linear_forward(rows, counts, w):
    """Experts without silu, y = (x W_g^T * x W_u^T) W_d^T, are whole on whole numbers, gradients too."""
    a, u = grouped_product(rows, w.gate, counts), grouped_product(rows, w.up, counts)
    return grouped_product(a * u, w.down, counts), (rows, a, u, counts)


@torch.no_grad()
def linear_input_grad(grad, w, kept):
    rows, a, u, counts = kept
    dh = grouped_product(grad, w.down.mT, counts)
    dx = grouped_product(dh * u, w.gate.mT, counts) + grouped_product(dh * a, w.up.mT, counts)
    return dx, [(dh * u, rows, counts), (dh * a, rows, counts), (grad, a * u, counts)]


def linear_weight_grad(kept):
    return [grouped_weight_grad(*each) for each in kept]


WAYS = {
    "layer": (by_layer, draw, {}),
    "pieces": (by_pieces, draw, {}),
    "bits": (
        partial(by_pieces, forward=linear_forward, input_grad=linear_input_grad, weight_grad=linear_weight_grad),
        whole, {"limit": 0, "activation": linear},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(1, marks=pytest.mark.every), pytest.param(4, marks=pytest.mark.every)]
)
def test_it_equals_a_loop_over_experts(world_size, way):
    """All tokens to one expert, an expert without any, k = E, uneven ranks, a rank without tokens."""
    run, numbers, options = WAYS[way]
    cases = all_cases(world_size, numbers)

    def fn(rank, world_size):
        return [run(case, rank) for case in cases.values()]

    check(launch(fn, world_size), cases, **options)


def test_rows_and_bytes_are_those_of_the_routing():
    cases = all_cases(4)

    def fn(rank, world_size):
        found = []
        for case in cases.values():
            layer = Experts.from_full(case.gate, case.up, case.down)
            x, weights, experts, dy = case.of(rank)
            routes = plan_routes(experts, 4, layer.ep)
            y = []
            run = partial(layer, leaf(x), leaf(weights), experts)
            forward = counted(lambda y=y, run=run: y.append(run()))
            found.append((routes, forward, counted(partial(y[0].backward, dy))))
        return found

    for rank, found in enumerate(launch(fn, 4)):
        for case, (routes, forward, backward) in zip(cases.values(), found, strict=True):
            sends = [(case.of(rank)[2] == expert).sum().item() for expert in range(4)]
            receives = [(case.of(source)[2] == rank).sum().item() for source in range(4)]
            assert routes.splits == (tuple(sends), tuple(receives))
            assert routes.counts == (sum(receives),)
            there, back = (sum(rows) - rows[rank] for rows in (sends, receives))
            assert forward == {"all_to_all_single": (3, 3 * 8 + (there + back) * ROW)}
            assert backward == {"all_to_all_single": (2, (there + back) * ROW)}


def test_an_expert_sees_its_rows_in_the_order_of_all_ranks_tokens():
    """Two experts per rank: without the second sort the rows of one would lie between those of the other."""
    case = make_case("chosen at random", (5, 3), num_experts=4, k=2, seed=3)

    def fn(rank, world_size):
        x, _, experts, _ = case.of(rank)
        routes = plan_routes(experts, 4, ExpertParallel())
        first = sum(case.tokens[:rank])
        ids = torch.arange(first, first + len(x)).view(-1, 1)
        rows = all_to_all_rows_async(permute(ids, routes), routes.splits).wait()
        return [part.flatten().tolist() for part in sort_by_expert(rows, routes).split(list(routes.counts))]

    first, second = launch(fn, 2)
    expected = [(case.experts == expert).any(1).nonzero().flatten().tolist() for expert in range(4)]
    assert first + second == expected


def test_a_shared_expert_runs_while_rows_travel_in_both_directions():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            lab.compute(50)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            lab.compute(50)
            return grad

    case = make_case("one expert", (4, 4), num_experts=2)

    def fn(rank, world_size, way):
        layer = Experts.from_full(case.gate, case.up, case.down)
        x, weights, experts, dy = case.of(rank)
        x = leaf(x)
        y = layer(x, weights, experts, Slow.apply) if way == "meanwhile" else layer(x, weights, experts) + Slow.apply(x)
        forward = lab.now()
        y.backward(dy)
        return forward, lab.now(), y.detach(), x.grad

    link = lab.Link(gbps=4 * ROW * 8 / 1e9 / 0.03)  # 30 ms for four rows
    apart = launch(fn, 2, "after", clock="virtual", link=link)
    together = launch(fn, 2, "meanwhile", clock="virtual", link=link)
    for (f0, b0, y0, dx0), (f1, b1, y1, dx1) in zip(apart, together, strict=True):
        assert torch.equal(y0, y1)
        assert torch.equal(dx0, dx1)
        assert f0 - f1 == 30_000_000
        assert (b0 - f0) - (b1 - f1) == 30_000_000


def test_weights_may_have_more_bits_than_rows():
    y, weights, grad = draw(1, 3, 2, 4).bfloat16(), draw(2, 3, 2).float(), draw(3, 3, 4).bfloat16()
    summed, (dy, dweights) = weighted_sum(y, weights), weighted_sum_grad(grad, y, weights)
    assert torch.equal(summed, (weights.unsqueeze(-1) * y.float()).sum(1).bfloat16())
    assert dy.dtype == torch.bfloat16
    assert torch.equal(dweights, (grad.float().unsqueeze(1) * y.float()).sum(-1))


def test_a_batch_of_sequences_keeps_its_shape():
    def fn(rank, world_size):
        torch.manual_seed(0)
        model = MoE(TopKRouter(HIDDEN, 4, 2), Experts(HIDDEN, FFN, 4))
        x = torch.randn(2, 3, HIDDEN)
        return torch.equal(model(x), model(x.view(6, HIDDEN)).view(x.shape)), model(x[:0]).shape

    assert launch(fn, 2) == [(True, (0, 3, HIDDEN))] * 2
