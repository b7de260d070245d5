"""DeepSeek's plans: replicas of heavy experts, dealt out to nodes and ranks.

Chapter: book/ep/eplb.  In: loads [layers, experts].  Out: a `Plan`.
  hierarchical   groups of experts to nodes, then replicas within each node, then replicas to its ranks: a token that
                 goes to few groups goes to few nodes.  Needs a number of groups that the nodes divide.
  global         replicas and ranks alone, as if there were one node with one group
A slot is a place for one expert: rank r has the slots r * n to (r + 1) * n - 1.
Elsewhere: DeepSeek EPLB `rebalance_experts`; SGLang and vLLM carry copies of it.
Source: DeepSeek-AI, EPLB, 2025, README; DeepSeek-V3 Technical Report, 2024, section 3.4.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualpipe_lab.ep.eplb.packing import Indices, Loads, balanced_packing, replicate


class Plan(NamedTuple):
    """Where the replicas are.

    Attributes:
        physical_to_logical: [layers, slots], the expert in each slot.
        logical_to_physical: [layers, experts, most replicas], the slots of each expert; -1 where there are no more.
        counts: [layers, experts], how many replicas each expert has.
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    counts: Tensor


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Plan as DeepSeek's EPLB does, with its names and its order of arguments.

    Args:
        weight: [layers, experts], the load of each expert: tokens, or any other non-negative number.
        num_replicas: slots in all.
        num_groups: groups of neighbouring experts that should stay on one node.
        num_nodes: nodes; if they do not divide the groups, the plan is global, and neither of the two has to fit.
        num_gpus: ranks in all.

    Raises:
        ValueError: sizes that do not divide, fewer slots than experts, or a load that is no number.

    >>> plan = rebalance_experts([[5.0, 1, 1, 1]], num_replicas=6, num_groups=1, num_nodes=1, num_gpus=2)
    >>> plan[0].tolist(), plan[2].tolist()
    ([[0, 0, 3, 0, 1, 2]], [[3, 1, 1, 1]])
    """
    loads = check(weight, num_replicas, num_groups, num_nodes, num_gpus)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    experts, numbers = place(loads, num_replicas, num_groups, num_nodes, num_gpus)
    return make_plan(experts, loads.shape[1], numbers)


def place(loads: Loads, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> tuple[Indices, Indices]:
    """Return expert and replica number of each slot, [layers, slots].

    Groups go to nodes, replicas are made within a node, and replicas go to its ranks.
    """
    num_layers, num_experts = loads.shape
    size, slots = num_experts // num_groups, num_replicas // num_gpus
    by_node = _experts_of_nodes(loads, num_groups, num_nodes, size)  # [layers * nodes, experts of a node]
    layers = np.repeat(np.arange(num_layers), num_nodes)[:, None]
    local = loads[layers, by_node]
    replicas, numbers, counts = replicate(local, num_replicas // num_nodes)
    rows = np.arange(len(local))[:, None]
    packs, places = balanced_packing((local / counts)[rows, replicas], num_gpus // num_nodes)
    found = np.empty((2, *replicas.shape), np.int64)
    found[:, rows, packs * slots + places] = by_node[rows, replicas], numbers
    experts, numbers = found.reshape(2, num_layers, num_replicas)
    return experts, numbers


def _experts_of_nodes(loads: Loads, num_groups: int, num_nodes: int, size: int) -> Indices:
    groups = loads.reshape(len(loads), num_groups, size).sum(-1)
    nodes, places = balanced_packing(groups, num_nodes)
    order = np.empty_like(nodes)  # of each node in turn, its groups
    order[np.arange(len(loads))[:, None], nodes * (num_groups // num_nodes) + places] = np.arange(num_groups)
    experts: Indices = (order[:, :, None] * size + np.arange(size)).reshape(len(loads) * num_nodes, -1)
    return experts


def make_plan(experts: Indices, num_experts: int, numbers: Indices | None = None) -> Plan:
    """Return the plan with these experts in its slots; `numbers` orders the replicas of an expert (default: slots)."""
    rows = np.arange(len(experts))[:, None]
    counts = (experts[:, :, None] == np.arange(num_experts)).sum(1)
    if numbers is None:
        order = np.argsort(experts, axis=1, kind="stable")
        firsts = np.take_along_axis(np.cumsum(counts, 1) - counts, np.take_along_axis(experts, order, 1), 1)
        numbers = np.empty_like(experts)
        numbers[rows, order] = np.arange(experts.shape[1]) - firsts
    slots = np.full((*counts.shape, int(counts.max(initial=0))), -1, np.int64)
    slots[rows, experts, numbers] = np.arange(experts.shape[1])
    return Plan(*(torch.from_numpy(np.ascontiguousarray(part)) for part in (experts, slots, counts)))


def rank_loads(weight: Any, plan: Plan, num_ranks: int) -> Tensor:
    """Return what every rank has to do, [layers, ranks], if the replicas of an expert share its load evenly.

    >>> rank_loads([[5.0, 1, 1, 1]], Plan(*rebalance_experts([[5.0, 1, 1, 1]], 6, 1, 1, 2)), 2).tolist()
    [[4.333333333333334, 3.666666666666667]]
    """
    shares = torch.as_tensor(np.asarray(weight, dtype=np.float64)) / plan.counts
    return shares.gather(1, plan.physical_to_logical).unflatten(1, (num_ranks, -1)).sum(-1)


def check(weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Loads:
    """Return the loads as an array, or say what does not fit."""
    loads: Loads = np.asarray(weight.cpu() if isinstance(weight, Tensor) else weight, dtype=np.float64)
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
    if num_groups % num_nodes == 0:  # else the plan is global, and neither groups nor nodes play a part
        shares += [("experts", num_experts, "num_groups", num_groups), ("num_gpus", num_gpus, "num_nodes", num_nodes)]
    for what, whole, by, part in shares:
        if whole % part:
            raise ValueError(f"{what} must be a multiple of {by}, got {whole} and {part}")
    return loads
