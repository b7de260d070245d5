"""Exercises of "ZeRO-1": Adam on a shard, shards that overlap.

Chapter: book/dp/zero-1.  Weights and norms are compared with one process.  Adam divides a factor of the gradient out
again unless eps is large: here it is 1.
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, compare_on_ranks
from dualpipe_course.declared import Repair
from dualpipe_course.differences import apart, close
from dualpipe_course.meter import MemoryMeter, Meter
from dualpipe_course.own.part import OnRanks, Part

if TYPE_CHECKING:
    from torch import Tensor

NUMBER = 8  # bytes of a float64
_KEPT = (
    "rank {rank} keeps {found:,.0f} bytes more between two steps than its weights, where two moments of one shard have "
    "at most {most:,}; a slice of a large tensor keeps all of it alive, whatever its numel() says"
)
_SENT = (
    "rank {rank} sent {found:,.0f} bytes in a step; a reduce-scatter of the gradients and an all-gather of the "
    "weights, each of one padded row, send {most:,}"
)
_ONE_SUM = "rank {rank} sent {found} bytes; one sum of squares per rank is enough"


def _check_norm(fn: Callable[..., Any], num_ranks: int, numel: int) -> None:
    """Raise `Wrong` unless every rank gets the norm of the whole gradient, for one number of each other rank."""
    whole = [_element(index) for index in range(numel)]
    right = sum(value**2 for value in whole) ** 0.5
    shard = -(-numel // num_ranks)
    norms = sum(sum(x**2 for x in whole[at : at + shard]) ** 0.5 for at in range(0, numel, shard))

    def why(off: Off) -> str:
        assert off.found is not None, "return a number"
        if any(close(off.found.flat, [sum_of_norms]) for sum_of_norms in (norms, norms**0.5)):
            return "added the norms of the shards; add squares, not norms, and take the root of the sum"
        both = apart(off.found.flat[0], right)
        return (
            f"returned {both.found}{both.why}; the whole gradient {whole[:5]} has {both.expected}. Which numbers does "
            "each rank square?"
        )

    compare_on_ranks(
        _norm,
        num_ranks,
        fn,
        numel,
        case=f"{numel} numbers on {num_ranks} rank(s)",
        beside=lambda: [{"norm": Numbers((), [right])}] * num_ranks,
        at=": rank {rank} ",
        why=why,
        limits=[Limit("bytes", 2 * NUMBER, _ONE_SUM, scope="each")],
    )


def _element(index: int) -> int:
    return index % 5 + 1


def _norm(rank: int, world_size: int, fn: Callable[..., Any], numel: int) -> Found:
    import torch

    size = -(-numel // world_size)
    flat = torch.tensor([float(_element(index)) for index in range(numel)], dtype=torch.float64)
    unfinished = torch.tensor([not rank * size <= index < (rank + 1) * size for index in range(numel)])
    flat[unfinished] /= rank + 2  # the others' shards hold some partial sums only
    shard = flat[~unfinished]
    found = fn(flat)
    if type(found) not in (int, float):
        return Found({}, refused=f"returned a {type(found).__name__}, not a number; write float(...) around it")
    if not flat[~unfinished].equal(shard):
        return Found({}, refused="has changed the shard whose norm it took: the optimizer reads it next")
    return Found({"norm": Numbers((), [float(found)])})


def _trained(
    rank: int, world_size: int, groups: list[list[int]], shapes: list[tuple[int, ...]], settings: tuple[Any, ...]
) -> Found:
    """Three steps with gradients of three backwards; what the optimizer keeps, and sends in a step."""
    from mine.zero1 import ShardedAdam

    ranks = next(group for group in groups if rank in group)
    memory = MemoryMeter()
    weights, backwards = _weights(ranks, shapes), _backwards(ranks, shapes)
    own = [grads[ranks.index(rank)] for grads in backwards]
    before = memory.grown()
    optimizer = ShardedAdam(iter(weights), ranks, *settings)
    found: dict[str, Numbers | None] = {}
    sent = 0
    for number, grads in enumerate(own, 1):
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = None if grad is None else grad.clone()
        meter = Meter()
        optimizer.step()
        sent = meter.lap().bytes
        found[f"the weights after step {number}"] = Numbers.of(_in_a_row(weights))
        if not all(_is_same(weight.grad, grad) for weight, grad in zip(weights, grads, strict=True)):
            return Found({}, refused="step has changed .grad: it is this rank's summand, and others may read it still")
    for weight in weights:
        weight.grad = None
    costs = {"kept": memory.grown() - before, "sent": sent}
    slips = {"the weights after step 1": _mistakes(ranks, shapes, settings)}
    return Found(found, slips=slips, costs=costs)


def _one_process(
    rank: int, num_ranks: int, groups: list[list[int]], shapes: list[tuple[int, ...]], settings: tuple[Any, ...]
) -> "dict[str, Tensor]":
    import torch

    ranks = next(group for group in groups if rank in group)
    weights, found = _weights(ranks, shapes), {}
    adam = torch.optim.Adam(weights, *settings)
    for number, grads in enumerate(_backwards(ranks, shapes), 1):
        for place, weight in enumerate(weights):
            there = [grad for one in grads if (grad := one[place]) is not None]
            weight.grad = torch.stack([torch.zeros_like(weight), *there]).sum(0)
        adam.step()
        found[f"the weights after step {number}"] = _in_a_row(weights)
    return found


def _weights(ranks: list[int], shapes: list[tuple[int, ...]]) -> "list[Tensor]":
    """Other ones in each group; the first of two dimensions lies in memory column by column."""
    import torch

    generator = torch.Generator().manual_seed(10 + ranks[0])
    drawn = [torch.randint(-8, 9, shape, generator=generator).double() / 4 for shape in shapes]
    drawn = [w.t().contiguous().t().clone() if w.dim() == 2 and place == 0 else w for place, w in enumerate(drawn)]
    return [weight.requires_grad_() for weight in drawn]


def _backwards(ranks: list[int], shapes: list[tuple[int, ...]]) -> "list[list[list[Tensor | None]]]":
    """By step, rank and parameter: whole numbers; the last of several ranks has none, and the second parameter once."""
    import torch

    generator = torch.Generator().manual_seed(20 + ranks[0])
    return [
        [
            [
                None if (place, step) == (1, 0) or ranks.index(rank) == len(ranks) - 1 > 0 else drawn
                for place, drawn in enumerate(
                    torch.randint(1, 9, shape, generator=generator).double() / 8 for shape in shapes
                )
            ]
            for rank in ranks
        ]
        for step in range(3)
    ]


def _mistakes(ranks: list[int], shapes: list[tuple[int, ...]], settings: tuple[Any, ...]) -> dict[str, Numbers | None]:
    """The weights after a first step that goes wrong in a known way."""
    import torch

    weights, grads = _weights(ranks, shapes), _backwards(ranks, shapes)[0]
    rows = [
        _in_a_row([torch.zeros_like(w) if g is None else g for w, g in zip(weights, one, strict=True)]) for one in grads
    ]
    total, num, size = torch.stack(rows).sum(0), len(ranks), -(-len(rows[0]) // len(ranks))
    own = torch.cat([row[place * size : (place + 1) * size] for place, row in enumerate(rows)])  # each its own shard
    lr, (one, two), eps = settings if len(settings) > 1 else (*settings, (0.9, 0.999), 1e-8)

    def moved(first: Any, second: Any) -> Numbers | None:
        return Numbers.of(_in_a_row(weights) - lr * first / (second.sqrt() + eps))

    return {
        "the corrections of both moments, 1 - beta**t, are missing": moved((1 - one) * total, (1 - two) * total**2),
        "each rank's own gradient has moved its shard; sum it over the ranks": moved(own, own**2),
        "the sum over the ranks was divided by their number; the gradients are summands": moved(
            total / num, (total / num) ** 2
        ),
    }


def _in_a_row(tensors: "list[Tensor]") -> "Tensor":
    import torch

    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _is_same(now: "Tensor | None", grad: "Tensor | None") -> bool:
    return bool(now is None if grad is None else now is not None and now.equal(grad))


def _adam_limits(
    num_ranks: int, groups: list[list[int]], shapes: list[tuple[int, ...]], settings: tuple[Any, ...]
) -> list[Limit]:
    """Two moments of one shard, and a little for a counter; two collectives of the padded row."""
    nums = [len(next(group for group in groups if rank in group)) for rank in range(num_ranks)]
    shards = [-(-sum(map(prod, shapes)) // num) * NUMBER for num in nums]
    return [
        Limit("kept", [2 * shard + 64 for shard in shards], _KEPT, scope="each"),
        Limit("sent", [2 * (num - 1) * shard for num, shard in zip(nums, shards, strict=True)], _SENT, scope="each"),
    ]


zero1 = Part(
    "zero_1-5",
    "zero1",
    "Adam on a shard",
    "Write ShardedAdam: it sums the gradients over the ranks, moves this rank's shard, and gathers the weights.",
    names=("ShardedAdam",),
    trials=(
        OnRanks(
            _trained,
            (
                (1, [[0]], [(3,)], (0.1, (0.8, 0.9), 1.0)),
                (2, [[0, 1]], [(4,)], (0.1, (0.8, 0.9), 1.0)),
                (2, [[1, 0]], [(2, 3), (2,), ()], (0.1, (0.8, 0.9), 1.0)),
                (3, [[0, 1, 2]], [(1,)], (0.1, (0.8, 0.9), 1.0)),
                (4, [[0, 2], [3, 1]], [(3, 5), (7,)], (0.1, (0.8, 0.9), 1.0)),
                (4, [[2, 0, 3, 1]], [(31, 33), (17,), (4, 1, 3)], (0.01,)),
            ),
            _one_process,
            "group(s) {1} of {0} rank(s), parameters {2}",
            _adam_limits,
        ),
    ),
    right="three steps as on one process, of 6 groups of 1 to 4 ranks; two moments of one shard on every rank",
    off=("torch.optim",),
    minutes=45,
    points=4,
    hints=(
        "Write the parameters' numbers one after the other into one row, padded for the ranks. Rank r moves the r-th "
        "part of it, wherever a parameter begins.",
        "The same row of the gradients, with zeros for those that are None, through your reduce_scatter: that is the "
        "gradient of this rank's part. The moments are as long as this part, and made as new tensors of that length.",
        "shard = row.view(N, -1)[me]; first = beta1 * first + (1 - beta1) * grad, second likewise with grad**2; shard "
        "-= lr * (first / (1 - beta1**t)) / ((second / (1 - beta2**t)).sqrt() + eps); whole = all_gather(shard, "
        "ranks); then copy_ each parameter's numbers from whole, all of it under torch.no_grad().",
    ),
)

overlapping_shards = Repair(
    "zero_1-3",
    "The norm of the shards",
    "Repair the norm of a sharded gradient for sizes that do not divide by the ranks.",
    cases=((1, 3), (2, 4), (2, 5), (3, 5), (4, 5), (3, 1), (4, 35)),
    judge=_check_norm,
    right="every number counts once, on 1 to 4 ranks, empty shards included",
    minutes=8,
    points=2,
    trail=True,
    hints=(
        "Try 4 numbers on 2 ranks, then 5. Which numbers does each rank square?",
        "Where does the last rank begin, if every shard has ceil(5 / 2) = 3 numbers and the buffer has 5?",
        "A slice may reach beyond the end, or begin there: it is then shorter, or empty. The sum of nothing is 0.",
    ),
)
