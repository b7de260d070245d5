"""Causes: what usually makes numbers on ranks differ from those of one process, recognised from the numbers alone.

Chapter: every one that proves gradients.  In: numbers row by row, of one process and of the ranks.  Out: words.
  CAUSES     a test and its words in each row, read from top to bottom: the first that holds is the usual cause
  FACTS      what is said where none holds
  factors    what makes all numbers a multiple; each that fits is named, since with 2 ranks twice is also N times
A bucket that was sent before its last gradient is known by the run of numbers of which the ranks have parts; where it
lacks a whole microbatch, the ranks differ, and the numbers do not say by what.
"""

from cmath import isfinite
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any

Vector = Sequence[float]
NEAR = 1e-9  # relative to the largest number, within which numbers are equal or a multiple
FLOAT32 = NEAR, 1e-5  # relative errors that one rounding to float32 (6e-8), or many of them, leave behind


@dataclass(frozen=True)
class Compared:
    """Numbers of the first rank that is wrong, or of all shards together, beside those of one process."""

    found: Vector
    expected: Vector
    copies: Sequence[Vector] = ()  # of every rank, where each is to have all numbers
    num_ranks: int = 1
    shape: Sequence[int] = ()
    eps: float = 0.0  # the spacing of the dtype at 1

    @cached_property
    def distinct(self) -> list[Vector]:
        """The values of ranks that differ from one another; none where the ranks agree."""
        found = [one for i, one in enumerate(self.copies) if not any(near(one, other) for other in self.copies[:i])]
        return found if len(found) > 1 else []

    @cached_property
    def errors(self) -> list[float]:
        """The largest error of each number on any rank, relative to the largest number."""
        unit = largest(self.expected) or 1.0
        columns = zip(self.expected, self.found, *self.copies, strict=True)
        return [
            max((abs(a - b) / unit if a != b else 0.0 for a in found), key=lambda error: (error != error, error))
            for b, *found in columns
        ]

    @cached_property
    def off(self) -> list[int]:
        """The places at which a rank is wrong."""
        return [place for place, error in enumerate(self.errors) if not error <= NEAR]

    def is_made_of(self, parts: Sequence[Vector], divisor: int = 1) -> bool:
        """Whether the sum of some parts, divided, is right."""
        return bool(parts) and near([sum(column) / divisor for column in zip(*parts, strict=True)], self.expected)


def near(ours: Vector, theirs: Vector) -> bool:
    """Whether numbers are equal but for 1e-9 of the largest."""
    bound = NEAR * largest(theirs)
    return all(a == b or abs(a - b) <= bound for a, b in zip(ours, theirs, strict=True))


def largest(numbers: Vector) -> float:
    """The largest size of a number that is finite."""
    return max((abs(number) for number in numbers if isfinite(number)), default=0.0)


def cause(values: Compared, *, is_sure: bool = False) -> str:
    """Say what usually makes numbers differ in this way; if `is_sure`, nothing where no row of `CAUSES` fits.

    >>> cause(Compared([3.0, 6.0], [1.0, 2.0], num_ranks=3))
    'it is 3 times as large, the number of ranks: it was summed over the ranks once too often, or where a mean is meant'
    """
    rows = CAUSES if is_sure else CAUSES + FACTS
    found, words = next(((found, words) for test, words in rows if (found := test(values))), ("", ""))
    return words.format(*found) if isinstance(found, tuple) else words.format(found)


def cause_of_ratio(ratio: float, num_ranks: int, also: Mapping[float, str] = {}) -> str:
    """Say what usually makes numbers too large by a factor, from the comma or colon on; `also` names other factors.

    >>> cause_of_ratio(3, 2, {3: "the number of microbatches"}), cause_of_ratio(2.5, 2)
    (', the number of microbatches', '')
    """
    fits = [(name, made) for factor, name, made in factors(num_ranks, also) if abs(ratio / factor - 1) < NEAR]
    names, causes = (", and ".join(n for n, _ in fits if n), ", or ".join(made for _, made in fits if made))
    return f", {names}" * bool(names) + f": it was {causes}" * bool(causes)


def factors(n: int, also: Mapping[float, str] = {}) -> Iterator[tuple[float, str, str]]:
    """Yield factors with the names of the numbers that they are, and what was done wrong."""
    yield from ((factor, name, "") for factor, name in also.items())
    yield -1, "", "given the wrong sign"
    yield n, "the number of ranks", "summed over the ranks once too often, or where a mean is meant"
    yield (
        1 / n,
        "one over the number of ranks",
        "divided twice, or is a mean or a part where a sum over the ranks is meant",
    )
    yield n * n, "the square of the number of ranks", "summed twice too often"
    yield 2, "", "added twice"
    yield 1 / 2, "", "halved, or lacks one of two parts"
    for k in (k for k in range(2, n) if n % k == 0):
        yield k, "", f"summed over {k} of the {n} ranks once too often, or not divided by {k}: the wrong group"
        yield 1 / k, "", f"not summed over {k} of the {n} ranks, or divided by {k} once too often: the wrong group"


def multiple(ours: Vector, theirs: Vector) -> float | None:
    """The factor, if ours are one multiple of theirs that four digits tell from theirs themselves.

    >>> multiple([0.5, 1.0], [1.0, 2.0]), multiple([1.0, 2.5], [1.0, 2.0]), multiple([1.0000001], [1.0])
    (0.5, None, None)
    """
    largest = max(range(len(theirs)), key=lambda i: abs(theirs[i]), default=None)
    if largest is None or not theirs[largest] or isinstance(theirs[largest], complex):
        return None
    ratio = ours[largest] / theirs[largest]
    is_multiple = f"{ratio:.4g}" != "1" and near(ours, [ratio * b for b in theirs])
    return ratio + 0.0 if is_multiple else None  # no minus zero


def times(values: Compared) -> tuple[str, str] | None:
    """The factor and its cause in words; one number may be any multiple, so it counts only with the number of ranks."""
    ratio, n = multiple(values.found, values.expected), values.num_ranks
    if not ratio or (len(values.expected) == 1 and ratio not in (n, 1 / n)):
        return None
    right = _right_ranks(values)
    is_same = all(near(one, values.found) or near(one, values.expected) for one in values.copies)
    known = f", and right on rank {right}" if right else cause_of_ratio(ratio, n)
    return (f"{ratio:.4g}", known) if is_same else None


def is_like_float32(error: float) -> bool:
    """Whether a relative error has the size that rounding to float32 leaves behind."""
    return FLOAT32[0] <= error <= FLOAT32[1]


def _is_not_finite(v: Compared) -> bool:
    return all(map(isfinite, v.expected)) and not all(map(isfinite, v.found))


def _is_float32(v: Compared) -> bool:
    """Few numbers that are off are no rounding, which is everywhere."""
    return v.eps < NEAR and is_like_float32(max(v.errors, default=0)) and 2 * len(v.off) > sum(map(bool, v.expected))


def _rounds(v: Compared) -> str:
    """Rounding is small beside the largest number, and beside most numbers themselves."""
    remedy = "pass a larger tolerance" if v.eps < NEAR else "compare in float64, or pass a tolerance"
    own = [abs(v.found[place] - v.expected[place]) <= 8 * v.eps * abs(v.expected[place]) for place in v.off]
    is_small = max(v.errors, default=0) <= 8 * v.eps and 10 * sum(own) >= 9 * len(own)
    return remedy * (is_small and multiple(v.found, v.expected) is None)


def _right_ranks(v: Compared) -> str:
    return ", ".join(str(rank) for rank, one in enumerate(v.copies) if near(one, v.expected)) * bool(v.distinct)


def _wrong_groups(v: Compared) -> int:
    """How many groups of equal size have a value each, of which the sum or mean is right."""
    sizes = {sum(near(one, group) for one in v.copies) for group in v.distinct}
    is_right = v.is_made_of(v.distinct) or v.is_made_of(v.distinct, len(v.distinct))
    return len(v.distinct) if len(sizes) == 1 and min(sizes) > 1 and is_right else 0


def _partial_sums(v: Compared) -> bool:
    return bool(v.distinct) and v.is_made_of(v.copies)


def _means(v: Compared) -> bool:
    return bool(v.distinct) and v.is_made_of(v.copies, len(v.copies))


def _run(v: Compared) -> tuple[str, Compared] | None:
    """The places that are wrong, in words, and their numbers, if they lie side by side and the others are right."""
    if not v.off or v.off[-1] - v.off[0] + 1 != len(v.off) or len(v.off) == len(v.expected):
        return None
    run = slice(v.off[0], v.off[-1] + 1)
    return f"{v.off[0]} to {v.off[-1]}", Compared(v.found[run], v.expected[run], [one[run] for one in v.copies])


def _own_run(v: Compared) -> str:
    run = _run(v)
    return run[0] if run and (_partial_sums(run[1]) or _means(run[1])) else ""


def _zero_run(v: Compared) -> str:
    run = _run(v)
    return run[0] if run and not any(run[1].found) else ""


def _other_ranks(v: Compared) -> tuple[str] | None:
    run = _run(v)
    return (f" in numbers {run[0]}, and the others are right" if run else "",) if v.distinct else None


def _moved_shards(v: Compared) -> str:
    """Which rank's shard lies where another's belongs, along the first dimension for which each has an owner."""
    for dim, size in enumerate(v.shape):
        inner, per = prod(v.shape[dim + 1 :]), ceil(size / v.num_ranks)
        owners = [i // inner % size // per for i in range(len(v.expected))]
        ours, theirs = (
            [[a for a, rank in zip(flat, owners, strict=True) if rank == one] for one in sorted(set(owners))]
            for flat in (v.found, v.expected)
        )
        whose = [
            [rank for rank, shard in enumerate(theirs) if len(own) == len(shard) > 1 and near(own, shard)]
            for own in ours
        ]
        if all(len(ranks) == 1 for ranks in whose):  # equal shards, and single numbers, have no owner
            return ", ".join(f"{ranks[0]} for {rank}" for rank, ranks in enumerate(whose) if ranks[0] != rank)
    return ""


def _another_order(v: Compared) -> bool:
    is_real = not any(isinstance(number, complex) for number in (*v.found, *v.expected))
    return is_real and near(sorted(v.found), sorted(v.expected))


def _share(v: Compared) -> tuple[int, int, list[int]] | None:
    if not 0 < len(v.off) < len(v.expected):
        return None
    index = [v.off[0] // prod(v.shape[dim + 1 :]) % size for dim, size in enumerate(v.shape)]
    return len(v.off), len(v.expected), index


Rows = tuple[tuple[Callable[[Compared], Any], str], ...]
CAUSES: Rows = (
    (_is_not_finite, "it is not finite: read before it was written or gathered, or divided by zero"),
    (_rounds, "that is what its dtype rounds: {}"),
    (_is_float32, "something inside may be float32: the error has that size"),
    (lambda v: not any(map(any, (v.found, *v.copies))), "it is zero: not written, or detach or no_grad cuts its graph"),
    (times, "it is {} times as large{}"),
    (_right_ranks, "it is right on rank {} alone: the result does not reach the others, or is changed there"),
    (
        _wrong_groups,
        "{} groups of ranks have a value each, whose sum or mean is right: summed over the wrong group, or not at all",
    ),
    (_partial_sums, "the ranks have partial sums, and their sum is right: an all-reduce is missing, or came too early"),
    (_means, "the mean over the ranks is right: an average over them is missing, or came too early"),
    (_own_run, "numbers {} are each rank's own, the others are right: their bucket was sent before they were added"),
    (_zero_run, "numbers {} are zero, the others are right: they were not written, or sent before they were"),
    (_moved_shards, "each shard is right, and some are another rank's: that of rank {}"),
)
FACTS: Rows = (
    (lambda v: not v.off and max(v.errors), "it is off by {:.0e} of its largest number: more than rounds, no float32"),
    (_other_ranks, "the ranks differ{}; neither sum nor mean is right: if they were summed, something was added after"),
    (_another_order, "its numbers are right and in another order"),
    (_share, "{} of {} numbers are off, the first at {}, and the others are right"),
    (lambda v: True, "the numbers do not say why"),
)
