"""A routed layer under a placement: results, gradients and steps of the layer without replicas, and what is sent."""

import pytest
import torch
from ep_runs import distance
from moe_cases import FFN, HIDDEN, all_cases, make_case, plain
from runs import A1, counted, launch, leaf

import dualpipe_lab as lab
from dualpipe_lab.dp.ddp import Ddp
from dualpipe_lab.dp.zero1 import Zero1
from dualpipe_lab.ep.eplb import ExpertPlacement, balance
from dualpipe_lab.ep.eplb.placement import make_placement
from dualpipe_lab.ep.moe import Experts, MoE, counted_gradients, reduce_gradients
from dualpipe_lab.ep.node_dispatch import NodeGroups, hierarchical_experts
from dualpipe_lab.ep.placed_experts import PlacedExperts, collect_experts, place_experts, sources, trivial_placement
from dualpipe_lab.ep.router import TopKRouter

NAMES = ("gate", "up", "down")
NUMEL = 3 * HIDDEN * FFN


def placed(*rows, num_experts=4):
    return make_placement(torch.tensor(rows, device="cpu").numpy(), num_experts)


PLACEMENTS = {
    1: [placed([0, 1, 2, 3, 2])],
    2: [placed([3, 1, 0, 2, 1, 3])],
    4: [
        placed([0, 1, 0, 2, 3, 0, 1, 3]),  # one expert on three ranks, one alone
        placed([2, 2, 1, 0, 3, 1, 2, 3]),  # two replicas on one rank
        placed([3, 2, 1, 0]),  # no replica, another order
        balance([[9.0, 2, 1, 4]], 12, num_ranks=4),
    ],
}


def run(case, rank, placement, nodes=None):
    """One backward through the placed layer, its raw and its summed gradients."""
    layer = PlacedExperts(Experts.from_full(case.gate, case.up, case.down), placement)
    x, weights, experts, dy = case.of(rank)
    x, weights = leaf(x), leaf(weights)
    y = layer(x, weights, experts) if nodes is None else hierarchical_experts(x, weights, experts, layer, nodes)
    y.backward(dy)
    raw = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in layer.weights]
    sent = counted(layer.sum_replicas)
    summed = [p.grad for p in layer.weights]
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad}, raw, summed, sent


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_outputs_and_gradients_are_those_without_replicas(world_size):
    """All cases of routing, each with all placements, plain and, on four ranks, by node."""
    cases = all_cases(world_size)

    def fn(rank, world_size):
        nodes = NodeGroups.of(2) if world_size == 4 else None
        ways = [None] if nodes is None else [None, nodes]
        return [
            [run(case, rank, placement, way) for placement in PLACEMENTS[world_size] for way in ways]
            for case in cases.values()
        ]

    results = launch(fn, world_size)
    for index, case in enumerate(cases.values()):
        expected = plain(case)
        for number in range(len(results[0][index])):
            placement = PLACEMENTS[world_size][number // (2 if world_size == 4 else 1)]
            runs = [result[index][number] for result in results]
            for key in ("y", "x", "weights"):
                assert distance(torch.cat([found[key] for found, *_ in runs]), expected[key]) <= A1, key
            check_gradients(placement, runs, expected)


def check_gradients(placement, runs, expected):
    """Raw gradients add up to an expert's; summed ones are equal on all replicas, and the expert's."""
    table = placement.physical_to_logical[0]
    for position, name in enumerate(NAMES):
        raw, summed = (torch.cat([found[kind][position] for found in runs]) for kind in (1, 2))
        assert distance(torch.zeros_like(expected[name]).index_add_(0, table, raw), expected[name]) <= A1
        assert distance(summed, expected[name][table]) <= A1
        for expert in range(4):
            replicas = summed[table == expert]
            assert torch.equal(replicas, replicas[:1].expand_as(replicas))


def test_a_replica_sends_twice_its_share_and_norms_count_an_expert_once():
    case, placement = make_case("chosen at random", (8, 8, 8, 8)), PLACEMENTS[4][0]

    def fn(rank, world_size):
        sent = run(case, rank, placement)[3]
        model = make_model()
        plain_norm = squared(model, case.of(rank)[0])
        place_experts(model, placement)
        return sent, plain_norm, squared(model, case.of(rank)[0])

    results = launch(fn, 4)
    counts = {0: 3, 1: 2, 2: 1, 3: 2}
    for rank, (sent, *_) in enumerate(results):
        here = placement.physical_to_logical[0].view(4, -1)[rank].tolist()
        shares = [2 * (counts[e] - 1) * NUMEL // counts[e] for e in here]
        assert sent == {"all_to_all_single": (2, 8 * sum(shares))}
    one, other = (sum(found) for found in list(zip(*results, strict=True))[1:])
    assert other == pytest.approx(one, rel=1e-12)


def make_model(num_experts=4):
    torch.manual_seed(0)
    return MoE(TopKRouter(HIDDEN, num_experts, 2), Experts(HIDDEN, FFN, num_experts)).double()


def squared(model, x):
    """This rank's share of the squared norm of the experts' gradients of a step."""
    model.zero_grad()
    model(x).square().sum().backward()
    reduce_gradients(model, model.experts.ep, len(x) * 4)
    return sum(float(grad.square().sum()) for grad, axes in counted_gradients(model) if axes)


def test_tokens_of_an_expert_are_shared_by_turns():
    """From the source's number on; the loads of an expert's replicas differ by at most one per source."""
    placement = PLACEMENTS[4][0]

    def fn(rank, world_size):
        layer = make_model().experts
        layer = PlacedExperts(layer, placement)
        chosen = torch.tensor([[0, 1], [0, 3], [2, 0], [0, 1]])
        return layer.slots_of(chosen).tolist(), str(layer)

    first, second, third, _ = launch(fn, 4)
    assert first[0] == [[0, 1], [2, 4], [3, 5], [0, 6]]
    assert second[0] == [[2, 6], [5, 7], [3, 0], [2, 1]]
    assert third[0] == [[5, 1], [0, 4], [3, 2], [5, 6]]
    assert first[1] == "PlacedExperts(4 experts in 8 slots, here [0, 1], (6, 4))"


def test_experts_come_back_in_order_and_wrong_placements_say_so():
    """Also an optimizer over a group, which knows no replicas; nothing has changed."""
    placement = PLACEMENTS[4][0]

    def fn(rank, world_size):
        model = make_model()
        before = [p.detach().clone() for p in model.experts.parameters()]
        wrong = placed([0, 1, 0, 1, 2, 3]), placed([0, 1, 2, 0], num_experts=4), balance([[1.0, 2, 3]], 4, num_ranks=4)
        texts = [refusal(place_experts, model, placement) for placement in (*wrong, twice(placement))]
        place_experts(model, placement)
        alone = [group for group in [lab.comm.new_group([r]) for r in range(4)] if group is not None][rank]
        refused = [refusal(stage, part, alone) for stage in (Ddp, Zero1) for part in (model, model.experts)]
        texts.append(refusal(place_experts, model, placement))
        collect_experts(model)
        same = all(torch.equal(a, b) for a, b in zip(before, model.experts.parameters(), strict=True))
        return same, type(model.experts).__name__, texts, refused

    for same, kind, texts, refused in launch(fn, 4):
        assert (same, kind) == (True, "Experts")
        assert "got 6 on 4; use 8 slots" in texts[0]
        assert "a slot for each of 4 experts, got [0, 1, 2, 0]" in texts[1]
        assert "make it from the loads of 4 experts" in texts[2]
        assert "got 2 rows for 1 layers" in texts[3]
        assert "have a placement already" in texts[4]
        for text in refused:
            assert "give an optimizer the Mesh in place of the group" in text


def twice(placement):
    return ExpertPlacement(*(part.repeat(2, *[1] * (part.dim() - 1)) for part in placement))


def refusal(call, *args):
    with pytest.raises(ValueError, match=r"got|already|alone") as caught:
        call(*args)
    return str(caught.value)


def test_weights_come_from_near_and_senders_take_turns():
    assert trivial_placement(3, 2).counts.tolist() == [[1, 1, 1]] * 2
    assert sources([0, 1, 2, 0], [0, 1, 1, 0], 2) == [0, 1, 1, 3]  # rank 1 has none of expert 1
    assert sources([0, 1, 0, 2], [1, 0, 2, 0], 2) == [1, 0, 3, 2]  # all within their ranks
    assert sources([0, 1, 0, 2, 3, 4], [0, 1, 0, 2, 0, 0], 3) == [0, 1, 2, 3, 0, 2]  # replicas take turns
