"""Exercises of "ZeRO-1": its numbers, shards that overlap, whole parameters on ranks.

Chapter: book/dp/zero-1.  Norms are compared with one process.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, compare_on_ranks
from dualpipe_course.declared import Predict, Puzzle, Repair
from dualpipe_course.differences import apart, close
from dualpipe_course.plain import plain
from dualpipe_course.trial import partial_score
from dualpipe_course.variants import WORDS, Known
from dualpipe_course.wrong import Wrong

NUMBERS = ("numbers of a shard", "bytes held", "bytes sent")
SIZES = (7, 7, 6, 6, 5, 5, 4, 4, 4)  # thousand numbers, of the puzzle
RANKS, GREEDY, BEST = 4, 15, 12
NUMBER = 8  # bytes of a float64
_ONE_SUM = "rank {rank} sent {found} bytes; one sum of squares per rank is enough"


def _slips(n: int, ranks: int) -> Known:
    shard = -(-n // ranks)
    whole, held, sent = ranks * shard, ranks * (n // ranks), 2 * (ranks - 1) * shard
    lost, padding = WORDS[n - held], WORDS[whole - n]
    return (
        (
            (n / ranks, f"a shard is a whole number: the buffer is padded until {ranks} divides it"),
            (
                n // ranks,
                f"{ranks} shards of {n // ranks:,} hold {held:,} numbers, "
                f"and {lost} parameter{' belongs' if lost == 'one' else 's belong'} to no rank",
            ),
            (whole, "this is the whole buffer"),
        ),
        (
            (16 * n, "this is plain data parallelism: 16 bytes for each parameter"),
            (
                (4 + 12 / ranks) * n,
                f"4 + 12 / {ranks} is exact where {ranks} divides the size; "
                f"here the buffer has {whole:,} numbers, {padding} of them padding",
            ),
            (4 * n + 12 * shard, f"weights and gradients are padded too: both buffers have {whole:,} numbers"),
            (12 * shard, "this is the state alone; weights and gradients are whole on every rank"),
            (16 * shard, "this shards weights and gradients too, as ZeRO-3 does"),
        ),
        (
            (sent, "this is one of the two: gradients are reduce-scattered, new weights all-gathered"),
            (4 * (ranks - 1) * n / ranks, f"the buffers are padded: both collectives carry {whole:,} numbers"),
            (4 * whole, "(N - 1) / N: a rank's own shard does not travel"),
            (4 * sent, "gradients and weights travel in bf16, 2 bytes each"),
        ),
    )


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


def _judge_whole_parameters(answer: object) -> str:
    owners = plain(answer)
    if not isinstance(owners, list) or len(owners) != len(SIZES):
        raise Wrong(f"expected a list of {len(SIZES)} ranks, one for each parameter")
    if not all(type(owner) is int and 0 <= owner < RANKS for owner in owners):
        raise Wrong(f"an owner is a whole number from 0 to {RANKS - 1}; there are {RANKS} ranks")
    loads = [sum(size for size, owner in zip(SIZES, owners, strict=True) if owner == rank) for rank in range(RANKS)]
    if max(loads) > BEST:
        score = partial_score(max(loads), GREEDY, BEST)
        raise Wrong(f"the ranks have {loads} thousand, the heaviest {max(loads)}; {BEST} is possible", score=score)
    return f"{BEST} thousand numbers on every rank, as a flat buffer has; the greedy way gives {GREEDY}"


numbers = Predict(
    "zero_1-1",
    "Shards with padding",
    NUMBERS,
    lambda n, ranks: (shard := -(-n // ranks), (4 * ranks + 12) * shard, 4 * (ranks - 1) * shard),
    "A model of {n:,} parameters",
    "ZeRO-1 on {ranks} ranks",
    minutes=6,
    points=1,
    trail=True,
    hints=(
        "All shards are equally long. What is the smallest multiple of 3 that holds 1,000 numbers?",
        "Weights and gradients are whole: 2 + 2 bytes for each number of the buffer. State: 12 for each of the shard.",
        "A reduce-scatter and an all-gather each send two of the three shards, 2 bytes a number.",
    ),
    slips=_slips,
    n=(1000, 1300, 1600, 1900, 2200, 2500, 2900, 3400),
    ranks=(3, 6, 7),
    called={"n": "parameters"},
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

whole_parameters = Puzzle(
    "zero_1-4",
    "Whole parameters only",
    "Deal out nine parameters to four ranks so that the heaviest rank is as light as possible.",
    judge=_judge_whole_parameters,
    minutes=5,
    points=2,
    hints=(
        f"All together are {sum(SIZES)}, so no rank can have less than {sum(SIZES) // RANKS} unless another has more.",
        "A rank with exactly 12 holds 7 + 5, 6 + 6 or 4 + 4 + 4.",
        "There are two parameters of 7 and two of 5.",
    ),
)
