"""Routers by their formulas, in plain Python: what answers are judged against, made where no answer runs.

Chapters: book/ep/topk-gradient, book/ep/gshard.  In: rows of logits.  Out: experts, weights, gradients, as lists.
"""

import random
from collections.abc import Sequence
from math import exp
from typing import NamedTuple, TypeAlias

from dualpipe_course.differences import apart, close, shape
from dualpipe_course.wrong import Wrong

Matrix: TypeAlias = list[list[float]]


class RoutedTokens(NamedTuple):
    """Logits of some tokens, and the k experts that each goes to, best first."""

    logits: Matrix
    indices: list[list[int]]
    num_experts: int
    k: int


def draw(rows: int, columns: int, seed: int = 3) -> Matrix:
    """Numbers that are the same everywhere."""
    chance = random.Random(1000 * seed + 10 * rows + columns)  # noqa: S311 - not for secrets
    return [[chance.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]


def chosen(logits: Matrix, num_experts: int, k: int) -> RoutedTokens:
    """The k largest logits of each token; of equal ones the first.

    >>> chosen([[1.0, 3.0, 3.0]], 3, 2).indices
    [[1, 2]]
    """
    order = [sorted(range(num_experts), key=lambda i, row=row: -row[i]) for row in logits]  # type: ignore[misc]
    return RoutedTokens(logits, [indices[:k] for indices in order], num_experts, k)


def slots_of(routed: RoutedTokens, num_slots_each: int) -> list[list[int]]:
    """The slot of each choice, first choices before second ones; -1 where the expert is full.

    >>> slots_of(RoutedTokens([], [[0, 1], [1, 0]], 2, 2), 1)
    [[0, -1], [1, -1]]
    """
    used = [0] * routed.num_experts
    slots = [[-1] * routed.k for _ in routed.indices]
    for choice in range(routed.k):
        for token, indices in enumerate(routed.indices):
            expert = indices[choice]
            if used[expert] < num_slots_each:
                slots[token][choice] = expert * num_slots_each + used[expert]
            used[expert] += 1
    return slots


def softmax(row: Sequence[float]) -> list[float]:
    """Powers of e over their sum.

    >>> softmax([2.0, 2.0])
    [0.5, 0.5]
    """
    powers = [exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def softmax_gradient(routed: RoutedTokens, grad: Matrix, normalised: bool) -> tuple[Matrix, Matrix]:
    """Weights of the chosen experts, and the gradient of all logits."""
    weights, gradients = [], []
    for row, indices, upstream in zip(routed.logits, routed.indices, grad, strict=True):
        own = indices if normalised else list(range(routed.num_experts))
        p = dict(zip(own, softmax([row[i] for i in own]), strict=True))
        g = dict(zip(indices, upstream, strict=True))
        mean = sum(p[i] * g[i] for i in indices)
        weights.append([p[i] for i in indices])
        gradients.append([p.get(i, 0.0) * (g.get(i, 0.0) - mean) for i in range(routed.num_experts)])
    return weights, gradients


def check_rows(where: str, what: str, found: Matrix, expected: Matrix, routed: RoutedTokens) -> None:
    """Raise `Wrong` with the first number that differs, and why it must be zero where no weight contains the logit."""
    if shape(found) != shape(expected):
        raise Wrong(f"{where}: {what}s of shape {shape(found)}, expected {shape(expected)}")
    for token, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if close([a], [b]):
                continue
            text = f"{where}: {what} {place} of token {token} {apart(a, b)}"
            if what == "gradient" and place not in routed.indices[token] and b == 0:
                text += "; this expert was not chosen, and no weight contains its logit"
            raise Wrong(text + ("; somewhere 0 was divided by 0" if a != a else ""))
