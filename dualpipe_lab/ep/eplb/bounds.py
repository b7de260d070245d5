"""Bounds of a placement: a lower bound for any size, the optimum for small ones.

Chapter: book/ep/eplb.  In: the loads of one layer.  Out: the least load of the heaviest rank.
  lower_bound   max(mean load of a rank, the lightest possible heaviest replica)
  optimum       the best of all replications and placements, by branch and bound
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import combinations, pairwise

LIMIT = 12  # slots; the search grows exponentially


def lower_bound(loads: Sequence[float], num_replicas: int, num_ranks: int) -> float:
    """Return a lower bound of the heaviest load of one layer, for every placement.

    >>> lower_bound([9, 2, 1], num_replicas=4, num_ranks=2)
    6.0
    """
    shares = [(-load, 1, load) for load in map(float, loads)]
    heapify(shares)
    for _ in range(num_replicas - len(shares)):
        _, count, load = shares[0]
        heapreplace(shares, (-load / (count + 1), count + 1, load))
    return max(sum(map(float, loads)) / num_ranks, -shares[0][0])


def optimum(loads: Sequence[float], num_replicas: int, num_ranks: int) -> float:
    """Return the load of the heaviest rank in the best placement of one layer.

    Raises:
        ValueError: more than `LIMIT` slots, or sizes that do not fit.

    >>> optimum([9, 2, 1], num_replicas=4, num_ranks=2)
    6.5
    """
    if num_replicas > LIMIT:
        raise ValueError(f"the search tries all plans and takes at most {LIMIT} slots, got {num_replicas}")
    if num_replicas < len(loads) or num_replicas % num_ranks:
        raise ValueError(f"{num_replicas} slots hold at least {len(loads)} experts, on {num_ranks} ranks equally many")
    best = float("inf")
    for counts in _counts(len(loads), num_replicas):
        items = sorted((load / n for load, n in zip(loads, counts, strict=True) for _ in range(n)), reverse=True)
        best = min(best, _pack(items, [0.0] * num_ranks, [num_replicas // num_ranks] * num_ranks, best))
    return best


def _counts(num_experts: int, num_replicas: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of replicas per expert, at least one for each."""
    for ends in combinations(range(1, num_replicas), num_experts - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *ends, num_replicas)))


def _pack(items: list[float], totals: list[float], free: list[int], best: float) -> float:
    if not items:
        return max(totals)
    tried = set()
    for rank in range(len(totals)):
        state = totals[rank], free[rank]
        if not free[rank] or state in tried or totals[rank] + items[0] >= best:
            continue
        tried.add(state)
        totals[rank], free[rank] = totals[rank] + items[0], free[rank] - 1
        best = min(best, _pack(items[1:], totals, free, best))
        totals[rank], free[rank] = state
    return best
