"""Exchanges of two replicas between ranks: until the heaviest rank cannot be lightened, and until twins are apart.

Chapter: book/ep/eplb.  In: experts and loads of the slots, [rows, ranks, slots].  Out: the same, exchanged.
  an exchange   of slots i on rank a and j on rank b: a's load falls by load(i) - load(j), b's rises by it
  lighten       a is a heaviest rank; the exchange whose heavier side is lightest is made while it is lighter than a was
  part          twins, two replicas of one expert on one rank: one of them leaves if no rank gets heavier by it than the
                heaviest is anyway.  With `at_any_cost` the least costly exchange is made in any case.
No exchange makes new twins.  Every round looks at one exchange per row, all rows at once: O(rows * slots * S) each.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualpipe_lab.ep.eplb.packing import Indices, Loads

EPSILON = 1e-12  # of the heaviest rank's load: less is rounding, not progress


class Slots(NamedTuple):
    """The slots of each row: experts and loads, both [rows, ranks, slots of a rank]."""

    experts: Indices
    loads: Loads


def lighten(slots: Slots, max_rounds: int | None = None) -> None:
    """Exchange replicas, in place, while that makes a heaviest rank lighter."""
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


def part(slots: Slots, at_any_cost: bool = False) -> None:
    """Exchange one of two replicas of an expert on one rank, in place, where the heaviest load allows it."""
    num_rows, num_ranks, size = slots.experts.shape
    stuck: NDArray[np.bool_] = np.zeros((num_rows, num_ranks * size), bool)
    while True:
        twins = _twins(slots.experts).reshape(num_rows, -1) & ~stuck
        rows = np.flatnonzero(twins.any(1))
        if not len(rows):
            return
        here = twins[rows].argmax(1)[:, None]
        some = Slots(slots.experts[rows], slots.loads[rows])
        heavier = _exchanges(some, here[:, 0] // size, here)[:, 0]
        best = heavier.argmin(1)
        found = heavier[np.arange(len(rows)), best]
        limit = np.inf if at_any_cost else some.loads.sum(2).max(1) * (1 + EPSILON)
        good = (found <= limit) & np.isfinite(found)
        stuck[rows[~good], here[~good, 0]] = True
        _make(slots, rows[good], here[good, 0], best[good])
        stuck[rows[good]] = False


def num_twins(experts: Indices) -> Indices:
    """Return, for each row of [rows, ranks, slots], how many replicas share their rank with one of the same expert."""
    count: Indices = _twins(experts).sum((1, 2))
    return count


def _twins(experts: Indices) -> NDArray[np.bool_]:
    """Which slots hold an expert that an earlier slot of the rank holds."""
    equal = experts[..., :, None] == experts[..., None, :]
    twins: NDArray[np.bool_] = np.tril(equal, -1).any(-1)
    return twins


def _exchanges(slots: Slots, source: Indices, here: Indices) -> Loads:
    """The heavier of both ranks after every exchange of a slot in `here`, all of rank `source`, with any other slot.

    Positions `here` [rows, some] and ranks `source` [rows] give [rows, some, slots of the row]; infinite: not allowed.
    """
    num_rows, num_ranks, size = slots.experts.shape
    row = np.arange(num_rows)[:, None]
    experts, loads = (part.reshape(num_rows, -1) for part in slots)
    totals = slots.loads.sum(2)
    gain = loads[row, here][:, :, None] - loads[:, None, :]
    to = np.repeat(totals, size, axis=1)[:, None, :] + gain
    heavier: Loads = np.maximum(totals[np.arange(num_rows), source][:, None, None] - gain, to)
    mine = experts[row, here]
    own = slots.experts[np.arange(num_rows), source]
    there = (mine[:, :, None, None] == slots.experts[:, None]).any(-1)  # the other rank has it already
    comes_twice = (own[:, None, :] == experts[:, :, None]).any(-1)[:, None, :]  # and this one the other's
    at_home = np.repeat(np.arange(num_ranks), size)[None, None, :] == source[:, None, None]
    heavier[np.repeat(there, size, axis=2) | comes_twice | at_home] = np.inf
    return heavier


def _make(slots: Slots, rows: Indices, one: Indices, other: Indices) -> None:
    for part in slots:
        flat = part.reshape(len(part), -1)
        flat[rows, one], flat[rows, other] = flat[rows, other].copy(), flat[rows, one].copy()
