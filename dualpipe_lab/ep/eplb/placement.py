"""DeepSeek's EPLB: replicas of heavy experts, placed on nodes and ranks.

Chapter: book/ep/eplb.  In: loads [layers, experts].  Out: an `ExpertPlacement`.
  hierarchical   groups of experts to nodes, then replicas within each node, then replicas to its ranks: a token that
                 goes to few groups goes to few nodes.  Needs a number of groups that the nodes divide.
  global         replicas to ranks alone, as with one node and one group
  packing        heaviest item first, into the lightest pack with room; every pack gets n / packs items
  replication    one more replica for the expert with the heaviest replicas: w / count
A slot holds one replica: rank r has the slots r * n to (r + 1) * n - 1.  Time: O(n) vectorised steps for any number of
layers.  This replication is optimal: no other counts have a lighter heaviest replica.  This packing is not;
`balanced` improves it.
Elsewhere: DeepSeek EPLB `rebalance_experts`, `balanced_packing`, `replicate_experts`; SGLang and vLLM carry copies.
Source: DeepSeek-AI, EPLB, 2025, README; DeepSeek-V3 Technical Report, 2024, section 3.4; Graham 1969 for the packing.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Loads = NDArray[np.float64]
Indices = NDArray[np.int64]


class ExpertPlacement(NamedTuple):
    """The experts of all slots, and the slots of all experts.

    Attributes:
        physical_to_logical: [layers, slots], the expert in each slot.
        logical_to_physical: [layers, experts, most replicas], the slots of each expert, padded with -1.
        counts: [layers, experts], the number of replicas of each expert.
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    counts: Tensor


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
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    experts, numbers = place(loads, num_replicas, num_groups, num_nodes, num_gpus)
    return make_placement(experts, loads.shape[1], numbers)


def place(loads: Loads, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> tuple[Indices, Indices]:
    """Return the expert and the replica number of each slot, [layers, slots].

    Groups are packed on nodes; experts are replicated within a node; replicas are packed on its ranks.
    """
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
    shares = torch.from_numpy(_on_host(weight)) / placement.counts
    return shares.gather(1, placement.physical_to_logical).unflatten(1, (num_ranks, -1)).sum(-1)


def check(weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Loads:
    """Return the loads as an array.

    Raises:
        ValueError: loads or sizes that do not fit.
    """
    loads = _on_host(weight)
    if loads.ndim != 2 or not loads.size:
        raise ValueError(f"loads are [layers, experts], at least one of each, got shape {tuple(loads.shape)}")
    if not (np.isfinite(loads).all() and (loads >= 0).all()):
        raise ValueError("loads are finite and not negative; an expert that nobody chose has load 0")
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


def _on_host(weight: Any) -> Loads:
    """Return loads as an array: the host computes placements, whatever device the loads were counted on."""
    loads: Loads = np.array(weight.cpu() if isinstance(weight, Tensor) else weight, dtype=np.float64)
    return loads


def balanced_packing(loads: Loads, num_packs: int) -> tuple[Indices, Indices]:
    """Pack the items of each row into packs of equal size; return the pack and the position in it of every item.

    >>> balanced_packing(np.array([[9.0, 7, 6, 5, 4, 1]]), num_packs=2)[0]
    array([[0, 1, 1, 0, 1, 0]])
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

    The first replica of every expert comes first, in the experts' order.

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
