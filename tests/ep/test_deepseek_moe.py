"""DeepSeek-V3's router: selection in groups and by a bias, loads counted once, refusals."""

import re
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import A1, counted, distance, draw, launch, leaf
from torch.utils.checkpoint import checkpoint

from dualpipe_lab.ep.deepseek_moe import (
    DeepSeekRouter,
    bias_step,
    group_limited_topk,
    update_biases,
)
from dualpipe_lab.pp.runtime.recompute import recompute

E, K, GROUPS, KEPT, HIDDEN, SCALE = 8, 2, 4, 2, 6, 2.5


@pytest.mark.parametrize("groups", [(1, 1), (GROUPS, KEPT)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_the_bias_changes_the_choice_and_not_the_weights(scoring, has_bias, groups):
    normalise, options = scoring == "sigmoid", {"scoring": scoring, "has_bias": has_bias}
    router = DeepSeekRouter(HIDDEN, E, K, *groups, scale=SCALE, dtype=torch.float64, normalise=normalise, **options)
    assert "bias" not in dict(router.named_parameters())
    assert set(router.state_dict()) == {"weight", "bias"} - ({"bias"} if not has_bias else set())  # a counter is none
    x = draw(0, 50, HIDDEN)
    before = router(x)
    scores = before.logits.sigmoid() if normalise else before.logits.softmax(-1)
    if has_bias:
        router.bias += 0.25  # the same for all: nothing changes
        assert torch.equal(router(x).indices, before.indices)
        router.bias[:] = 0.3 * draw(1, E)
    after = router(x)
    assert torch.equal(after.indices, before.indices) != has_bias
    assert torch.equal(after.indices, group_limited_topk(scores + router.bias if has_bias else scores, K, *groups))
    chosen = scores.gather(1, after.indices)
    assert distance(after.weights, SCALE * chosen / (chosen.sum(1, keepdim=True) if normalise else 1)) <= A1


BELOW = "torch's checkpoint looks at the device of saved tensors below the stand-in's mode"


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("again", ["not", pytest.param("torch", marks=pytest.mark.on_gloo(BELOW)), "ours"])
def test_a_load_is_counted_once_per_microbatch_and_reset_by_a_step(again, has_bias):
    """Also where the forward runs twice, and not at all without a backward."""

    def fn(rank, world_size):
        router = DeepSeekRouter(HIDDEN, E, K, GROUPS, KEPT, scale=SCALE, dtype=torch.float64, has_bias=has_bias)
        expected = torch.zeros(E, dtype=torch.int64)

        def weights(x):
            return router(x).weights

        for microbatch in range(3):
            x = leaf(draw(10 * rank + microbatch, 4 + rank, HIDDEN))
            if again == "torch":
                y = checkpoint(weights, x, use_reentrant=False)
            else:
                y = recompute(weights, x) if again == "ours" else weights(x)
            y.sum().backward()
            with torch.no_grad():
                expected += router(x).load  # an evaluation
        own, found = router.load.clone(), []
        sent = counted(lambda: found.extend(update_biases(router, 0.001)))
        bias = router.bias.tolist() if has_bias else None
        return own.tolist(), expected.tolist(), found[0].tolist(), bias, int(router.load.sum()), sent

    results = launch(fn, 2)
    total = [sum(column) for column in zip(*(own for own, *_ in results), strict=True)]
    assert sum(total) == 3 * K * (4 + 5)
    for own, expected, load, bias, left, sent in results:
        assert own == expected
        assert load == total
        assert bias == (bias_step(torch.tensor(total), 0.001).tolist() if has_bias else None)
        assert left == 0
        assert sent == {"all_reduce": (1, E * 8)}


def test_two_routers_share_one_message_and_16_bits_are_refused():
    def fn(rank, world_size):
        model = torch.nn.ModuleList([DeepSeekRouter(4, 4, 2), DeepSeekRouter(4, 8, 2)])
        x = torch.ones(3, 4, requires_grad=True)
        (model[0](x).weights.sum() + model[1](x).weights.sum()).backward()
        sent = counted(lambda: update_biases(model, 0.1))
        nothing = update_biases(torch.nn.Linear(2, 2), 0.1)
        try:
            update_biases(model.bfloat16(), 0.1)
        except ValueError as error:
            return sent, nothing, str(error)

    for sent, nothing, error in launch(fn, 2):
        assert sent == {"all_reduce": (1, 12 * 8)}
        assert nothing == []
        assert "32 bits or more, got torch.bfloat16" in error


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
