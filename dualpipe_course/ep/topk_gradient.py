"""Exercises of "Top-k gradient": who hears anything, sigmoid weights backward, a loss of all tokens, a single expert.

Chapter: book/ep/topk-gradient.  Gradients are judged against the formulas in plain Python, made where no answer runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from dualpipe_course.declared import Predict, Repair
from dualpipe_course.ep import gates
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

NAMES = ("logits, as they are", "logits, normalised", "logits, one expert", "bytes for dW", "bytes for the loss")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        12: "the softmax's denominator contains the logits of all experts, also of those that were not asked",
        36: "the chosen experts have a gradient too",
    },
    {
        48: "after dividing, the denominator of the softmax has cancelled: which logits are left in the weights?",
        6: "each token has two chosen experts",
    },
    {6: "p / p is 1 whatever p is", 48: "p / p is 1 whatever p is"},
    {
        512: "those are the bytes of dW; an all-reduce sends 2 (N - 1) / N of them",
        384: "that is the reduce-scatter; the gather of the sums follows",
        1536: "float32 has 4 bytes",
        0: "the tokens of every rank belong to the same router",
    },
    {
        96: "E counts are not enough: the number of tokens is summed too",
        72: "those are the bytes of E + 1 integers; an all-reduce sends 2 (N - 1) / N of them",
        216: "the backward sends nothing: f is a constant",
        0: "the load of all tokens is known to no rank before the sum",
    },
)
SWITCH_CASES = ((2, 3, 1), (5, 4, 1), (3, 4, 2), (4, 5, 3), (3, 6, 4), (4, 5, 5), (1, 1, 1))  # tokens, experts, k


class Found(NamedTuple):
    """What a router returned, and what reached its logits."""

    indices: list[list[int]]
    weights: list[list[float]]
    gradient: list[list[float]]


def _routes(rank: int, world_size: int, fn: Callable[..., Any], cases: list[Any]) -> list[Found]:
    import torch

    results = []
    for values, grad, k in cases:
        logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        indices, weights = fn(logits, k)
        if weights.requires_grad:
            weights.backward(torch.tensor(grad, dtype=torch.float64))
        gradient = torch.zeros_like(logits) if logits.grad is None else logits.grad
        results.append(Found(indices.tolist(), weights.tolist(), gradient.tolist()))
    return results


def _judge_switch(fn: Callable[..., Any]) -> str:
    cases = [(gates.draw(tokens, experts), gates.draw(tokens, k, seed=7), k) for tokens, experts, k in SWITCH_CASES]
    results = on_ranks(_routes, 1, fn, cases, case="your function")[0]
    for (logits, grad, k), found in zip(cases, results, strict=True):
        routed = gates.chosen(logits, len(logits[0]), k)
        where = f"{len(logits)} token(s), {len(logits[0])} experts, k = {k}"
        if found.indices != routed.indices:
            raise Wrong(f"{where}: the experts are {found.indices}, expected {routed.indices}; only weights were wrong")
        weights, gradient = gates.softmax_gradient(routed, grad, normalised=k > 1)
        if k == 1 and len(logits[0]) > 1 and not any(map(any, found.gradient)):
            raise Wrong(
                f"{where}: the weights are {found.weights}, and no logit has a gradient: nothing can be learned"
            )
        gates.check_rows(where, "weight", found.weights, weights, routed)
        gates.check_rows(where, "gradient", found.gradient, gradient, routed)
    return f"weights and gradients are right in {len(cases)} cases; with k = 1 the router learns"


numbers = Predict(
    "topk_gradient-1",
    "Who hears anything",
    NAMES,
    lambda h, n: (48, 12, 0, 64 * h * (n - 1) / n, 144 * (n - 1) / n),
    "hidden size {h} runs on {n} ranks",
    minutes=5,
    points=1,
    hints=(
        "Write a weight as a function of logits. Which of them appear in it?",
        "With one expert the weight is p / p.",
        "dW is 8 by 16. The balance loss sums the load of 8 experts and a number of tokens.",
    ),
    slips=_SLIPS,
    h=(16, 8, 24, 32, 40, 48, 64, 96),
    n=(4, 2, 3, 8),
    called={"h": "hidden size", "n": "ranks"},
)


switch = Repair(
    "topk_gradient-4",
    "One flag for all k",
    "Repair a router that learns nothing with a single expert.",
    judge=_judge_switch,
    minutes=5,
    points=2,
    hints=(
        "Print the weights for k = 1.",
        "What does Switch multiply the answer of its one expert with?",
        "The scores as they are for k = 1, the normalised ones otherwise.",
    ),
)
