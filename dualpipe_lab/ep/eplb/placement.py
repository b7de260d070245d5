"""DeepSeek's EPLB: replicas of heavy experts, placed on nodes and ranks; and `balance`, which improves the placement.

Chapter: book/ep/eplb.  In: loads [layers, experts].  Out: an `ExpertPlacement`.
Hierarchical placement puts groups of experts on nodes, then replicas within each node, then replicas on its ranks: a
token that goes to few groups goes to few nodes.  Global placement has one node and one group.
A slot holds one replica: rank r has the slots r * n to (r + 1) * n - 1.  Time: O(n) vectorised steps for any number of
layers.  `balance` exchanges replicas between ranks, from where the packing ends, and is never worse.
Elsewhere: DeepSeek EPLB `rebalance_experts`, `balanced_packing`, `replicate_experts`; SGLang and vLLM carry copies.
Source: DeepSeek-AI, EPLB, 2025, README; DeepSeek-V3 Technical Report, 2024, section 3.4; Graham 1969 for the packing.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Loads = NDArray[np.float64]
Indices = NDArray[np.int64]
Separate = Literal["free", "always", "never"]
EPSILON = 1e-12  # of the heaviest rank's load: less is rounding, not progress


class ExpertPlacement(NamedTuple):
    """The experts of all slots, and the slots of all experts."""

    physical_to_logical: Tensor  # [layers, slots], the expert in each slot
    logical_to_physical: Tensor  # [layers, experts, most replicas], the slots of each expert, padded with -1
    counts: Tensor  # [layers, experts], the number of replicas of each expert


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Place replicas as DeepSeek's EPLB does, with its names and its order of arguments and results.

    Args:
        weight: [layers, experts], the load of each expert: tokens, or any other non-negative number.
        num_replicas: slots of all ranks together.
        num_groups: groups of neighbouring experts that should stay on one node.
        num_nodes: nodes; if they do not divide the groups, placement is global, and the sizes of both are ignored.
        num_gpus: the number of ranks.

    Raises:
        ValueError: sizes that do not divide, fewer slots than experts, or a load that is not a finite number from 0.

    >>> placement = rebalance_experts([[5.0, 1, 1, 1]], num_replicas=6, num_groups=1, num_nodes=1, num_gpus=2)
    >>> placement[0].tolist(), placement[2].tolist()
    ([[0, 0, 3, 0, 1, 2]], [[3, 1, 1, 1]])
    """
    loads = check(weight, num_replicas, num_groups, num_nodes, num_gpus)
    experts, numbers = place(loads, num_replicas, num_groups, num_nodes, num_gpus)
    return make_placement(experts, loads.shape[1], numbers)


def place(loads: Loads, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> tuple[Indices, Indices]:
    """Return the expert and the replica number of each slot, [layers, slots].

    Groups are packed on nodes; experts are replicated within a node; replicas are packed on its ranks.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1  # global
    num_layers, num_experts = loads.shape
    size, slots = num_experts // num_groups, num_replicas // num_gpus
    by_node = _experts_of_nodes(loads, num_groups, num_nodes, size)  # [layers * nodes, experts of a node]
    layers = np.repeat(np.arange(num_layers), num_nodes)[:, None]
    local = loads[layers, by_node]
    replicas, numbers, counts = replicate(local, num_replicas // num_nodes)
    rows = np.arange(len(local))[:, None]
    packs, positions = balanced_packing((local / counts)[rows, replicas], num_gpus // num_nodes)
    found = np.empty((2, *replicas.shape), np.int64)
    found[:, rows, packs * slots + positions] = by_node[rows, replicas], numbers
    experts, numbers = found.reshape(2, num_layers, num_replicas)
    return experts, numbers


def _experts_of_nodes(loads: Loads, num_groups: int, num_nodes: int, size: int) -> Indices:
    groups = loads.reshape(len(loads), num_groups, size).sum(-1)
    nodes, positions = balanced_packing(groups, num_nodes)
    order = np.empty_like(nodes)  # the groups of node 0, then those of node 1, and so on
    order[np.arange(len(loads))[:, None], nodes * (num_groups // num_nodes) + positions] = np.arange(num_groups)
    experts: Indices = (order[:, :, None] * size + np.arange(size)).reshape(len(loads) * num_nodes, -1)
    return experts


def make_placement(experts: Indices, num_experts: int, numbers: Indices | None = None) -> ExpertPlacement:
    """Return the placement with these experts in its slots; `numbers` orders an expert's replicas (default: slots)."""
    rows = np.arange(len(experts))[:, None]
    counts = (experts[:, :, None] == np.arange(num_experts)).sum(1)
    if numbers is None:
        order = np.argsort(experts, axis=1, kind="stable")
        firsts = np.take_along_axis(np.cumsum(counts, 1) - counts, np.take_along_axis(experts, order, 1), 1)
        numbers = np.empty_like(experts)
        numbers[rows, order] = np.arange(experts.shape[1]) - firsts
    slots = np.full((*counts.shape, int(counts.max(initial=0))), -1, np.int64)
    slots[rows, experts, numbers] = np.arange(experts.shape[1])
    return ExpertPlacement(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (experts, slots, counts)))


def rank_loads(weight: Any, placement: ExpertPlacement, num_ranks: int) -> Tensor:
    """Return the load of every rank, [layers, ranks], if the replicas of an expert share its load evenly.

    >>> rank_loads([[5.0, 1, 1, 1]], ExpertPlacement(*rebalance_experts([[5.0, 1, 1, 1]], 6, 1, 1, 2)), 2).tolist()
    [[4.333333333333334, 3.666666666666667]]
    """
    shares = torch.from_numpy(_loads(weight)) / placement.counts
    return shares.gather(1, placement.physical_to_logical).unflatten(1, (num_ranks, -1)).sum(-1)


def check(weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Loads:
    """Return the loads as an array; ValueError for loads or sizes that do not fit."""
    loads = _loads(weight)
    sizes = {"num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_gpus}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} counts from 1, got {size}")
    num_experts = loads.shape[1]
    if num_replicas < num_experts:
        raise ValueError(f"{num_replicas} slots cannot hold {num_experts} experts; use {num_experts} or more")
    shares = [("num_replicas", num_replicas, "num_gpus", num_gpus)]
    if num_groups % num_nodes == 0:  # else placement is global, and groups and nodes are ignored
        shares += [("experts", num_experts, "num_groups", num_groups), ("num_gpus", num_gpus, "num_nodes", num_nodes)]
    for what, size, by, divisor in shares:
        if size % divisor:
            raise ValueError(f"{what} must be a multiple of {by}, got {size} and {divisor}")
    return loads


def _loads(weight: Any) -> Loads:
    """Return loads of any type as an array: numpy has no bfloat16, and takes no tensor that requires a gradient."""
    loads: Loads = np.array(weight.detach().double().cpu() if isinstance(weight, Tensor) else weight, dtype=np.float64)
    if loads.ndim != 2 or not loads.size:
        raise ValueError(f"loads are [layers, experts], at least one of each, got shape {tuple(loads.shape)}")
    if not (np.isfinite(loads).all() and (loads >= 0).all()):
        raise ValueError("loads are finite and not negative; an expert that nobody chose has load 0")
    return loads


def balanced_packing(loads: Loads, num_packs: int) -> tuple[Indices, Indices]:
    """Pack the items of each row into packs of equal size; return every item's pack, and its position there.

    The heaviest item comes first, into the lightest pack with room.  This is not optimal.
    """
    num_rows, num_items = loads.shape
    size, rows = num_items // num_packs, np.arange(num_rows)
    packs, positions = np.zeros((2, num_rows, num_items), np.int64)
    if size == 1:
        packs[:] = np.arange(num_items)  # one item per pack: the order does not matter
        return packs, positions
    totals, taken = np.zeros((num_rows, num_packs)), np.zeros((num_rows, num_packs), np.int64)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        pack = totals.argmin(1)
        packs[rows, item], positions[rows, item] = pack, taken[rows, pack]
        taken[rows, pack] += 1
        totals[rows, pack] += np.where(taken[rows, pack] < size, loads[rows, item], np.inf)
    return packs, positions


def replicate(loads: Loads, num_replicas: int) -> tuple[Indices, Indices, Indices]:
    """Replicate each row's experts; return the expert and the number of every replica, and the replicas per expert.

    The first replica of every expert comes first, in the experts' order; each further one goes to the expert with the
    heaviest replicas.  This is optimal: no other counts have a lighter heaviest replica.
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
        num_groups = num_nodes = 1  # global
    experts, _ = place(loads, num_replicas, num_groups, num_nodes, num_ranks)
    slots = slots_of(experts, loads, num_nodes, num_ranks)
    if separate != "never":
        separate_duplicates(slots)  # first, while the heaviest rank is still heavy
    lower_max_load(slots)
    if separate != "never":
        separate_duplicates(slots, at_any_cost=separate == "always")
    return make_placement(slots.experts.reshape(experts.shape), loads.shape[1])


def slots_of(experts: Indices, loads: Loads, num_nodes: int, num_ranks: int) -> Slots:
    """Arrange experts and their shares of load in a row per node: exchanges stay within a row."""
    counts = (experts[:, :, None] == np.arange(loads.shape[1])).sum(1)
    share = np.take_along_axis(loads / counts, experts, 1)
    shape = len(experts) * num_nodes, num_ranks // num_nodes, -1
    return Slots(experts.reshape(shape).copy(), share.reshape(shape).copy())


def lower_max_load(slots: Slots, max_rounds: int | None = None) -> None:
    """Exchange replicas, in place, as long as an exchange lowers the heaviest load.

    Every round looks at the exchanges of a heaviest rank of each row, all rows at once, and makes the one whose heavier
    side is lightest: O(rows * slots * S) for S slots of a rank.
    """
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
    """Exchange one of two replicas of an expert on one rank, in place, where the heaviest load does not rise.

    With `at_any_cost` the least costly exchange is made in any case.
    """
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
