"""Tokens, choices and weights of a layer of experts, and the same layer by a loop over experts under autograd."""

from typing import NamedTuple

import torch
from runs import A1, distance, draw, leaf
from torch.nn.functional import silu

from dualpipe_lab.ep.moe import Experts
from dualpipe_lab.tp.shard import full_state_dict

HIDDEN, FFN = 4, 6


class Case(NamedTuple):
    """All ranks' tokens: `tokens[r]` of them are rank r's."""

    tokens: tuple
    x: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    dy: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def of(self, rank):
        """The rank's part of x, weights, experts and dy."""
        span = slice(sum(self.tokens[:rank]), sum(self.tokens[: rank + 1]))
        return self.x[span], self.weights[span], self.experts[span], self.dy[span]


def choices(name, num_tokens, num_experts, k, seed):
    """`experts_TK` of one kind of routing."""
    if name == "one expert":
        return torch.full((num_tokens, 1), num_experts - 1)
    if name == "last unused":
        num_experts -= 1
    if name == "all experts":
        k = num_experts
    scores = draw(seed, num_tokens, num_experts)
    return scores.topk(min(k, num_experts), 1).indices


def make_case(name, tokens, num_experts=4, k=2, seed=0, numbers=draw):
    total = sum(tokens)
    experts = choices(name, total, num_experts, k, seed)
    return Case(
        tuple(tokens),
        numbers(seed + 1, total, HIDDEN),
        numbers(seed + 2, *experts.shape),
        experts,
        numbers(seed + 3, total, HIDDEN),
        numbers(seed + 4, num_experts, FFN, HIDDEN),
        numbers(seed + 5, num_experts, FFN, HIDDEN),
        numbers(seed + 6, num_experts, HIDDEN, FFN),
    )


def plain(case):
    """y and all gradients of sum(y * dy), one expert after another."""
    x, weights, *parameters = map(leaf, (case.x, case.weights, case.gate, case.up, case.down))
    gate, up, down = parameters
    y = torch.zeros_like(x)
    for expert in range(len(gate)):
        token, choice = (case.experts == expert).nonzero(as_tuple=True)
        inner = silu(x[token] @ gate[expert].t()) * (x[token] @ up[expert].t())
        y = y.index_add(0, token, weights[token, choice].unsqueeze(1) * (inner @ down[expert].t()))
    y.backward(case.dy)
    leaves = dict(zip(("x", "weights", "gate", "up", "down"), (x, weights, *parameters), strict=True))
    return {"y": y.detach()} | {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in leaves.items()}


def by_layer(case, rank, call=Experts.__call__):
    """On ranks, through the module and autograd; the gradients of all experts, gathered."""
    torch.manual_seed(rank)
    layer = Experts.from_full(case.gate, case.up, case.down)
    x, weights, experts, dy = case.of(rank)
    x, weights = leaf(x), leaf(weights)
    y = call(layer, x, weights, experts)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad} | full_state_dict(layer, of="grad")


def check(launched, cases):
    """Every rank's results are those of the loop."""
    for rank, found in enumerate(launched):
        for (name, case), results in zip(cases.items(), found, strict=True):
            span = slice(sum(case.tokens[:rank]), sum(case.tokens[: rank + 1]))
            for key, value in plain(case).items():
                value = value[span] if key in ("y", "x", "weights") else value
                assert distance(results[key], value) <= A1, f"rank {rank}, {name}: {key}"


CASES = ("chosen at random", "one expert", "last unused", "all experts")
TOKENS = {1: [(5,), (0,)], 2: [(4, 4), (6, 0)], 4: [(3, 3, 3, 3), (5, 0, 1, 4)]}


def all_cases(world_size):
    return {
        (name, tokens): make_case(name, tokens, seed=17 * seed)
        for seed, name in enumerate(CASES)
        for tokens in TOKENS[world_size]
    }
