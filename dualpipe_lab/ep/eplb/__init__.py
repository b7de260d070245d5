"""Balancing experts: which replicas of which experts a rank holds, so that all ranks have equally much to do.

Chapter: book/ep/eplb.  In: the load of every expert.  Out: a `Plan` for every layer.
`rebalance_experts` has DeepSeek's interface and results; `balance` goes on from there: lighter heaviest ranks, replicas
of one expert apart; `rebalance_sticky` stays close to the plan in force.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
