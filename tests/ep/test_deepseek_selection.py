"""DeepSeek-V3's selection in groups: against trying all groups, ties, groups of one, refusals."""

import re
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import draw

from dualpipe_lab.ep.deepseek_moe import (
    DeepSeekRouter,
    group_limited_topk,
)


def choose_by_trying(scores, k, num_groups, num_kept):
    """The best experts of one token, for scores without ties: all sets of groups, the best k of them."""
    size = len(scores) // num_groups
    groups = [scores[g * size :][:size] for g in range(num_groups)]
    value = [sum(sorted(group)[-2:]) for group in groups]
    kept = max(combinations(range(num_groups), num_kept), key=lambda c: sum(value[g] for g in c))
    experts = [g * size + i for g in kept for i in range(size)]
    return sorted(experts, key=lambda i: -scores[i])[:k]


@given(
    seed=st.integers(0, 10**6),
    sizes=st.sampled_from([(8, 4, 2, 2), (8, 8, 3, 3), (12, 3, 1, 4), (6, 2, 2, 6), (9, 3, 2, 1)]),
    shift=st.sampled_from([0.0, -5.0, 1.0]),
)
def test_selection_equals_trying_all_groups_and_a_shift_of_all_scores_changes_nothing(seed, sizes, shift):
    num_experts, num_groups, num_kept, k = sizes
    scores = draw(seed, 5, num_experts)  # half of them negative
    chosen = group_limited_topk(scores + shift, k, num_groups, num_kept)
    assert chosen.tolist() == [choose_by_trying(row, k, num_groups, num_kept) for row in scores.tolist()]
    size = num_experts // num_groups
    assert all(len({expert // size for expert in row}) <= num_kept for row in chosen.tolist())


def test_masked_experts_are_not_chosen_where_the_others_are_negative():
    scores = torch.tensor([[-0.1, -0.9, -0.3, -0.4]])  # the first group sums to -1.0, the second to -0.7
    assert group_limited_topk(scores, 2, num_groups=2).tolist() == [[2, 3]]
    zeros = torch.where(torch.tensor([[True, True, False, False]]), 0.0, scores)
    assert zeros.topk(2).indices.sort().values.tolist() == [[0, 1]]  # what a mask of 0 would choose


def test_ties_go_to_the_lower_number_and_groups_may_have_one_expert():
    assert group_limited_topk(torch.ones(1, 6), 3, 3, 2).tolist() == [[0, 1, 2]]
    assert group_limited_topk(torch.tensor([[0.2, 0.4, 0.1, 0.3]]), 2, 4, 2).tolist() == [[1, 3]]


def not_finite(bad):
    scores = torch.zeros(2, 4)
    scores[1, 3] = bad
    return group_limited_topk(scores, 2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DeepSeekRouter(4, 8, 4, 4, 1), "1 groups of 2 experts offer 2, a token needs 4; use num_groups_per"),
        (lambda: DeepSeekRouter(4, 8, 2, 3, 1), "groups divide the experts, got 8 experts in 3 groups"),
        (lambda: DeepSeekRouter(4, 8, 2, 2, 3), "a token uses 1..2 of 2 groups, got 3"),
        (lambda: DeepSeekRouter(4, 8, 9, 2, 2), "a token goes to 1..8 of 8 experts, got 9"),
        (lambda: DeepSeekRouter(4, 8, 1, 2, 2), "normalised weight of a single expert"),
        *((lambda bad=bad: not_finite(bad), "for token 1") for bad in (float("nan"), float("inf"), -float("inf"))),
    ],
)
def test_what_cannot_work_is_refused_without_a_process(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
