"""Plans that go on where the greedy ones end.

Chapter: book/ep/eplb.  In: loads and sizes, as for `rebalance_experts`.  Out: a `Plan`, never worse than DeepSeek's.
"""

from typing import Any, Literal

import numpy as np

from dualpipe_lab.ep.eplb.packing import Indices, Loads
from dualpipe_lab.ep.eplb.plan import Plan, check, make_plan, place
from dualpipe_lab.ep.eplb.refine import Slots, lighten, part

Apart = Literal["free", "always", "never"]


def balance(
    weight: Any, num_replicas: int, num_groups: int = 1, num_nodes: int = 1, num_ranks: int = 1, apart: Apart = "free"
) -> Plan:
    """Plan so that the heaviest rank of each layer has as little to do as exchanges of replicas can reach.

    Args:
        weight: [layers, experts], the load of each expert.
        num_replicas: slots in all.
        num_groups: groups of neighbouring experts that stay on one node.
        num_nodes: nodes; if they do not divide the groups, the plan is global.
        num_ranks: ranks in all.
        apart: what becomes of two replicas of one expert on one rank.  "free": they part unless the heaviest rank gets
            heavier by it; "always": they part at the least cost (`rank_loads` of both plans states it); "never": they
            may stay.

    Raises:
        ValueError: as `rebalance_experts`.

    >>> balance([[6.0, 5, 4, 3, 2, 2]], num_replicas=6, num_ranks=2).physical_to_logical.tolist()
    [[0, 3, 4, 1, 2, 5]]
    """
    if apart not in ("free", "always", "never"):
        raise ValueError(f"apart is 'free', 'always' or 'never', got {apart!r}")
    loads = check(weight, num_replicas, num_groups, num_nodes, num_ranks)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    experts, _ = place(loads, num_replicas, num_groups, num_nodes, num_ranks)
    slots = slots_of(experts, loads, num_nodes, num_ranks)
    if apart != "never":
        part(slots)  # first, while the heaviest rank leaves room for it
    lighten(slots)
    if apart != "never":
        part(slots, at_any_cost=apart == "always")
    return make_plan(slots.experts.reshape(experts.shape), loads.shape[1])


def slots_of(experts: Indices, loads: Loads, num_nodes: int, num_ranks: int) -> Slots:
    """Arrange experts and their shares of load by node and rank: exchanges stay within a row, that is a node."""
    counts = (experts[:, :, None] == np.arange(loads.shape[1])).sum(1)
    share = np.take_along_axis(loads / counts, experts, 1)
    shape = len(experts) * num_nodes, num_ranks // num_nodes, -1
    return Slots(experts.reshape(shape).copy(), share.reshape(shape).copy())
