"""Parts of the layer of experts: grouped products beside torch's, refusals."""

import pytest
import torch
from moe_cases import FFN, HIDDEN
from runs import assert_refused, draw, launch
from torch import nn

from dualpipe_lab.ep.expert_rules import check_divides
from dualpipe_lab.ep.moe import ExpertParallel, Experts, expert_parameters, reduce_gradients
from dualpipe_lab.ep.moe.experts import SwiGLUWeights, experts_forward, grouped_product
from dualpipe_lab.ep.moe.permutation import plan_routes


def test_grouped_products_equal_torchs():
    torch.manual_seed(0)
    counts, rows = (3, 0, 5, 0), torch.randn(8, 16)
    weights = torch.randn(4, 8, 16)
    ends = torch.tensor(counts).cumsum(0).int()
    peer = nn.functional.grouped_mm(rows, weights.mT, offs=ends)
    torch.testing.assert_close(grouped_product(rows, weights, counts), peer)


def test_counts_that_do_not_fit_are_refused():
    weights = SwiGLUWeights(*(draw(1, 2, 3, 3) for _ in range(3)))
    with pytest.raises(ValueError, match=r"each of 2 experts that sum to 4 rows, got \[1, 2\]"):
        experts_forward(draw(0, 4, 3), (1, 2), weights)


def test_experts_choices_and_means_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="got 6 experts on 4 ranks; use 1, 2, 3, 6 ranks, or 8 experts"):
        check_divides(6, 4)

    def plan(experts):
        plan_routes(torch.tensor(experts), 4, ExpertParallel())

    cases = [
        (lambda: Experts(HIDDEN, FFN, 3), "got 3 experts on 2 ranks"),
        (lambda: plan([[0, 0]]), "different experts, got .0, 0. for token 0"),
        (lambda: plan([[0, 4]]), "numbered 0 to 3, got choices from 0 to 4"),
        (lambda: plan([[-1, 2]]), "from -1 to 2"),
        (lambda: plan([0, 1]), "shape .tokens, k."),
        (
            lambda: reduce_gradients(Experts(HIDDEN, FFN, 2), ExpertParallel(), 0),
            "got 0 on all ranks together; skip the step",
        ),
    ]
    assert_refused(2, cases)


def test_expert_parameters_are_those_of_all_layers():
    def fn(rank, world_size):
        model = nn.ModuleList([Experts(HIDDEN, FFN, 2), nn.Linear(2, 2), Experts(HIDDEN, FFN, 2)])
        return len(expert_parameters(model)), [float(p.std()) for p in expert_parameters(model)]

    ((count, deviations),) = launch(fn, 1)
    assert count == 6
    assert all(0.5 * HIDDEN**-0.5 < deviation < 2 * HIDDEN**-0.5 for deviation in deviations)
