"""Plans that stay close to the one before: every slot that changes costs the transfer of an expert's weights.

Chapter: book/ep/eplb.  In: new loads, the plan in force, how many slots may change.  Out: a plan.
  a replacement   one slot: a replica of an expert that has several gives way to one of an expert on the heaviest rank
  an exchange     two slots: a replica of the heaviest rank against one of another rank
In each step the change that lightens the heaviest rank most per slot is made.  Changes stay within a node.
  cost of a plan  slots changed * 3 * h * f * bytes per number, for experts of three matrices h by f
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dualpipe_lab.ep.eplb.packing import Indices, Loads
from dualpipe_lab.ep.eplb.plan import Plan, check, make_plan
from dualpipe_lab.ep.eplb.refine import EPSILON


class Change(NamedTuple):
    """What a step would do: the heaviest load after it, and the new experts of some slots."""

    heaviest: float
    slots: tuple[int, ...]
    experts: tuple[int, ...]


def rebalance_sticky(weight: Any, previous: Tensor, num_ranks: int, max_moves: int, num_nodes: int = 1) -> Plan:
    """Improve a plan under new loads by changing at most `max_moves` slots of each layer.

    Args:
        weight: [layers, experts], the new load of each expert.
        previous: [layers, slots], `physical_to_logical` of the plan in force.
        num_ranks: ranks in all.
        max_moves: slots of a layer that may change; 0 returns the plan as it is.
        num_nodes: nodes; no expert leaves the node that it is on.

    Raises:
        ValueError: sizes that do not fit, or a plan without a slot for one of the experts.

    >>> import torch
    >>> rebalance_sticky([[6.0, 2, 2, 2]], torch.tensor([[0, 1, 1, 2, 3, 3]]), 2, max_moves=1).physical_to_logical
    tensor([[0, 1, 1, 2, 0, 3]])
    """
    slots = previous.numpy().astype(np.int64)
    if slots.ndim != 2 or max_moves < 0:
        raise ValueError(f"the plan is [layers, slots], max_moves at least 0, got {slots.shape} and {max_moves}")
    loads = check(weight, slots.shape[1], 1, num_nodes, num_ranks)
    num_experts = loads.shape[1]
    if len(slots) != len(loads) or slots.min() < 0 or slots.max() >= num_experts:
        raise ValueError(f"the plan has {len(slots)} layers, loads {len(loads)}; experts count from 0 to {num_experts}")
    if missing := [layer for layer, row in enumerate(slots) if len(set(row.tolist())) < num_experts]:
        raise ValueError(f"in layer {missing[0]} of the plan an expert has no slot; every expert needs one")
    found = [_improve(row, slot, num_ranks, max_moves, num_nodes) for row, slot in zip(loads, slots, strict=True)]
    return make_plan(np.stack(found), num_experts)


def num_moves(previous: Tensor, plan: Tensor) -> Tensor:
    """Return how many slots of each layer hold another expert than before, [layers]."""
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
    """One layer's plan, with what its changes need."""

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
        """The best way to give a slot to one more replica of an expert of the heaviest rank."""
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
        """The best way to exchange a slot of the heaviest rank with one of another rank."""
        mine, theirs = self.slots[self.here], self.slots
        gain = self.share[mine][:, None] - self.share[theirs][None]
        others = np.where(np.eye(len(self.totals), dtype=bool), -np.inf, self.totals)  # [ranks, all but that rank]
        others[:, self.source] = -np.inf
        rest = others.max(1)[self.ranks]
        both = np.maximum(self.totals[self.source] - gain, self.totals[self.ranks][None] + gain)
        heaviest = np.maximum(both, rest[None])
        twice = (self.holds[mine][:, self.ranks] > 0) | (self.holds[theirs, self.source] > 0)[None]
        heaviest[twice | ~self.near[None]] = np.inf
        one, other = divmod(int(heaviest.argmin()), len(theirs))
        slots = int(self.here[one]), other
        return Change(float(heaviest[one, other]), slots, (int(theirs[other]), int(mine[one])))
