"""`partition`: splits a model's layers into stages with the least load on the slowest stage.

Chapter: book/pp/interleaved.  In: the cost of every layer, the number of stages.  Out: the layers of each stage.
  bottleneck   the largest load of a stage; with M microbatches the makespan has it M times and every other load once
               (see `dualpipe_lab.pp.closed_forms.gpipe_makespan`)
  time         O(stages * layers * layers per stage), by dynamic programming from the last stage to the first
Ties: of all splits with the least bottleneck, the most even split (least sum of squared loads); of these, the split
with the fewest layers on early stages, because under 1F1B an early stage holds the activations of more microbatches.
Elsewhere: torch leaves the split to the user; DeepSpeed `partition_balanced`; Megatron can count embedding and head as
one layer each.
"""

from bisect import bisect_right
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
    low, high = 0, sums[-1]
    while low < high:
        middle, end = (low + high) // 2, 0
        for _ in range(num_stages):  # each stage takes as many layers as fit
            end = bisect_right(sums, sums[end] + middle) - 1
        low, high = (low, middle) if end == len(sums) - 1 else (middle + 1, high)
    return low


def _most_even(sums: Sums, num_stages: int, bottleneck: int) -> tuple[int, ...]:
    """Return the cuts, from 0 to the number of layers, of the most even split within a bottleneck."""
    end = len(sums) - 1
    best: dict[int, tuple[int, tuple[int, ...]]] = {end: (0, (end,))}  # by start: the sum of squares, and the cuts
    for _ in range(num_stages):
        later, best = best, {}
        for start in range(end):
            cuts = range(start + 1, bisect_right(sums, sums[start] + bottleneck))
            found = [((sums[cut] - sums[start]) ** 2 + later[cut][0], later[cut][1]) for cut in cuts if cut in later]
            if found:
                total, behind = min(found)
                best[start] = total, (start, *behind)
    return best[0][1]


def _exact(what: str, cost: object) -> Time:
    if not isinstance(cost, Rational) or isinstance(cost, bool):
        raise ValueError(f"partition needs exact costs, got {cost!r} for {what}; use integers or fractions.Fraction")
    if cost < 0:
        raise ValueError(f"partition needs costs of at least 0, got {cost} for {what}; use 0 for a layer without work")
    return cost if isinstance(cost, (int, Fraction)) else Fraction(cost)
