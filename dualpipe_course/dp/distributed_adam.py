"""Exercises of "Distributed Adam": three numbers, a sharded step, a sum of norms, a sharding that shards nothing.

Chapter: book/dp/distributed-adam.  Weights are judged against plain Python, state by the bytes of live tensors.
"""

import math
from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_course.comparison import Found, Limit, Numbers, Off, Unchanged, compare_on_ranks
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.differences import apart, close
from dualpipe_course.meter import MemoryMeter
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor


Tensors: TypeAlias = Sequence[Sequence[float]]
Clipping: TypeAlias = tuple[Sequence[Tensors], Tensors, float]  # shards by rank, what is replicated, largest norm

SIZES = ((1, 3), (2, 4), (2, 7), (4, 8), (4, 5))  # ranks, weights: with 5 weights the last of 4 ranks has none
LIBRARY = tuple(f"dualpipe_lab.dp.{name}" for name in ("adam", "grad_norm", "zero1", "zero2", "zero3", "ddp"))
BETAS, EPS, LR, TOLERANCE = (0.9, 0.999), 1e-8, 0.01, 1e-12
RATES = (LR, LR, LR / 2, LR / 2)  # of each step
TWO = "", ", the second of two tensors that have a state each and take turns"  # stepped in turn
NUM_STEPS, NUM_TENSORS = len(RATES), len(TWO)
STEPS = {"1 step": 1, f"{NUM_STEPS} steps": NUM_STEPS}  # after which the weights are compared
SPARE = 64  # bytes: a step number, a norm


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


def _check_step(fn: Callable[..., Any], num_ranks: int, numel: int) -> None:
    """Raise `Wrong` unless `fn(weights, grad, decay, state, lr)` is AdamW with its state sharded."""
    words = (
        f"the ranks sent {{found:,}} bytes in {NUM_STEPS} steps of two tensors; gathering the shards of the weights, "
        "once a step, is enough: the gradient is summed already, and the moments stay where they are"
    )
    most = num_ranks * (num_ranks - 1) * NUM_STEPS * NUM_TENSORS * _shard_bytes(numel, num_ranks)
    _check_trained(_by_function, Without(fn, *LIBRARY), num_ranks, numel, True, [Limit("bytes", most, words)])


def _check_class(cls: Callable[..., Any], num_ranks: int, numel: int) -> None:
    """Raise `Wrong` unless `cls(weights, lr)` with `step(grad)` is Adam with its state sharded."""
    _check_trained(_by_class, Without(cls, *LIBRARY), num_ranks, numel, False, [])


def _shard_bytes(numel: int, num_ranks: int) -> int:
    """Bytes of a padded shard in float64.

    >>> _shard_bytes(7, 3)
    24
    """
    return 8 * -(-numel // num_ranks)


def _check_trained(
    harness: Callable[..., Found], answer: Without, num_ranks: int, numel: int, decays: bool, limits: Sequence[Limit]
) -> None:
    moments = 2 * NUM_TENSORS * _shard_bytes(numel, num_ranks)
    words = (
        "the weights are right, but rank {rank} holds {found:,} bytes beside two such tensors; two moments of its "
        f"shards are {moments:,}. A rank keeps state for the weights it updates and no others"
    )
    expected, slips = _references(numel, decays)
    compare_on_ranks(
        harness,
        num_ranks,
        answer,
        numel,
        case=f"{num_ranks} rank(s), {numel} weights",
        beside=lambda: [expected] * num_ranks,
        at="",
        why=lambda off: _weight_in_words(off, slips[off.name]),
        limits=[Limit("bytes held", moments + SPARE, words, scope="each"), *limits],
    )


def _references(numel: int, decays: bool) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """By tensor and step, what one process makes of it, and what it does with the lr of the first step."""
    found: list[dict[str, Numbers]] = [{}, {}]
    for step, after in enumerate(STEPS):
        for which, of in enumerate(TWO):
            rates = RATES if decays else [LR / (1 + which)] * NUM_STEPS
            for known, lrs in zip(found, (rates, [LR] * NUM_STEPS), strict=True):
                weights = _reference(_start(numel, which), which, lrs, decays)[step]
                known[f"{of}: rank {{rank}}, after {after}"] = Numbers((numel,), weights)
    return found[0], found[1]


def _weight_in_words(off: Off, frozen: Numbers) -> str:
    where, num_ranks = off.name.format(rank=off.rank), len(off.by_rank)
    if off.found is None or off.has_other_shape:
        size = 0 if off.found is None else len(off.found.flat)
        return f"{where}: there are {size} weights, expected {len(off.expected.flat)}"
    ours, theirs, start = off.found.flat, off.expected.flat, _start(len(off.expected.flat), TWO[1] in off.name)
    wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not abs(a - b) <= TOLERANCE]
    place, size = off.place, -(-len(theirs) // num_ranks)
    slip = "; that is with the lr of the first step, and lr has halved since" * close(ours, frozen.flat)
    if all(ours[i] == start[i] for i in wrong) and all(i // size != off.rank for i in wrong):
        owner = place // size
        return (
            f"{where}: weight {place}, of rank {owner}'s shard, has not moved; gather the shards after the update{slip}"
        )
    return f"{where}: weight {place} {apart(ours[place], theirs[place], TOLERANCE)}{slip}"


def _start(numel: int, which: int) -> list[float]:
    return [1.0 + 0.25 * place - 3 * which for place in range(numel)]


def _gradient(step: int, place: int, which: int) -> float:
    return (1 + 4 * which) * (-1.0 if step * place % 2 else 1.0) * (0.5 + place) / (1 + step)


def _decay(place: int) -> float:
    return 0.0 if place % 3 == 2 else 0.1


def _reference(start: list[float], which: int, rates: Sequence[float], decays: bool) -> tuple[list[float], list[float]]:
    """The weights after the first and the last step, in plain Python."""
    numel = len(start)
    after: list[list[float]] = []
    w, mu, nu = list(start), [0.0] * numel, [0.0] * numel
    for t, lr in enumerate(rates, 1):
        for i in range(numel):
            g = _gradient(t, i, which)
            mu[i] = BETAS[0] * mu[i] + (1 - BETAS[0]) * g
            nu[i] = BETAS[1] * nu[i] + (1 - BETAS[1]) * g * g
            mu_hat, nu_hat = mu[i] / (1 - BETAS[0] ** t), nu[i] / (1 - BETAS[1] ** t)
            w[i] *= 1 - lr * (_decay(i) if decays else 0.0)
            w[i] -= lr * mu_hat / (sqrt(nu_hat) + EPS)
        after.append(list(w))
    return after[0], after[-1]


def _tensor(values: Sequence[float]) -> "Tensor":
    import torch

    return torch.tensor(values, dtype=torch.float64)


def _train(
    numel: int, pair: "list[Tensor]", step: Callable[[int, "Tensor", float], None], memory: MemoryMeter
) -> Found:
    """Take some steps; what is held is beside what the harness itself holds."""
    found: dict[str, Numbers | None] = {}
    changed = ""
    for t, lr in enumerate(RATES, 1):
        for which in range(NUM_TENSORS):
            grad = _tensor([_gradient(t, i, which) for i in range(numel)])
            unchanged = Unchanged(grad=grad)
            step(which, grad, lr)
            if unchanged.first():
                changed = "grad has changed; others may need it still, so leave it as it is"
        for after in [name for name, last in STEPS.items() if last == t]:
            found |= {f"{of}: rank {{rank}}, after {after}": Numbers.of(w) for of, w in zip(TWO, pair, strict=True)}
    del grad, unchanged
    return Found(found, costs={"bytes held": memory.grown()}, changed=changed)


def _by_function(rank: int, world_size: int, fn: Callable[..., Any], numel: int) -> Found:
    pair, decay = [_tensor(_start(numel, which)) for which in range(2)], _tensor([_decay(i) for i in range(numel)])
    memory, states = MemoryMeter(), [dict[str, Any]() for _ in pair]
    return _train(numel, pair, lambda which, grad, lr: fn(pair[which], grad, decay, states[which], lr), memory)


def _by_class(rank: int, world_size: int, cls: Callable[..., Any], numel: int) -> Found:
    pair = [_tensor(_start(numel, which)) for which in range(NUM_TENSORS)]
    memory = MemoryMeter()
    optimizers = [cls(weights, LR / (1 + which)) for which, weights in enumerate(pair)]
    return _train(numel, pair, lambda which, grad, lr: optimizers[which].step(grad), memory)


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

step = Implement(
    "distributed_adam-2",
    "A sharded step",
    "Write `adamw_step(weights, grad, decay, state, lr)` whose moments live on the rank that updates the weight.",
    cases=SIZES,
    judge=_check_step,
    right="AdamW to 12 digits on 1, 2 and 4 ranks, an empty shard included, with the state of one shard per rank",
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

shards_nothing = Repair(
    "distributed_adam-4",
    "A sharding that shards nothing",
    "Repair the class `ShardedAdam(weights, lr)`: each rank holds the moments of its own shard and no others.",
    cases=((1, 3), (2, 40), (4, 80), (4, 50), (4, 5)),
    judge=_check_class,
    right="the same weights, and on N ranks an N-th of the state on each, counted as live tensors",
    minutes=15,
    points=3,
    hints=(
        "The weights are right and the traffic is that of a sharded optimizer. How large is self.mu on each rank?",
        "A rank needs moments for its own slice only: ceil(P / N) numbers, and its own part of the gradient.",
        "Do not cut the shard out of a full tensor: a slice is a view, and the whole stays in memory. Make it with "
        "zeros of the right size.",
    ),
)
