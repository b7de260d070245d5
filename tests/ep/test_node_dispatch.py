"""One copy per node: results and gradients of the plain dispatch, rows between nodes counted, refusals."""

import pytest
import torch
from ep_runs import whole
from moe_cases import HIDDEN, all_cases, by_layer, check, make_case, plain
from runs import A1, counted, distance, launch

import dualpipe_lab as lab
from dualpipe_lab.dp.hybrid import count_by_node
from dualpipe_lab.ep.moe import ExpertParallel, Experts
from dualpipe_lab.ep.node_dispatch import NodeGroups, hierarchical_experts
from dualpipe_lab.launch.context import rank_context


def run(case, rank, nodes, meanwhile=None):
    return by_layer(case, rank, lambda layer, *tokens: hierarchical_experts(*tokens, layer, nodes, meanwhile))


@pytest.mark.parametrize(("world_size", "num_nodes"), [(1, 1), (4, 2)])
def test_it_equals_a_loop_over_experts(world_size, num_nodes):
    """All tokens to one expert, an expert without any, k = E, uneven ranks, a rank without tokens."""
    cases = all_cases(world_size)

    def fn(rank, world_size):
        nodes = NodeGroups.of(num_nodes)
        return [run(case, rank, nodes) for case in cases.values()]

    check(launch(fn, world_size), cases)


def test_rows_between_nodes_are_pairs_of_token_and_node():
    """Four ranks on two nodes, 8 experts, k = 4: many tokens have two experts on the other node."""
    case = make_case("random", (9, 0, 6, 12), num_experts=8, k=4)
    topology = lab.Topology([("ep", 4)], ranks_per_node=2)

    def fn(rank, world_size):
        nodes, layer = NodeGroups.of(2), Experts.from_full(case.gate, case.up, case.down)
        x, weights, experts, _ = case.of(rank)
        ledger, between = count_by_node(topology), []
        for send in (
            lambda: layer(x, weights, experts),
            lambda: hierarchical_experts(x, weights, experts, layer, nodes),
        ):
            before = ledger.total().inter
            with torch.no_grad():
                send()
            between.append(ledger.total().inter - before)
        return between

    home = case.experts // 4
    source = torch.arange(4).repeat_interleave(torch.tensor(case.tokens))
    away = home != source[:, None] // 2  # choices on the other node
    for rank, (direct, once) in enumerate(launch(fn, 4)):
        mine, partners = source == rank, source == (rank + 2) % 4
        guests = away & (case.experts // 2 == rank)
        assert direct == (int(away[mine].sum()) + int(guests.sum())) * HIDDEN * 8 + 2 * 2 * 8  # rows and counts
        copies, hosted = (int(away[some].any(1).sum()) for some in (mine, partners))
        k = case.experts.shape[1]
        assert once == (copies + hosted) * HIDDEN * 8 + copies * k * 16 + 8  # rows, weights and numbers, counts
    assert int(away.sum()) > int(away.any(1).sum())


def test_the_shared_expert_runs_while_rows_travel_between_nodes():
    case = make_case("random", (5, 4), numbers=whole)

    def fn(rank, world_size):
        nodes, seen = NodeGroups.of(2), []

        def shared(x):
            seen.append(rank_context().ledger.entries["all_to_all_single"].count)
            return 2 * x

        return run(case, rank, nodes, shared)["y"], run(case, rank, nodes)["y"], seen

    for rank, (both, alone, seen) in enumerate(launch(fn, 2)):
        assert torch.equal(both, alone + 2 * case.of(rank)[0])
        assert seen == [2]  # counts and rows are on their way, nothing else


def test_nodes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(lab.RankError, match="got 2 ranks on 3 nodes"):
        launch(lambda rank, world_size: NodeGroups.of(3), 2)


def test_groups_of_a_part_of_the_world():
    """Two expert-parallel groups of two ranks, each on two nodes."""
    case = make_case("random", (3, 5))
    topology = lab.Topology([("dp", 2), ("ep", 2)])

    def fn(rank, world_size):
        ep = ExpertParallel.of(lab.Mesh(topology))
        nodes = NodeGroups.of(2, ep)
        layer = Experts.from_full(case.gate, case.up, case.down, ep)
        x, weights, experts, _ = case.of(rank % 2)
        results = []
        sent = counted(lambda: results.append(hierarchical_experts(x, weights, experts, layer, nodes)))
        return results[0].detach(), sum(count for count, _ in sent.values())

    expected = plain(case)["y"]
    for rank, (y, calls) in enumerate(launch(fn, 4)):
        assert distance(y, expected[:3] if rank % 2 == 0 else expected[3:]) <= A1
        assert calls == 8  # counts, rows, numbers, weights; counts, rows, rows back; rows home
