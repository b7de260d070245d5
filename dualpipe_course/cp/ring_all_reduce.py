"""Exercises of "Ring all-reduce": bytes of uneven chunks, a sum in fewer steps.

Chapter: book/cp/ring-all-reduce.  Sums of digits tell who is missing, the ledger counts messages, and model time with
a link of 1 ms latency counts the steps that wait for one another.
"""

import random
import sys
from collections.abc import Callable
from math import fsum
from typing import TYPE_CHECKING, Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.differences import apart
from dualpipe_course.start.ranks import MS, ONE_MS, check_messages_only
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from dualpipe_lab.launch.launcher import Results

LIBRARY = ("dualpipe_lab.cp.ring",)  # switched off while an answer runs
NAMES = ("bytes of rank 0", "bytes of rank 1", "bytes of rank 2", "bytes of rank 3", "messages of all ranks")
_NUMBERS = "these are numbers; one has 8 bytes"
_UNEQUAL = "2 (N - 1) / N S is exact only for equal chunks; these have 2, 2, 1 and 0 numbers"
_STAYS = "rank r sends every chunk twice, except that r + 1 stays at home in the first half and r + 2 in the second"


def _sum(rank: int, world_size: int, fn: Callable[..., Any], size: int) -> tuple[list[int], int]:
    import torch

    from dualpipe_lab.launch.context import rank_context

    x = torch.full((size,), 10**rank)
    fn(x)
    return x.tolist(), rank_context().clock.now()


def _reals(rank: int, size: int) -> list[float]:
    chance = random.Random(100 * rank + size)  # noqa: S311 - not for secrets
    return [chance.gauss(0, 1) for _ in range(size)]


def _sum_reals(rank: int, world_size: int, fn: Callable[..., Any], size: int) -> list[float]:
    import torch

    x = torch.tensor(_reals(rank, size), dtype=torch.float64)
    fn(x)
    numbers: list[float] = x.tolist()
    return numbers


def _check_reals(fn: Callable[..., Any], num_ranks: int, size: int) -> None:
    """Raise `Wrong` if float64 numbers lose digits: N numbers have N - 1 roundings, each of eps / 2 of the sum."""
    case = f"{num_ranks} ranks, {size} float64 numbers"
    results = on_ranks(_sum_reals, num_ranks, Without(fn, *LIBRARY), size, case=case)
    parts = list(zip(*(_reals(rank, size) for rank in range(num_ranks)), strict=True))
    for rank, found in enumerate(results):
        for place, (ours, terms) in enumerate(zip(found, parts, strict=True)):
            allowed = num_ranks * sys.float_info.epsilon * sum(map(abs, terms))
            if not abs(ours - (theirs := fsum(terms))) <= allowed:
                raise Wrong(f"{case}: number {place} on rank {rank} {apart(ours, theirs, allowed)}")


def _check_sums(results: "Results", size: int, case: str) -> None:
    expected = [sum(10**rank for rank in range(len(results)))] * size
    for rank, (found, _) in enumerate(results):
        if found == expected:
            continue
        place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        agree = all(other == found for other, _ in results)
        raise Wrong(
            f"{case}: rank {rank} holds {found}, expected {expected[0]} everywhere. Rank r contributed 10**r: "
            f"{_who(found[place], len(results))} in number {place}"
            + (". All ranks agree, so a training run would not show it" if agree and len(results) > 1 else "")
        )


def _who(value: int, num_ranks: int) -> str:
    digits = [value // 10**rank % 10 for rank in range(num_ranks)]
    if missing := [rank for rank, digit in enumerate(digits) if digit == 0]:
        return f"rank {missing[0]} is missing"
    return f"rank {max(range(num_ranks), key=lambda rank: digits[rank])} counts {max(digits)} times"


def _check_cost(results: "Results", size: int, case: str) -> None:
    num_ranks, rounds = len(results), (len(results) - 1).bit_length()
    steps, needed = max(time for _, time in results) // MS, 2 * (num_ranks - 1) * 8 * size
    if (sent := results.ledger.sent()) != needed:
        raise Wrong(
            f"{case}: the ranks sent {sent} bytes in all, 2 (N - 1) S = {needed} are needed and enough: each round "
            "swaps half of what the one before did",
            picture=results.timeline,
        )
    if steps > 2 * rounds:
        raise Wrong(
            f"{case}: {steps} messages waited for one another, {2 * rounds} are enough: one swap per round, with the "
            "rank that is N/2, N/4, ... away",
            picture=results.timeline,
        )


def _judge_halving_doubling(fn: Callable[..., Any]) -> str:
    for num_ranks, size in ((1, 3), (2, 1), (2, 5), (4, 8), (4, 3), (8, 16), (8, 5)):
        case = f"{num_ranks} rank(s), {size} element(s)"
        results = on_ranks(_sum, num_ranks, Without(fn, *LIBRARY), size, case=case, clock="virtual", link=ONE_MS)
        _check_sums(results, size, case)
        check_messages_only(results, case)
        _check_cost(results, size, case)
    _check_reals(fn, 4, 8)
    return "1, 2, 4 and 8 ranks, the bytes of the ring in 2 log2(N) steps"


numbers = Predict(
    "ring_all_reduce-1",
    "Five numbers, four ranks",
    NAMES,
    lambda: (56, 72, 64, 48, 18),
    minutes=5,
    points=1,
    hints=(
        "In the first half rank r sends the chunks r, r - 1, r - 2; in the second r + 1, r, r - 1; all modulo 4.",
        "Rank 0 sends the chunks 0, 3, 2 and then 1, 0, 3. They have 2, 0, 1 and 2, 2, 0 numbers.",
        "Three chunks are not empty. Each passes 3 links as a growing sum and 3 links as a finished one.",
    ),
    slips=(
        *(
            {number: _NUMBERS, 60: _UNEQUAL, 80: f"that is every chunk twice; {_STAYS}", 64: _STAYS}
            for number in (7, 9, 8, 6)
        ),
        {24: "one chunk is empty, and what is empty does not travel", 9: "that is one of the two halves"},
    ),
)

halving_doubling = Implement(
    "ring_all_reduce-2",
    "As few bytes, fewer steps",
    "Write `halving_doubling(x)`: the bytes of the ring, in 2 log2(N) steps, for powers of two.",
    judge=_judge_halving_doubling,
    minutes=25,
    points=4,
    hints=(
        "The partner at distance d is rank ^ d. Of the two, the one with rank & d == 0 keeps the lower half.",
        "Count halves in chunks of ceil(K / N) elements: from chunk a to chunk b is x[a * length : b * length].",
        "Keep a list of (partner, kept, given). The way back goes through it in reverse, sends what was kept last and "
        "fills what was given.",
    ),
)
