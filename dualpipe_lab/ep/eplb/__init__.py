"""Expert-parallel load balancing: replicas of experts, placed so that all ranks have equal loads.

Chapter: book/ep/eplb.  In: the load of every expert.  Out: an `ExpertPlacement` of all layers.
`rebalance_experts` has DeepSeek's interface and results.  `balance` improves them: a lighter heaviest rank, and
replicas of one expert on different ranks.
"""

from dualpipe_lab._facade import make_facade

make_facade(__name__)
