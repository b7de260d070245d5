"""Sticky placement: improve the placement in force with few changes, each of which transfers an expert's weights.

Chapter: book/ep/eplb.  In: new loads, the placement in force, a budget.  Out: an `ExpertPlacement`.
  a replacement   one slot: a replica of an expert with several is replaced by one of an expert on the heaviest rank
  an exchange     two slots: a replica of the heaviest rank is exchanged with one of another rank
Each step makes the change that lowers the heaviest load most per slot.  Changes stay within a node.
  cost            slots changed * 3 * h * f * bytes per number, for experts of three matrices h by f
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dualpipe_lab.ep.eplb.balanced import EPSILON
from dualpipe_lab.ep.eplb.placement import ExpertPlacement, Indices, Loads, check, make_placement


class Change(NamedTuple):
    """A possible step: the heaviest load after it, and the new experts of some slots."""

    heaviest: float
    slots: tuple[int, ...]
    experts: tuple[int, ...]


def rebalance_sticky(
    weight: Any, previous: Tensor, num_ranks: int, max_moves: int, num_nodes: int = 1
) -> ExpertPlacement:
    """Improve a placement under new loads by changing at most `max_moves` slots of each layer.

    Args:
        weight: [layers, experts], the new load of each expert.
        previous: [layers, slots], `physical_to_logical` of the placement in force.
        num_ranks: the number of ranks.
        max_moves: slots of a layer that may change; 0 returns the placement unchanged.
        num_nodes: nodes; every expert stays on its node.

    Raises:
        ValueError: sizes that do not fit, or a placement without a slot for one of the experts.

    >>> import torch
    >>> rebalance_sticky([[6.0, 2, 2, 2]], torch.tensor([[0, 1, 1, 2, 3, 3]]), 2, max_moves=1).physical_to_logical
    tensor([[0, 1, 1, 2, 0, 3]])
    """
    slots = previous.cpu().numpy().astype(np.int64)
    if slots.ndim != 2 or max_moves < 0:
        raise ValueError(f"the placement is [layers, slots], max_moves at least 0, got {slots.shape} and {max_moves}")
    loads = check(weight, slots.shape[1], 1, num_nodes, num_ranks)
    num_experts = loads.shape[1]
    if len(slots) != len(loads) or slots.min() < 0 or slots.max() >= num_experts:
        raise ValueError(
            f"the placement has {len(slots)} layers, loads {len(loads)}; experts count from 0 to {num_experts}"
        )
    if missing := [layer for layer, row in enumerate(slots) if len(set(row.tolist())) < num_experts]:
        raise ValueError(f"in layer {missing[0]} of the placement an expert has no slot; every expert needs one")
    found = [_improve(row, slot, num_ranks, max_moves, num_nodes) for row, slot in zip(loads, slots, strict=True)]
    return make_placement(np.stack(found), num_experts)


def num_moves(previous: Tensor, plan: Tensor) -> Tensor:
    """Count the slots of each layer that hold another expert than before, [layers]."""
    return (previous != plan).sum(1)


def _improve(loads: Loads, slots: Indices, num_ranks: int, budget: int, num_nodes: int) -> Indices:
    slots = slots.copy()
    while budget:
        layer = _Layer(loads, slots, num_ranks, num_nodes)
        heaviest = float(layer.totals.max())
        changes = [layer.replacement(), *([layer.exchange()] if budget > 1 else [])]
        best = max(changes, key=lambda change: (heaviest - change.heaviest) / len(change.slots))
        if best.heaviest >= heaviest * (1 - EPSILON):
            break
        slots[list(best.slots)] = best.experts
        budget -= len(best.slots)
    return slots


class _Layer:
    """One layer's placement, with the loads from which its changes are chosen."""

    def __init__(self, loads: Loads, slots: Indices, num_ranks: int, num_nodes: int) -> None:
        self.loads, self.slots = loads, slots
        self.ranks = np.repeat(np.arange(num_ranks), len(slots) // num_ranks)
        self.holds = np.zeros((len(loads), num_ranks), np.int64)
        np.add.at(self.holds, (slots, self.ranks), 1)
        self.counts = self.holds.sum(1)
        self.share = loads / self.counts
        self.totals = self.share @ self.holds
        self.source = int(self.totals.argmax())
        here = np.flatnonzero(self.ranks == self.source)
        self.here: Indices = here[np.unique(slots[here], return_index=True)[1]]
        nodes = self.ranks * num_nodes // num_ranks
        self.near: NDArray[np.bool_] = nodes == self.source * num_nodes // num_ranks

    def replacement(self) -> Change:
        """Return the best replacement of a replica by one more of an expert of the heaviest rank."""
        guests, old = self.slots[self.here], self.slots
        fewer, more = np.maximum(self.counts - 1, 1), self.counts + 1
        home = np.eye(self.holds.shape[1])[self.ranks]  # [slots, ranks]
        left = (self.holds[old] - home) * (self.loads / fewer - self.share)[old, None] - home * self.share[old, None]
        came = home[:, None] * (self.loads / more)[guests, None]  # [slots, guests, ranks]
        lighter = self.holds[guests] * (self.share - self.loads / more)[guests, None]
        heaviest = (self.totals + left[:, None] + came - lighter).max(2)
        taken = self.holds[guests][:, self.ranks].T > 0
        heaviest[(self.counts[old] == 1)[:, None] | taken | ~self.near[:, None]] = np.inf
        slot, guest = divmod(int(heaviest.argmin()), len(guests))
        return Change(float(heaviest[slot, guest]), (slot,), (int(guests[guest]),))

    def exchange(self) -> Change:
        """Return the best exchange of a slot of the heaviest rank with one of another rank."""
        heavy, other_experts = self.slots[self.here], self.slots
        gain = self.share[heavy][:, None] - self.share[other_experts][None]
        others = np.where(np.eye(len(self.totals), dtype=bool), -np.inf, self.totals)  # [ranks, all but that rank]
        others[:, self.source] = -np.inf
        rest = others.max(1)[self.ranks]
        both = np.maximum(self.totals[self.source] - gain, self.totals[self.ranks][None] + gain)
        heaviest = np.maximum(both, rest[None])
        twice = (self.holds[heavy][:, self.ranks] > 0) | (self.holds[other_experts, self.source] > 0)[None]
        heaviest[twice | ~self.near[None]] = np.inf
        one, other = divmod(int(heaviest.argmin()), len(other_experts))
        slots = int(self.here[one]), other
        return Change(float(heaviest[one, other]), slots, (int(other_experts[other]), int(heavy[one])))
