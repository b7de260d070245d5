"""Balancing experts: which replicas of which experts a rank holds, so that all ranks have equally much to do.

Chapter: book/ep/eplb.  In: the load of every expert.  Out: a `Plan` for every layer.
`rebalance_experts` has DeepSeek's interface and results; `balance` goes on from there: lighter heaviest ranks, replicas
of one expert apart; `rebalance_sticky` stays close to the plan in force.
"""

from dualpipe_lab.ep.eplb.balanced import balance
from dualpipe_lab.ep.eplb.bounds import lower_bound, optimum
from dualpipe_lab.ep.eplb.plan import Plan, rank_loads, rebalance_experts
from dualpipe_lab.ep.eplb.sticky import num_moves, rebalance_sticky

__all__ = [
    "Plan",
    "balance",
    "lower_bound",
    "num_moves",
    "optimum",
    "rank_loads",
    "rebalance_experts",
    "rebalance_sticky",
]
