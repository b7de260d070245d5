"""The layer of experts against a loop over experts: on 1, 2 and 4 ranks; bytes, a shared expert."""

from functools import partial

import pytest
import torch
from ep_runs import working
from moe_cases import FFN, HIDDEN, all_cases, by_layer, check, make_case, plain
from runs import A1, assert_refused, counted, distance, draw, launch, leaf
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.ep.expert_rules import check_divides
from dualpipe_lab.ep.moe import ExpertParallel, Experts, MoE, expert_parameters, reduce_gradients
from dualpipe_lab.ep.moe.experts import SwiGLUWeights, experts_forward
from dualpipe_lab.ep.moe.operators import weighted_sum, weighted_sum_grad
from dualpipe_lab.ep.moe.permutation import plan_routes
from dualpipe_lab.ep.overlap import MicrobatchPass, OverlappableLayer, backward_alone, execute, forward_alone
from dualpipe_lab.ep.router import Routing, TopKRouter, tokens_per_expert
from dualpipe_lab.tp.shard import full_state_dict

ROW = HIDDEN * 8


def by_pieces(case, rank):
    """Through a layer of `ep.overlap` whose attention and router give what the case says."""
    x, weights, experts, dy = case.of(rank)
    weights, layer = leaf(weights), Experts.from_full(case.gate, case.up, case.down)
    routing = Routing(experts, weights, tokens_per_expert(experts, len(case.gate)), x)
    one = MicrobatchPass([OverlappableLayer(nn.Identity(), lambda _: routing, layer)], x)
    execute(forward_alone(1), forward=one)
    y, one.dy = one.output, dy
    execute(backward_alone(1), backward=one)
    return {"y": y - x, "x": one.dx - dy, "weights": weights.grad} | full_state_dict(layer, of="grad")


WAYS = {"layer": by_layer, "pieces": by_pieces}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(1, marks=pytest.mark.every), pytest.param(4, marks=pytest.mark.every)]
)
def test_it_equals_a_loop_over_experts(world_size, way):
    """All tokens to one expert, an expert without any, k = E, uneven ranks, a rank without tokens."""
    cases = all_cases(world_size)

    def fn(rank, world_size):
        return [WAYS[way](case, rank) for case in cases.values()]

    check(launch(fn, world_size), cases)


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


def test_a_shared_expert_runs_while_rows_travel_in_both_directions():
    case, slow = make_case("one expert", (4, 4), num_experts=2), working(50, 50)

    def fn(rank, world_size, way):
        layer = Experts.from_full(case.gate, case.up, case.down)
        x, weights, experts, dy = case.of(rank)
        x = leaf(x)
        y = layer(x, weights, experts, slow) if way == "meanwhile" else layer(x, weights, experts) + slow(x)
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
        model = MoE(TopKRouter(HIDDEN, 4, 2), Experts(HIDDEN, FFN, 4), shared=torch.tanh)
        x = torch.randn(2, 3, HIDDEN)
        return torch.equal(model(x), model(x.view(6, HIDDEN)).view(x.shape)), model(x[:0]).shape

    assert launch(fn, 2) == [(True, (0, 3, HIDDEN))] * 2


def test_experts_choices_and_means_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="got 6 experts on 4 ranks; use 1, 2, 3, 6 ranks, or 8 experts"):
        check_divides(6, 4)

    def plan(experts):
        plan_routes(torch.tensor(experts), 4, ExpertParallel())

    weights = SwiGLUWeights(*(draw(1, 2, 3, 3) for _ in range(3)))
    rows = r"each of 2 experts that sum to 4 rows, got \[1, 2\]"
    cases = [
        (lambda: Experts(HIDDEN, FFN, 3), "got 3 experts on 2 ranks"),
        (lambda: plan([[0, 0]]), "different experts, got .0, 0. for token 0"),
        (lambda: plan([[0, 4]]), "numbered 0 to 3, got choices from 0 to 4"),
        (lambda: plan([[-1, 2]]), "from -1 to 2"),
        (lambda: plan([0, 1]), "shape .tokens, k."),
        (lambda: experts_forward(draw(0, 4, 3), (1, 2), weights), rows),
        (lambda: reduce_gradients(Experts(HIDDEN, FFN, 2), ExpertParallel(), 0), "got 0 on all ranks together; skip"),
    ]
    assert_refused(2, cases)


def test_gradients_of_a_mean_are_sums_divided_by_all_tokens():
    case = make_case("chosen at random", (3, 5))

    def fn(rank, world_size):
        layer = Experts.from_full(case.gate, case.up, case.down)
        x, weights, experts, dy = case.of(rank)
        layer(x, weights, experts).backward(dy)
        reduce_gradients(layer, layer.ep, 8)
        return full_state_dict(layer, of="grad")

    for found in launch(fn, 2):
        assert all(distance(8 * grad, plain(case)[name]) <= A1 for name, grad in found.items())


def test_expert_parameters_are_those_of_all_layers():
    def fn(rank, world_size):
        model = nn.ModuleList([Experts(HIDDEN, FFN, 2), nn.Linear(2, 2), Experts(HIDDEN, FFN, 2)])
        return [float(p.std()) for p in expert_parameters(model)]

    (deviations,) = launch(fn, 1)
    assert len(deviations) == 6
    assert all(0.5 * HIDDEN**-0.5 < deviation < 2 * HIDDEN**-0.5 for deviation in deviations)
