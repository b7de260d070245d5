"""Copies of experts: summed once, divided once, on five grids."""

import pytest
import torch
from ep_runs import distance
from moe_cases import HIDDEN, make_case
from runs import A1, draw, launch, leaf
from torch import nn

import dualpipe_lab as lab
from dualpipe_lab.dp.grad_norm import global_norm
from dualpipe_lab.ep.moe import (
    ExpertParallel,
    Experts,
    MoE,
    expert_parameters,
    reduce_gradients,
)
from dualpipe_lab.ep.router import TopKRouter
from dualpipe_lab.tp.shard import full_state_dict


class FixedRouter(TopKRouter):
    """The choices of a case, with weights and gradients of logits."""

    def __init__(self, experts, weight):
        super().__init__(HIDDEN, 4, experts.shape[1], normalise=True, dtype=torch.float64)
        self.experts, self.weight.data = experts, weight

    def choose(self, logits):
        return self.experts


def trained(rank, case, ep, data=None, num_tokens=None):
    """All gradients of the mean loss, and the norm of their whole."""
    torch.manual_seed(rank)
    x, _, experts, dy = case.of(rank)
    shared = nn.Linear(HIDDEN, HIDDEN, bias=False).double()
    nn.init.constant_(shared.weight, 0.25)
    router = FixedRouter(experts, draw(8, 4, HIDDEN))
    model = MoE(router, Experts.from_full(case.gate, case.up, case.down, ep), shared=shared)
    x = leaf(x)
    y, routing = model.with_routing(x)
    assert routing.load.tolist() == [int((experts == expert).sum()) for expert in range(4)]
    (y * dy).sum().backward()
    reduce_gradients(model, ep, num_tokens or len(case.x), data)
    experts = {id(parameter) for parameter in expert_parameters(model)}
    gradients = [(parameter.grad, ("ep",) if id(parameter) in experts else ()) for parameter in model.parameters()]
    norm = global_norm(gradients, {"ep": ep.group})
    return {"x": x.grad, "norm": torch.tensor(norm)} | full_state_dict(model, ep.group, "grad")


GRIDS = {
    "4 x 1": lab.Topology([("ep", 4)]),
    "2 x 2": lab.Topology([("dp", 2), ("ep", 2)]),
    "2 x 2, ep apart": lab.Topology([("ep", 2), ("dp", 2)]),
    "2 x 2 inside dp": lab.Topology([("dp", 4)], edp=2),
    "1 x 4": lab.Topology([("dp", 4)]),
}


@pytest.mark.parametrize(
    "grid", [*list(GRIDS)[1:4], *(pytest.param(name, marks=pytest.mark.every) for name in ("4 x 1", "1 x 4"))]
)
def test_copies_of_experts_are_summed_and_divided_once(grid):
    """ep and edp of 4 and 1, 2 and 2 in three layouts, 1 and 4: the gradients and their norm are those of one rank."""
    case = make_case("last unused", (5, 0, 1, 4), num_experts=4, k=2, seed=5)
    one = case._replace(tokens=(10,))
    topology = GRIDS[grid]
    (expected,) = launch(lambda rank, world_size: trained(rank, one, ExpertParallel()), 1)
    found = launch(lambda rank, world_size: trained(rank, case, ExpertParallel.of(lab.Mesh(topology))), 4)
    for rank, results in enumerate(found):
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            value = value[sum(case.tokens[:rank]) : sum(case.tokens[: rank + 1])] if name == "x" else value
            assert distance(results[name], value) <= A1, f"rank {rank}: {name}"
        assert not results["experts.gate"][3].any()  # an expert without rows has zeros, not None
