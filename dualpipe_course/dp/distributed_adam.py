"""Exercises of "Distributed Adam": three numbers, a dealt-out step, a sum of norms, a sharding that shards nothing.

Chapter: book/dp/distributed-adam.  Weights are judged against plain Python, state by the bytes of live tensors.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any, TypeAlias

from dualpipe_course import check as checks
from dualpipe_course.differences import apart
from dualpipe_course.dp import adams
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import check_ints, needs_function, on_ranks

Tensors: TypeAlias = Sequence[Sequence[float]]
Clipping: TypeAlias = tuple[Sequence[Tensors], Tensors, float]  # shards by rank, what is replicated, largest norm

SIZES = ((1, 3), (2, 4), (2, 7), (4, 8), (4, 5))  # ranks, weights: with 5 weights the last of 4 ranks has none


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("distributed_adam"), exercise)


@exercise(
    "distributed_adam-1",
    "Bytes, a norm, and a clipped shard",
    "predict",
    minutes=5,
    points=1,
    hints=(
        "1,000 weights do not divide by 3: each shard is padded to the same length. Two float32 per weight.",
        "Square the three norms before you add them.",
        "Every shard is multiplied by the same factor, the largest norm over the norm of the whole.",
    ),
)
def numbers(answer: object) -> str:
    """Predict state bytes of 1,000 weights on 3 ranks, the norm of shards of 2, 3 and 6, and the third one clipped."""
    slips = (
        {8000: "that is all of the state", 1336: "there are two moments per weight", 2664: "round up: 3 x 333 is 999"},
        {11: "norms do not add up, their squares do", 49: "that is the square of the norm"},
        {
            6: "the norm of the whole is above the largest, so every shard shrinks",
            4: "4 is what may be left of the whole; this shard is a part of it",
        },
    )
    general = ("8 bytes for each weight of a padded shard", "the root of 4 + 9 + 36", "7 is twice as large as allowed")
    check_ints(answer, ("state bytes", "norm", "clipped norm of the third shard"), (2672, 7, 3), slips, general)
    return "2672 bytes of state, a norm of 7, and a shard of norm 3 after clipping to 3.5"


@exercise(
    "distributed_adam-2",
    "A step that is dealt out",
    "implement",
    minutes=30,
    points=4,
    hints=(
        "Pad copies of weights, gradient and decay to a multiple of N and look at row `rank` of view(N, -1).",
        "state holds two tensors of the size of a shard, made with zeros_like at the first call, and the step number. "
        "A slice of a larger tensor keeps the larger tensor alive.",
        "Raise the step number first. Decay the own weights, update them with the corrected moments, epsilon outside "
        "the root, then all_gather_single into the padded weights and copy the first len(weights) back.",
    ),
)
def step(fn: Callable[..., Any]) -> str:
    """Write `adamw_step(weights, grad, decay, state, lr)` whose moments live on the rank that updates the weight."""
    needs_function(fn)
    for num_ranks, numel in SIZES:
        adams.check_step(fn, num_ranks, numel)
    return "AdamW to 12 digits on 1, 2 and 4 ranks, an empty shard included, with the state of one shard per rank"


@exercise(
    "distributed_adam-3",
    "Six where 4.4721 is right",
    "find the bug",
    minutes=12,
    points=3,
    hints=(
        "Two ranks, four 1s and four 2s: the norm of all eight is sqrt(4 + 16). What does the function add up?",
        "Add the squares of all elements of all shards, over the ranks too; take the root once, at the end.",
        "What is replicated is the same on all ranks. Add its squares after the all-reduce.",
    ),
)
def clip(fn: Callable[..., Any]) -> str:
    """Repair `clip(shards, replicated, max_norm)`: gradients in shards count once each, replicated ones once in all."""
    needs_function(fn)
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


@exercise(
    "distributed_adam-4",
    "A sharding that shards nothing",
    "find the bug",
    minutes=15,
    points=3,
    hints=(
        "The weights are right and the traffic is that of a sharded optimizer. How large is self.mu on each rank?",
        "A rank needs moments for its own slice only: ceil(P / N) numbers, and its own part of the gradient.",
        "Do not cut the shard out of a full tensor: a slice is a view, and the whole stays in memory. Make it with "
        "zeros of the right size.",
    ),
)
def shards_nothing(cls: Callable[..., Any]) -> str:
    """Repair the class `ShardedAdam(weights, lr)`: each rank holds the moments of its own shard and no others."""
    needs_function(cls)
    for num_ranks, numel in ((1, 3), (2, 40), (4, 80), (4, 50)):
        adams.check_class(cls, num_ranks, numel)
    return "the same weights, and on N ranks an N-th of the state on each, counted as live tensors"


def _check_clip(fn: Callable[..., Any], shards: Sequence[Tensors], replicated: Tensors, max_norm: float) -> None:
    case = f"shards {', '.join(map(str, shards))}" + f", replicated {list(replicated)}" * bool(replicated)
    results = on_ranks(_clip, len(shards), Without(fn, *adams.LIBRARY), shards, replicated, max_norm, case=case)
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
