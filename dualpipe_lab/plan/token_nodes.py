"""`nodes_of_token`: how many nodes the experts of a token lie on, where all choices that a router has are as likely.

In: a config with experts, nodes.  Out: the expected number.
  choices     M of G groups of experts, then K experts of the M E / G in those
  a node      has x experts of the chosen groups, and none of the token's in C(M E / G - x, K) of those choices
  expected    the nodes, less for each the part of all choices in which it has none
DeepSeek-V3 sends a token to at most 4 nodes (technical report, section 2.1.2): M = 4 of G = 8 groups, one on a node.
"""

from collections import Counter
from functools import cache
from math import comb

from dualpipe_lab.models.v3_moe_config import V3MoEConfig


@cache
def nodes_of_token(config: V3MoEConfig, num_nodes: int) -> float:
    """Return the expected number of nodes with experts of a token.

    Args:
        config: whose experts are spread over the nodes as evenly as they can be, in their order.
        num_nodes: N.

    >>> v3 = V3MoEConfig(num_experts=256, num_experts_per_token=8, num_groups=8, num_groups_per_token=4)
    >>> round(nodes_of_token(v3, 8), 2), nodes_of_token(v3, 1)
    (3.63, 1.0)
    """
    taken, per_token = config.num_groups_per_token, config.num_experts_per_token
    in_group = config.num_experts // config.num_groups
    choices = comb(config.num_groups, taken) * comb(taken * in_group, per_token)
    misses = 0
    for node in range(num_nodes):
        first, end = (place * config.num_experts // num_nodes for place in (node, node + 1))
        ways = Counter({(0, 0): 1})  # of choosing groups, by their number, and that of their experts here
        for start in range(0, config.num_experts, in_group):
            common = max(0, min(end, start + in_group) - max(first, start))
            for (chosen, held), count in list(ways.items()):
                ways[chosen + 1, held + common] += count
        misses += sum(
            count * comb(taken * in_group - held, per_token)
            for (chosen, held), count in ways.items()
            if chosen == taken
        )
    return num_nodes - misses / choices
