"""Balanced placement: exchanges of replicas between ranks, from where the greedy placement ends.

Chapter: book/ep/eplb.  In: loads and sizes, as for `rebalance_experts`.  Out: an `ExpertPlacement`, never worse than
DeepSeek's.
  an exchange           of slots i on rank a and j on rank b: a's load falls by load(i) - load(j), b's rises by it
  lower_max_load        a is a heaviest rank; the exchange whose heavier side is lightest is made while that side is
                        lighter than a was
  separate_duplicates   duplicates: two replicas of one expert on one rank.  One of them is exchanged if no rank becomes
                        heavier than the heaviest is.  With `at_any_cost` the least costly exchange is made in any case.
No exchange creates duplicates.  Every round looks at one exchange per row, all rows at once: O(rows * slots * S) each.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpipe_lab.ep.eplb.placement import ExpertPlacement, Indices, Loads, check, make_placement, place

Separate = Literal["free", "always", "never"]
EPSILON = 1e-12  # of the heaviest rank's load: less is rounding, not progress


class Slots(NamedTuple):
    """The slots of each row: experts and loads, both [rows, ranks, slots of a rank]."""

    experts: Indices
    loads: Loads


def balance(
    weight: Any,
    num_replicas: int,
    num_groups: int = 1,
    num_nodes: int = 1,
    num_ranks: int = 1,
    separate: Separate = "free",
) -> ExpertPlacement:
    """Place replicas so that the heaviest rank of each layer is as light as exchanges of replicas can make it.

    Args:
        weight: [layers, experts], the load of each expert.
        num_replicas: slots of all ranks together.
        num_groups: groups of neighbouring experts that stay on one node.
        num_nodes: nodes; if they do not divide the groups, placement is global.
        num_ranks: the number of ranks.
        separate: whether to separate two replicas of one expert on one rank.  "free": unless the heaviest rank becomes
            heavier; "always": at the least cost (compare the `rank_loads` of both placements); "never": no.

    Raises:
        ValueError: as `rebalance_experts`.

    >>> balance([[6.0, 5, 4, 3, 2, 2]], num_replicas=6, num_ranks=2).physical_to_logical.tolist()
    [[0, 3, 4, 1, 2, 5]]
    """
    if separate not in ("free", "always", "never"):
        raise ValueError(f"separate is 'free', 'always' or 'never', got {separate!r}")
    loads = check(weight, num_replicas, num_groups, num_nodes, num_ranks)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    experts, _ = place(loads, num_replicas, num_groups, num_nodes, num_ranks)
    slots = slots_of(experts, loads, num_nodes, num_ranks)
    if separate != "never":
        separate_duplicates(slots)  # first, while the heaviest rank is still heavy
    lower_max_load(slots)
    if separate != "never":
        separate_duplicates(slots, at_any_cost=separate == "always")
    return make_placement(slots.experts.reshape(experts.shape), loads.shape[1])


def slots_of(experts: Indices, loads: Loads, num_nodes: int, num_ranks: int) -> Slots:
    """Arrange experts and their shares of load in a row per node, [rows, ranks, slots]; exchanges stay within a row."""
    counts = (experts[:, :, None] == np.arange(loads.shape[1])).sum(1)
    share = np.take_along_axis(loads / counts, experts, 1)
    shape = len(experts) * num_nodes, num_ranks // num_nodes, -1
    return Slots(experts.reshape(shape).copy(), share.reshape(shape).copy())


def lower_max_load(slots: Slots, max_rounds: int | None = None) -> None:
    """Exchange replicas, in place, as long as an exchange lowers the heaviest load."""
    num_rows, num_ranks, size = slots.experts.shape
    rows = np.arange(num_rows)
    for _ in range(8 * num_ranks if max_rounds is None else max_rounds):
        if not len(rows):
            return
        some = Slots(slots.experts[rows], slots.loads[rows])
        totals = some.loads.sum(2)
        source = totals.argmax(1)
        here = source[:, None] * size + np.arange(size)
        heavier = _exchanges(some, source, here).reshape(len(rows), -1)
        best = heavier.argmin(1)
        each = np.arange(len(rows))
        better = heavier[each, best] < totals.max(1) * (1 - EPSILON)
        _make(slots, rows[better], here[each, best // (num_ranks * size)][better], (best % (num_ranks * size))[better])
        rows = rows[better]


def separate_duplicates(slots: Slots, at_any_cost: bool = False) -> None:
    """Exchange one of two replicas of an expert on one rank, in place, where the heaviest load does not rise."""
    num_rows, num_ranks, size = slots.experts.shape
    stuck: NDArray[np.bool_] = np.zeros((num_rows, num_ranks * size), bool)
    while True:
        duplicates = _duplicates(slots.experts).reshape(num_rows, -1) & ~stuck
        rows = np.flatnonzero(duplicates.any(1))
        if not len(rows):
            return
        here = duplicates[rows].argmax(1)[:, None]
        some = Slots(slots.experts[rows], slots.loads[rows])
        heavier = _exchanges(some, here[:, 0] // size, here)[:, 0]
        best = heavier.argmin(1)
        found = heavier[np.arange(len(rows)), best]
        limit = np.inf if at_any_cost else some.loads.sum(2).max(1) * (1 + EPSILON)
        good = (found <= limit) & np.isfinite(found)
        stuck[rows[~good], here[~good, 0]] = True
        _make(slots, rows[good], here[good, 0], best[good])
        stuck[rows[good]] = False


def _duplicates(experts: Indices) -> NDArray[np.bool_]:
    """Mark the slots whose expert is also in an earlier slot of the rank."""
    equal = experts[..., :, None] == experts[..., None, :]
    duplicates: NDArray[np.bool_] = np.tril(equal, -1).any(-1)
    return duplicates


def _exchanges(slots: Slots, source: Indices, here: Indices) -> Loads:
    """Return the load of the heavier rank after each exchange of a slot `here`, on rank `source`, with any other slot.

    Positions `here` [rows, some] and ranks `source` [rows] give [rows, some, slots of the row]; infinite: not allowed.
    """
    num_rows, num_ranks, size = slots.experts.shape
    row = np.arange(num_rows)[:, None]
    experts, loads = (part.reshape(num_rows, -1) for part in slots)
    totals = slots.loads.sum(2)
    gain = loads[row, here][:, :, None] - loads[:, None, :]
    to = np.repeat(totals, size, axis=1)[:, None, :] + gain
    heavier: Loads = np.maximum(totals[np.arange(num_rows), source][:, None, None] - gain, to)
    moving = experts[row, here]
    of_source = slots.experts[np.arange(num_rows), source]
    there = (moving[:, :, None, None] == slots.experts[:, None]).any(-1)  # the destination holds this expert already
    comes_twice = (of_source[:, None, :] == experts[:, :, None]).any(-1)[:, None, :]  # the source holds that expert
    is_same_rank = np.repeat(np.arange(num_ranks), size)[None, None, :] == source[:, None, None]
    heavier[np.repeat(there, size, axis=2) | comes_twice | is_same_rank] = np.inf
    return heavier


def _make(slots: Slots, rows: Indices, one: Indices, other: Indices) -> None:
    for part in slots:
        flat = part.reshape(len(part), -1)
        flat[rows, one], flat[rows, other] = flat[rows, other].copy(), flat[rows, one].copy()
