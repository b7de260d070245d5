"""The expected nodes of a token, beside all choices of a router, one by one."""

from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest

from dualpipe_lab.models import V3MoEConfig
from dualpipe_lab.plan import MEGATRON_TIME, Cluster, Plan
from dualpipe_lab.plan.stage_times import StageTimes
from dualpipe_lab.plan.token_nodes import nodes_of_token


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 6, 8, 12])
@pytest.mark.parametrize(("num_groups", "taken"), [(1, 1), (2, 1), (3, 2), (4, 2), (4, 4), (6, 3)])
@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_the_expected_nodes_are_the_mean_of_all_choices(num_nodes, num_groups, taken, per_token):
    num_experts = 12
    config = V3MoEConfig(
        num_experts=num_experts, num_experts_per_token=per_token, num_groups=num_groups, num_groups_per_token=taken
    )
    groups = [range(at, at + num_experts // num_groups) for at in range(0, num_experts, num_experts // num_groups)]
    node_of = {
        expert: node
        for node in range(num_nodes)
        for expert in range(node * num_experts // num_nodes, (node + 1) * num_experts // num_nodes)
    }
    counts = [
        len({node_of[expert] for expert in experts})
        for chosen in combinations(groups, taken)
        for experts in combinations([expert for group in chosen for expert in group], per_token)
    ]
    assert nodes_of_token(config, num_nodes) == pytest.approx(fmean(counts), rel=1e-12)


def exchange_seconds(per_token, ep, by_node):
    """Seconds of the exchanges of one layer's forward on a network that is far slower than a node."""
    model = V3MoEConfig(num_layers=1, num_dense_layers=0, num_experts=48, num_experts_per_token=per_token, num_groups=1,
                        num_groups_per_token=1)  # fmt: skip
    cluster = Cluster.of("h100", 2 * ep, 8) if ep % 8 == 0 else Cluster.of("h100", 2 * ep, 4)
    slow = replace(cluster.between, bandwidth=1e6, latency=0.0)
    plan = Plan(dp=2 * ep, ep=ep, experts_in_data=True, precision="bfloat16")
    times = StageTimes(model, plan, replace(cluster, between=slow), replace(MEGATRON_TIME, by_node=by_node), 1, 1024)
    return times.of(0)["F"]["ep"]


@pytest.mark.parametrize("ep", [12, 16, 24])
def test_rows_of_a_token_with_one_expert_cross_once_anyway(ep):
    assert exchange_seconds(1, ep, by_node=True) == pytest.approx(exchange_seconds(1, ep, by_node=False), rel=0.01)


@pytest.mark.parametrize("ep", [12, 16, 24])
def test_rows_of_a_token_with_many_experts_cross_once_for_each_node(ep):
    model = V3MoEConfig(num_experts=48, num_experts_per_token=8, num_groups=1, num_groups_per_token=1)
    nodes = nodes_of_token(model, ep // (8 if ep % 8 == 0 else 4))
    ratio = exchange_seconds(8, ep, by_node=True) / exchange_seconds(8, ep, by_node=False)
    assert ratio == pytest.approx(nodes / 8, rel=0.01)


def test_inside_of_a_node_nothing_changes():
    assert exchange_seconds(8, 4, by_node=True) == exchange_seconds(8, 4, by_node=False)
