"""Attention by its formula, in plain Python: what answers are judged against, made where no answer runs.

Chapter: book/cp/flash-attention.  In: rows of queries, keys and values, and which pairs are hidden.  Out: output, LSE,
gradients, as lists.
"""

import random
from collections.abc import Callable, Sequence
from math import exp, inf, log
from typing import NamedTuple, TypeAlias

from dualpipe_course.differences import apart, shape

Matrix: TypeAlias = list[list[float]]
Sees: TypeAlias = Callable[[int, int], bool]  # query, key


class Found(NamedTuple):
    """What attention returns, and its gradients."""

    out: Matrix
    lse: list[float]
    dq: Matrix
    dk: Matrix
    dv: Matrix


def draw(seed: int, rows: int, columns: int, scale: float = 1.0) -> Matrix:
    """Numbers that are the same everywhere."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    return [[scale * chance.gauss(0, 1) for _ in range(columns)] for _ in range(rows)]


def attention(
    q: Matrix, k: Matrix, v: Matrix, do: Matrix, sees: Sees = lambda i, j: True, dlse: Sequence[float] | None = None
) -> Found:
    """Attention of every query to the keys that it sees; one that sees none has output 0 and an LSE of -inf.

    The gradients are those of a loss that has `do` as gradient of the output and `dlse` as that of the LSE (none: 0).

    >>> attention([[1.0]], [[1.0], [1.0]], [[2.0], [4.0]], [[1.0]]).dv
    [[0.5], [0.5]]
    """
    size = len(q[0])
    out: Matrix = []
    lses = []
    dq, dk, dv = ([[0.0] * size for _ in rows] for rows in (q, k, k))
    for i, query in enumerate(q):
        seen = [j for j in range(len(k)) if sees(i, j)]
        scores = [_dot(query, k[j]) / size**0.5 for j in seen]
        largest = max(scores, default=0.0)
        total = sum(exp(score - largest) for score in scores)
        lses.append(largest + log(total) if seen else -inf)
        weights = [exp(score - largest) / total for score in scores]
        out.append([sum(w * v[j][x] for w, j in zip(weights, seen, strict=True)) for x in range(size)])
        delta = _dot(do[i], out[-1]) - (dlse[i] if dlse else 0.0)
        for w, j in zip(weights, seen, strict=True):
            ds = w * (_dot(do[i], v[j]) - delta) / size**0.5
            for x in range(size):
                dv[j][x] += w * do[i][x]
                dq[i][x] += ds * k[j][x]
                dk[j][x] += ds * query[x]
    return Found(out, lses, dq, dk, dv)


def why_different(name: str, found: object, expected: object, tolerance: float = 1e-9) -> str | None:
    """In words, where a list of numbers, or of rows, is not as expected; None if it is."""
    if found is None:
        return f"{name} is missing"
    if shape(found) != shape(expected):
        return f"{name} has shape {shape(found)}, expected {shape(expected)}"
    ours, theirs = flat(found), flat(expected)
    scale = max([1.0, *(abs(value) for value in theirs if abs(value) != inf)])
    for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not (a == b or abs(a - b) <= tolerance * scale):
            return f"{name}, number {place}, {apart(a, b, tolerance * scale)}"
    return None


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def flat(values: object) -> list[float]:
    """All numbers of nested lists."""
    if isinstance(values, list):
        return [number for value in values for number in flat(value)]
    return [float(values)]  # type: ignore[arg-type]
