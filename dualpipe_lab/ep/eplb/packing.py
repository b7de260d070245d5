"""Packing and replication, the two greedy steps of every balancing plan, for many layers at once.

Chapter: book/ep/eplb.  In: loads [rows, n].  Out: for every item its pack and its place there; for every replica its
expert.  Time: O(n) vectorised steps, whatever the number of rows.
  packing      heaviest item first, into the lightest pack that has room; every pack gets n / packs items
  replication  one more replica for the expert whose replicas are the heaviest: w / count
Replicating so is optimal: no other counts have a lighter heaviest replica.  Packing so is not; `refine` goes on.
Elsewhere: DeepSeek EPLB `balanced_packing`, `replicate_experts`.
Source: DeepSeek-AI, EPLB, 2025; Graham 1969 for the packing.
"""

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]
Indices = NDArray[np.int64]


def balanced_packing(loads: Loads, num_packs: int) -> tuple[Indices, Indices]:
    """Deal the items of each row out to packs of equal numbers of items; return pack and place of every item.

    >>> balanced_packing(np.array([[9.0, 7, 6, 5, 4, 1]]), num_packs=2)[0]
    array([[0, 1, 1, 0, 1, 0]])
    """
    num_rows, num_items = loads.shape
    room, rows = num_items // num_packs, np.arange(num_rows)
    packs, places = np.zeros((2, num_rows, num_items), np.int64)
    if room == 1:
        packs[:] = np.arange(num_items)  # one item each: any order is as good
        return packs, places
    totals, taken = np.zeros((num_rows, num_packs)), np.zeros((num_rows, num_packs), np.int64)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        pack = totals.argmin(1)
        packs[rows, item], places[rows, item] = pack, taken[rows, pack]
        taken[rows, pack] += 1
        totals[rows, pack] += np.where(taken[rows, pack] < room, loads[rows, item], np.inf)
    return packs, places


def replicate(loads: Loads, num_replicas: int) -> tuple[Indices, Indices, Indices]:
    """Give each row's experts `num_replicas` places; return the expert and the number of every replica, and the counts.

    The first replicas, one of each expert, come in the experts' order.

    >>> replicate(np.array([[1.0, 9, 2]]), num_replicas=5)[0]
    array([[0, 1, 2, 1, 1]])
    """
    num_rows, num_experts = loads.shape
    rows = np.arange(num_rows)
    experts, numbers = np.zeros((2, num_rows, num_replicas), np.int64)
    experts[:, :num_experts] = np.arange(num_experts)
    counts, share = np.ones((num_rows, num_experts), np.int64), loads.copy()
    for replica in range(num_experts, num_replicas):
        heaviest = share.argmax(1)
        experts[:, replica], numbers[:, replica] = heaviest, counts[rows, heaviest]
        counts[rows, heaviest] += 1
        share[rows, heaviest] = loads[rows, heaviest] / counts[rows, heaviest]
    return experts, numbers, counts
