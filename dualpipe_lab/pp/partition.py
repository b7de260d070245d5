"""`partition`: splits a model's layers into stages with the least load on the slowest stage.

Chapter: book/pp/interleaved.  In: the cost of every layer, the number of stages.  Out: the layers of each stage.
  bottleneck   the largest load of a stage; with M microbatches the makespan has it M times and every other load once
               (see `dualpipe_lab.pp.closed_forms.gpipe_makespan`)
  time         O(stages * layers * log layers), by dynamic programming from the last stage to the first
Ties: of all splits with the least bottleneck, the most even split (least sum of squared loads); of these, the split
with the fewest layers on early stages, because under 1F1B an early stage holds the activations of more microbatches.
Elsewhere: torch leaves the split to the user; DeepSpeed `partition_balanced`; Megatron can count embedding and head as
one layer each.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from numbers import Rational
from typing import TypeAlias

from dualpipe_lab.pp.program import check_counts
from dualpipe_lab.timeline import Time
from dualpipe_lab.timeline.units import number

Sums: TypeAlias = list[int]  # sums[i]: the cost of the layers before layer i


@dataclass(frozen=True)
class Partition:
    """The layers of each stage, and their costs.

    Attributes:
        stages: the layers of every stage, in order.
        loads: the cost of every stage, embedding and head included, for `Cost(F=...)`.
    """

    stages: tuple[range, ...]
    loads: tuple[Time, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of every stage."""
        return tuple(map(len, self.stages))

    @property
    def bottleneck(self) -> Time:
        """The largest load."""
        return max(self.loads)

    def __str__(self) -> str:
        layers, loads = " ".join(map(str, self.sizes)), " ".join(map(number, self.loads))
        return f"layers per stage {layers}; loads {loads}; bottleneck {number(self.bottleneck)}"


def partition(layers: int | Sequence[Time], num_stages: int, embedding: Time = 0, head: Time = 0) -> Partition:
    """Return the best split of layers into contiguous stages, none of them empty; exact, also with `Fraction`.

    `layers`: the cost of each layer, or the number of layers of cost 1.  `embedding` and `head`: the additional cost of
    the first and of the last stage.  Raises ValueError for fewer layers than stages, and for a cost that is negative or
    not exact.

    >>> print(partition(8, num_stages=4, head=1))
    layers per stage 2 2 2 2; loads 2 2 2 3; bottleneck 3
    >>> print(partition([1, 1, 1, 1, 4], num_stages=2, embedding=2))
    layers per stage 3 2; loads 5 5; bottleneck 5
    """
    costs = [1] * layers if isinstance(layers, int) else list(layers)
    check_counts("partition", num_stages=num_stages)
    if len(costs) < num_stages:
        raise ValueError(
            f"partition needs a layer for every stage, got {len(costs)} layers for {num_stages} stages; use at most "
            f"{len(costs)} stages"
        )
    costs = [_exact("layers", cost) for cost in costs]
    costs[0] += _exact("embedding", embedding)
    costs[-1] += _exact("head", head)
    scale = lcm(*(Fraction(cost).denominator for cost in costs))
    sums = list(accumulate((int(cost * scale) for cost in costs), initial=0))
    cuts = _most_even(sums, num_stages, _least_bottleneck(sums, num_stages))
    loads = [Fraction(sums[end] - sums[start], scale) for start, end in pairwise(cuts)]
    plain = (load.numerator if load.denominator == 1 else load for load in loads)
    return Partition(tuple(range(start, end) for start, end in pairwise(cuts)), tuple(plain))


def _least_bottleneck(sums: Sums, num_stages: int) -> int:
    """Return the least possible bottleneck; least[i] is that of the layers from i on, for one stage more each time."""
    end = len(sums) - 1
    least = [sums[end] - before for before in sums]
    for later in range(1, num_stages):  # how many stages follow the one that starts at layer i
        least = [_best_cut(sums, least, i, end - later) for i in range(end - later)]
    return least[0]


def _best_cut(sums: Sums, least: list[int], start: int, last: int) -> int:
    low, high = start + 1, last
    while low < high:
        cut = (low + high) // 2
        if sums[cut] - sums[start] >= least[cut]:
            high = cut
        else:
            low = cut + 1
    return min(max(sums[cut] - sums[start], least[cut]) for cut in (low - 1, low) if cut > start)


def _most_even(sums: Sums, num_stages: int, bottleneck: int) -> list[int]:
    end = len(sums) - 1
    first = [end]  # first[k]: the first layer from which on k stages are enough
    total: dict[int, int] = {end: 0}  # the least sum of squares from a layer on
    choices: list[dict[int, int]] = []
    for stages in range(1, num_stages + 1):
        first.append(bisect_left(sums, sums[first[-1]] - bottleneck))
        row = _Row(sums, total, bottleneck, (first[-2], end - stages + 1))
        row.solve(first[-1], end - stages, *row.cuts)
        total, choices = row.total, [row.choice, *choices]
    cuts = [0]
    for choice in choices:
        cuts.append(choice[cuts[-1]])
    return cuts


class _Row:
    """One stage more in front: where to cut, for every layer at which it may start.

    Squares of sums make the best cut move right as the start moves right, so solving the middle start first halves the
    cuts that are left for the starts on either side of it.
    """

    def __init__(self, sums: Sums, later: dict[int, int], bottleneck: int, cuts: tuple[int, int]) -> None:
        self.sums, self.later, self.bottleneck, self.cuts = sums, later, bottleneck, cuts
        self.total: dict[int, int] = {}
        self.choice: dict[int, int] = {}

    def solve(self, low: int, high: int, first_cut: int, last_cut: int) -> None:
        """Find the best cut for the starts from `low` to `high`, knowing that it lies between two others."""
        if low > high:
            return
        start = (low + high) // 2
        within = bisect_right(self.sums, self.sums[start] + self.bottleneck) - 1
        cuts = range(max(first_cut, start + 1), min(last_cut, within) + 1)
        self.total[start], self.choice[start] = min((self._squares(start, cut), cut) for cut in cuts)
        self.solve(low, start - 1, first_cut, self.choice[start])
        self.solve(start + 1, high, self.choice[start], last_cut)

    def _squares(self, start: int, cut: int) -> int:
        return (self.sums[cut] - self.sums[start]) ** 2 + self.later[cut]


def _exact(what: str, cost: object) -> Time:
    if not isinstance(cost, Rational) or isinstance(cost, bool):
        raise ValueError(f"partition needs exact costs, got {cost!r} for {what}; use integers or fractions.Fraction")
    if cost < 0:
        raise ValueError(f"partition needs costs of at least 0, got {cost} for {what}; use 0 for a layer without work")
    return cost if isinstance(cost, (int, Fraction)) else Fraction(cost)
