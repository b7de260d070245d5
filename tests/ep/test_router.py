"""The router: gradients by hand against autograd and the oracle, ties, ranks without tokens, refusals."""

import json

import pytest
import torch
from ep_runs import close
from hypothesis import given
from hypothesis import strategies as st
from runs import ORACLES, draw, leaf

from dualpipe_lab.ep.router import TopKRouter, expert_weights, top_experts
from dualpipe_lab.ep.router_losses import balance_loss, z_loss

ORACLE = json.loads((ORACLES / "topk_gating.json").read_text())
KINDS = {
    "softmax_topk": ("softmax", False),
    "softmax_topk_renorm": ("softmax", True),
    "sigmoid_topk": ("sigmoid", False),
    "sigmoid_topk_renorm": ("sigmoid", True),
}


def by_autograd(logits, k, scoring, normalise, scale):
    """The formulas as one would write them for autograd."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    weights, indices = scores.topk(k, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return indices, scale * weights


@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["name"])
def test_the_oracle_s_weights_and_gradients(case):
    logits, upstream = (leaf(torch.tensor(ORACLE[name], dtype=torch.float64)) for name in ("logits", "upstream"))
    indices = top_experts(logits.detach(), case["k"])
    weights = expert_weights(logits, indices, *KINDS[case["kind"]], case["scale"])
    weights.backward(upstream[:, : case["k"]])
    assert indices.tolist() == case["expected"]["indices"]
    assert close(weights.detach(), torch.tensor(case["expected"]["weights"], dtype=torch.float64))
    assert close(logits.grad, torch.tensor(case["expected"]["dlogits"], dtype=torch.float64))


def test_the_oracle_s_linear_layer():
    block = ORACLE["gate_linear"]
    x, weight = (leaf(torch.tensor(block[name], dtype=torch.float64)) for name in ("x", "Wg"))
    router = TopKRouter(3, 6, block["k"], normalise=True, dtype=torch.float64)
    router.weight.data = weight.detach()
    routing = router(x)
    routing.weights.backward(torch.tensor(ORACLE["upstream"], dtype=torch.float64)[:, : block["k"]])
    expected = block["expected"]
    assert routing.indices.tolist() == expected["indices"]
    assert close(routing.weights.detach(), torch.tensor(expected["weights"], dtype=torch.float64))
    assert close(router.weight.grad, torch.tensor(expected["dWg"], dtype=torch.float64))
    assert close(x.grad, torch.tensor(expected["dx"], dtype=torch.float64))


@given(
    seed=st.integers(0, 10_000),
    num_tokens=st.integers(0, 7),
    experts=st.integers(1, 9).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))),
    kind=st.sampled_from(list(KINDS.values())),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_any_size_against_autograd(seed, num_tokens, experts, kind, scale):
    num_experts, k = experts
    drawn = 3 * draw(seed, num_tokens, num_experts)
    ours, theirs, grad = leaf(drawn), leaf(drawn), draw(seed + 1, num_tokens, k)
    indices = top_experts(ours.detach(), k)
    weights = expert_weights(ours, indices, *kind, scale)
    weights.backward(grad)
    their_indices, their_weights = by_autograd(theirs, k, *kind, scale)
    their_weights.backward(grad)
    assert torch.equal(indices, their_indices)
    assert close(weights.detach(), their_weights.detach())
    assert close(ours.grad, theirs.grad)
    assert all(len(set(row)) == k for row in indices.tolist())  # no expert twice
    if kind != ("softmax", False):
        assert not ours.grad.scatter(1, indices, 0.0).any()  # exactly zero outside of the choice


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_normalised_single_expert_gives_the_router_exactly_nothing(scoring):
    logits, grad = leaf(draw(0, 9, 5)), draw(1, 9, 1)
    indices = top_experts(logits.detach(), 1)
    weights = expert_weights(logits, indices, scoring, normalise=True)
    weights.backward(grad)
    assert torch.equal(weights, torch.ones(9, 1).double())
    assert not logits.grad.any()
    logits.grad = None
    expert_weights(logits, indices, scoring).backward(grad)  # Switch: the score itself
    assert logits.grad.any(-1).all()


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[2.0, 7.0, 7.0, 7.0, 2.0], [1.0] * 5, [0.0, -0.0, 0.0, -0.0, 1.0]], [[1, 2, 3], [0, 1, 2], [4, 0, 1]]),
        ([[0.0] * 300], [[0, 1, 2]]),  # long rows are sorted by another algorithm
        ([[40.0, 60.0, 50.0]], [[1, 2, 0]]),  # whose sigmoids round to one number
    ],
)
def test_equal_scores_are_chosen_in_the_order_of_their_numbers_and_close_ones_told_apart(scores, expected):
    assert top_experts(torch.tensor(scores, dtype=torch.float64), 3).tolist() == expected


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_logits_of_thousands_stay_finite(scoring):
    for shift in (-5000.0, 5000.0):
        logits = leaf(draw(2, 4, 6) + shift)
        weights = expert_weights(logits, top_experts(logits.detach(), 2), scoring, normalise=True)
        weights.backward(torch.ones_like(weights) * draw(3, 4, 2))
        assert weights.isfinite().all()
        assert logits.grad.isfinite().all()
        assert close(weights.detach().sum(-1), torch.ones(4).double())


def test_masked_experts_are_never_chosen():
    logits = leaf(torch.tensor([[3.0, -torch.inf, 1.0, 2.0]], dtype=torch.float64))
    indices = top_experts(logits.detach(), 3)
    assert indices.tolist() == [[0, 3, 2]]
    expert_weights(logits, indices).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TopKRouter(3, 4, 5), r"1\.\.4 of 4 experts, got 5"),
        (lambda: TopKRouter(3, 4, 0), r"1\.\.4 of 4 experts, got 0"),
        (lambda: TopKRouter(3, 4, 2, scoring="tanh"), "'softmax' or 'sigmoid', got 'tanh'"),
        (lambda: expert_weights(torch.zeros(1, 2), torch.zeros(1, 1).long(), "tanh"), "got 'tanh'"),
        (lambda: top_experts(torch.tensor([[1.0, -torch.inf]]), 2), "needs 2 finite scores"),
        (lambda: TopKRouter(3, 4, 2, normalise=True)(torch.tensor([[1.0] * 3, [1, torch.nan, 1]])), "token 1"),
        (lambda: TopKRouter(3, 4, 2, normalise=True)(torch.tensor([[1.0] * 3, [1, torch.inf, 1]])), "token 1"),
        (lambda: TopKRouter(4, 5, 1, scoring="sigmoid", normalise=True), "as Switch does"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tokens_in_16_bits_are_routed_in_32():
    torch.manual_seed(0)
    router = TopKRouter(16, 8, 2, normalise=True)
    x = torch.randn(6, 16).bfloat16().requires_grad_()
    routing = router(x)
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    assert torch.equal(routing.indices, router(x.float()).indices)
    routing.weights[:, 0].sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_no_tokens_no_nan():
    router = TopKRouter(3, 4, 2, dtype=torch.float64)
    routing = router(torch.zeros(0, 3, dtype=torch.float64))
    assert routing.indices.shape == routing.weights.shape == (0, 2)
    assert routing.load.tolist() == [0] * 4
    losses = balance_loss(routing.logits, routing.load) + z_loss(routing.logits)
    (losses + routing.weights.sum()).backward()
    assert float(losses.detach()) == 0
    assert torch.equal(router.weight.grad, torch.zeros(4, 3, dtype=torch.float64))
