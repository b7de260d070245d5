"""Exercises of "Mixed precision: options": five numbers, noise for every weight.

Chapter: book/dp/mixed-precision-options.  Noises are compared weight by weight.
"""

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from dualpipe_course.declared import Predict, Repair
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

NAMES = ("the sum one by one", "the sum in pairs", "attempts that move", "steps", "bytes per parameter")
_SLIPS = (
    {
        1000: "at some point a half is a tie between two neighbours, and ties go to the even one",
        256: "that is where a sum of ones stands still; halves are lost earlier",
        512: "that is the exact sum; from some number on, a half is less than half of the spacing",
        64: "between 64 and 128 neighbours are a half apart, so a half still counts",
    },
    {
        128: "the two numbers of a pair are equal here, and doubling is exact",
        256: "the two numbers of a pair are equal here, and doubling is exact",
    },
    {
        128: "2^-7 is the spacing between 1 and 2; between 2 and 4 it is twice that",
        0: "that is rounding to the nearest",
        32: "2^-5 is the spacing between 4 and 8",
        256: "2^-8 is the spacing below 1",
    },
    {
        32: "that is how far the weight has gone; how far it is off grows with the root of the steps",
        8: "two spacings are a variance of four",
        16: "that is one spacing",
        1_024: "each step has a variance of a sixteenth of a squared spacing",
    },
    {
        10: "the two moments are shared by 4 ranks",
        8: "the moments are bf16 here: 2 + 2 bytes, shared by 4 ranks",
        5: "the gradient is fp32 here, and every rank has all of it",
        11: "there is no master: the rounding at random takes its place",
        9: "there is no master, and the moments are bf16",
        6: "there are two moments",
        4: "ZeRO-1 shards what belongs to the optimizer, not the gradient",
    },
)
SEEDS, STEPS, PARAMETERS, TP_RANKS = 4, 2**16, 2**10, 16  # the limits of the statement
DP_RANKS = (0, 1, 6)
DRAWS, SEED = 2**20, 1


def _noise(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    import torch

    seen: dict[tuple[float, ...], tuple[tuple[int, ...], str]] = {}
    for seed, step, index, tp_rank in _places():
        is_cut = index % 2 == 0
        by_dp = [fn(8, seed, step, index, dp_rank, tp_rank, is_cut) for dp_rank in DP_RANKS]
        if any(not isinstance(x, torch.Tensor) or x.dtype != torch.int32 or x.shape != (8,) for x in by_dp):
            return "noise returns `size` int32 numbers"
        here = f"seed {seed}, step {step}, parameter {index}, tp rank {tp_rank}"
        if any(not x.equal(by_dp[0]) for x in by_dp):
            return f"{here}: the ranks of dp hold copies of one weight and round it with different noise"
        if not is_cut and not by_dp[0].equal(fn(8, seed, step, index, 0, 0, is_cut)):
            return f"{here}: a parameter that is not cut is a copy on every rank of tp, and has other noise here"
        place = (seed, step, index, tp_rank if is_cut else 0)
        known, there = seen.setdefault(tuple(by_dp[0].tolist()), (place, here))
        if known != place:
            return f"{here}: the noise is that of {there}; other weights, steps and seeds need their own"
    many = torch.cat([fn(DRAWS, SEED, step, 0, 0, 0, True) for step in range(2)])
    if int(many.min()) != 0 or int(many.max()) != 2**16 - 1:
        return (
            f"of {len(many):,} numbers the least is {int(many.min())}, the largest {int(many.max()):,}; all from 0 to "
            "65,535 are equally likely, or the mean is off"
        )
    if len((many[1:] - many[:-1]).unique()) < 10_000:
        return "the numbers follow each other by a rule, so weights are not rounded independently"
    off = abs(float(many.double().mean()) - 32_767.5)
    return "" if off < 100 else f"the mean of many draws is {off:.0f} off 32,767.5"


def _places() -> Iterator[tuple[int, int, int, int]]:
    """Seed, step, parameter and rank of tp: neighbours first, then the ends of all ranges, then a dense sample.

    In the sample a sum with factors meets itself, and a hash of 32 bits does not.
    """
    yield from product((SEED,), range(7), range(6), range(3))
    seeds = range(SEEDS)
    yield from product(seeds, *((0, 1, end // 2, end - 2, end - 1) for end in (STEPS, PARAMETERS, TP_RANKS)))
    draw = random.Random(0).randrange  # noqa: S311 - a sample
    yield from ((draw(SEEDS), draw(4), draw(PARAMETERS), draw(TP_RANKS)) for _ in range(4_000))


def _judge_noise(fn: Callable[..., Any]) -> str:
    problem = on_ranks(_noise, 1, fn, case="drawing on one process", seconds=60.0)[0]
    if problem:
        raise Wrong(problem)
    return "copies get the same noise, all other weights and steps their own, and every number can be drawn"


numbers = Predict(
    "mixed_precision_options-1",
    "Five numbers",
    NAMES,
    lambda x, n, w: (256 * x, n * x, round((3 - w) * 64_000), 64, 7),
    "2,000 numbers of {x} are",
    "{n:,} numbers of {x} are added in pairs",
    "A weight of 3 should become {w},",
    minutes=12,
    points=2,
    hints=(
        "bf16 has 8 significant bits: between 2^k and 2^(k + 1) neighbours are 2^(k - 7) apart.",
        "A half is lost when it is at most half of the spacing and the sum is even in its last bit.",
        "The page's variance of a step is step times spacing. Write both in spacings.",
    ),
    slips=_SLIPS,
    x=(0.5, 0.25, 1, 2),
    n=(1024, 2048, 512),
    w=(2.999, 2.998, 2.997, 2.996),
    called={"x": "each number", "n": "numbers", "w": "weight"},
)


noise = Repair(
    "mixed_precision_options-3",
    "Noise for every weight",
    "Repair `noise(size, seed, step, index, dp_rank, tp_rank, is_cut)`: the noise of a parameter's rounding.",
    judge=_judge_noise,
    minutes=15,
    points=2,
    hints=(
        "Which ranks hold the same weights, and which hold others? A norm is whole on every rank of tp.",
        "Step 3 of parameter 4 and step 4 of parameter 3: what does the sum say?",
        "torch.randint(high, ...) draws numbers below high. Is 65,535 among them?",
    ),
)
