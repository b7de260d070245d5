"""The expected nodes of a token, beside all choices of a router, one by one."""

from itertools import combinations
from statistics import fmean

import pytest

from dualpipe_lab.models import V3MoEConfig
from dualpipe_lab.plan.token_nodes import nodes_of_token


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize(("num_groups", "taken"), [(1, 1), (2, 1), (3, 2), (4, 2), (4, 4), (6, 3)])
@pytest.mark.parametrize("per_token", [1, 2, 3])
def test_the_expected_nodes_are_the_mean_of_all_choices(num_nodes, num_groups, taken, per_token):
    num_experts = 12
    config = V3MoEConfig(
        num_experts=num_experts, num_experts_per_token=per_token, num_groups=num_groups, num_groups_per_token=taken
    )
    groups = [range(at, at + num_experts // num_groups) for at in range(0, num_experts, num_experts // num_groups)]
    counts = [
        len({expert * num_nodes // num_experts for expert in experts})
        for chosen in combinations(groups, taken)
        for experts in combinations([expert for group in chosen for expert in group], per_token)
    ]
    assert nodes_of_token(config, num_nodes) == pytest.approx(fmean(counts), rel=1e-12)
