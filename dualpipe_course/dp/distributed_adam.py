"""Exercises of "Distributed Adam": three numbers, a sum of norms.

Chapter: book/dp/distributed-adam.  Norms are compared with one process.
"""

import math
from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_course.declared import Predict, Repair
from dualpipe_course.differences import apart
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    pass


Tensors: TypeAlias = Sequence[Sequence[float]]
Clipping: TypeAlias = tuple[Sequence[Tensors], Tensors, float]  # shards by rank, what is replicated, largest norm

LIBRARY = tuple(f"dualpipe_lab.dp.{name}" for name in ("adam", "grad_norm", "zero1", "zero2", "zero3", "ddp"))


def _check_clip(fn: Callable[..., Any], shards: Sequence[Tensors], replicated: Tensors, max_norm: float) -> None:
    case = f"shards {', '.join(map(str, shards))}" + f", replicated {list(replicated)}" * bool(replicated)
    results = on_ranks(_clip, len(shards), Without(fn, *LIBRARY), shards, replicated, max_norm, case=case)
    norm = sqrt(sum(x * x for rows in (*shards, replicated) for row in rows for x in row))
    factor = min(1.0, max_norm / (norm + 1e-6))
    for rank, (found, clipped) in enumerate(results):
        if not abs(found - norm) <= 1e-9:
            both, why = apart(found, norm, 1e-9), _why(found, shards, replicated)
            raise Wrong(f"{case}: rank {rank} says the norm is {both.found}, it is {both.expected}{both.why}{why}")
        expected = [[x * factor for x in row] for row in (*shards[rank], *replicated)]
        pairs = [(a, b) for ours, row in zip(clipped, expected, strict=True) for a, b in zip(ours, row, strict=True)]
        if wrong := next(((a, b) for a, b in pairs if not abs(a - b) <= 1e-9), None):
            both = apart(*wrong, 1e-9)
            raise Wrong(
                f"{case}, largest norm {max_norm:g}: on rank {rank} a gradient is {both.found} after clipping, "
                f"expected {both.expected}{both.why}; everything is multiplied, in place, by "
                "min(1, max_norm / (norm + 1e-6))"
            )


def _why(found: float, shards: Sequence[Tensors], replicated: Tensors) -> str:
    """What a wrong norm tells."""
    squares = [[sum(x * x for x in row) for row in rows] for rows in shards]
    common = [sum(x * x for x in row) for row in replicated]
    ranks, everywhere = [sum(rows) for rows in squares], sum(common)
    known = {
        sum(sqrt(x) for rows in squares for x in rows) + sum(map(sqrt, common)): "a sum of norms; squares add up",
        sum(sqrt(x + everywhere) for x in ranks): "a sum of the ranks' norms; squares add up",
        sqrt(sum(ranks) + len(shards) * everywhere): "what is replicated was counted on every rank; it counts once",
        sum(ranks) + everywhere: "that is the square of the norm",
        **{sqrt(x + everywhere): "that is the norm of one rank's part" for x in ranks},
    }
    return next((f": {words}" for value, words in known.items() if abs(found - value) <= 1e-9), "")


def _clip(
    rank: int, world_size: int, fn: Callable[..., Any], shards: Sequence[Tensors], replicated: Tensors, max_norm: float
) -> tuple[float, list[list[float]]]:
    import torch

    own, common = ([torch.tensor(row, dtype=torch.float64) for row in rows] for rows in (shards[rank], replicated))
    norm = float(fn(own, common, max_norm))
    return norm, [tensor.tolist() for tensor in (*own, *common)]


def _judge_clip(fn: Callable[..., Any]) -> str:
    cases: list[Clipping] = [
        ([[[1.0] * 4]], [], 10.0),
        ([[[1.0] * 4], [[2.0] * 4]], [], 10.0),
        ([[[1.0] * 4], [[2.0] * 4]], [], 1.0),
        ([[[3.0], [4.0]], [[12.0]]], [], 6.5),
        ([[[1.0] * 4], [[2.0] * 4]], [[4.0], [0.0, 2.0]], 3.0),
        ([[[1.0, -2.0]], [], [[]]], [[2.0]], 1.5),
    ]
    for case in cases:
        _check_clip(fn, *case)
    return "norms and clipped gradients are right for shards, empty shards and replicated gradients"


numbers = Predict(
    "distributed_adam-1",
    "Bytes, a norm, and a clipped shard",
    ("state bytes", "norm", "clipped norm of the third shard"),
    lambda n, a, b, c, to: (8 * -(-n // 3), math.hypot(a, b, c), to / math.hypot(a, b, c) * c),
    "the model has {n:,} weights",
    "the norms {a}, {b} and {c}.",
    "clipped to {to}.",
    minutes=5,
    points=1,
    hints=(
        "1,000 weights do not divide by 3: each shard is padded to the same length. Two float32 per weight.",
        "Square the three norms before you add them.",
        "Every shard is multiplied by the same factor, the largest norm over the norm of the whole.",
    ),
    slips=(
        {8000: "that is all of the state", 1336: "there are two moments per weight", 2664: "round up: 3 x 333 is 999"},
        {11: "norms do not add up, their squares do", 49: "that is the square of the norm"},
        {
            6: "the norm of the whole is above the largest, so every shard shrinks",
            4: "4 is what may be left of the whole; this shard is a part of it",
        },
    ),
    n=(1000, 1300, 1600, 1900, 2200, 2500, 2800, 3100),
    a=(2, 1, 3),
    b=(3, 4, 5),
    c=(6, 8, 12, 14),
    to=(3.5, 4.5, 6.5, 7.5),
    called={"n": "weights", "a": "norms", "b": "", "c": "", "to": "clipped to"},
)


clip = Repair(
    "distributed_adam-3",
    "Six where 4.4721 is right",
    "Repair `clip(shards, replicated, max_norm)`: gradients in shards count once each, replicated ones once in all.",
    judge=_judge_clip,
    minutes=12,
    points=3,
    hints=(
        "Two ranks, four 1s and four 2s: the norm of all eight is sqrt(4 + 16). What does the function add up?",
        "Add the squares of all elements of all shards, over the ranks too; take the root once, at the end.",
        "What is replicated is the same on all ranks. Add its squares after the all-reduce.",
    ),
)
