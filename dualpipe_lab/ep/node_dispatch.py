"""Hierarchical dispatch: one copy of a token per node over the slow network, then to its experts within the node.

Chapter: book/ep/v3-moe.  In: `x_TD`, `weights_TK`, `experts_TK`.  Out: `y_TD`, as from `Experts`.
The rows between nodes are (tokens, other nodes) pairs instead of (tokens, experts on other nodes): at most k, and no
more than the nodes that a router allows.  A row has 4 h + 2 k numbers between nodes per layer, both ways and both
passes, and k whole numbers once.
Elsewhere: DeepEP, whose kernels forward rows between InfiniBand and NVLink; Megatron's flex dispatcher uses it.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, group_of, members
from dualpipe_lab.ep.all_to_all import (
    all_to_all_rows_async,
    combine,
    combine_async,
    dispatch,
    dispatch_async,
    exchange_splits,
)
from dualpipe_lab.ep.moe import ExpertParallel, Experts, operators
from dualpipe_lab.ep.moe.permutation import check_choices, plan_routes


@dataclass(frozen=True)
class NodeGroups:
    """The process groups of hierarchical dispatch: the ep group is split into nodes of neighbouring ranks.

    Attributes:
        inter_node: this rank and those with the same position on the other nodes.
        intra_node: the ranks of this node.
    """

    inter_node: Group
    intra_node: ExpertParallel

    @classmethod
    def of(cls, num_nodes: int, ep: ExpertParallel | None = None) -> "NodeGroups":
        """Create both groups; every rank of `ep` (default: the world) calls this, in the same order.

        Raises:
            ValueError: the nodes do not divide the ranks.
        """
        ranks = members((ep or ExpertParallel()).group)
        if num_nodes < 1 or len(ranks) % num_nodes:
            raise ValueError(f"nodes divide the ranks, got {len(ranks)} ranks on {num_nodes} nodes")
        size, position = len(ranks) // num_nodes, ranks.index(comm.get_rank())
        first = position // size * size
        return cls(group_of(ranks[position % size :: size]), ExpertParallel(group_of(ranks[first : first + size])))

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the ep group."""
        return comm.get_world_size(self.inter_node)


def hierarchical_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    layer: Experts,
    nodes: NodeGroups,
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Send one copy of every token to each node of its experts, and sum the weighted results: `y_TD`.

    The copy goes to the rank with the same position on that node, which forwards it to the experts there and forms the
    weighted sum of their results: in another order than on the source, so equal to `Experts` but for rounding.

    Args:
        x: as for `Experts`.
        weights: as for `Experts`.
        experts: as for `Experts`.
        layer: the sharded experts, over the ranks of all nodes.
        nodes: the groups by node.
        shared: as for `Experts`; it computes while the inter-node dispatch is under way.

    Raises:
        ValueError: as `Experts.forward`, or experts that do not divide among the nodes.
    """
    check_choices(experts, layer.num_experts)
    share = layer.num_experts // nodes.num_nodes
    node_of_choice = experts // share
    wanted = torch.nn.functional.one_hot(node_of_choice, nodes.num_nodes).amax(1)
    node, token = wanted.t().nonzero(as_tuple=True)  # a copy for each pair, node by node
    splits = exchange_splits(wanted.sum(0).tolist(), nodes.inter_node)
    is_there = node_of_choice[token] == node[:, None]
    numbers = torch.where(is_there, experts[token] % share, -1)
    dispatching = dispatch_async(x.index_select(0, token), splits, nodes.inter_node)
    shared_y = None if shared is None else shared(x)
    numbers = all_to_all_rows_async(numbers, splits, nodes.inter_node).wait()
    rows = dispatching.wait()
    row_weights = dispatch(weights.index_select(0, token) * is_there, splits, nodes.inter_node)
    sums = _experts_of_node(rows, row_weights, numbers, layer, nodes, share)
    y = _sum_by_index(combine(sums, splits, nodes.inter_node), token, len(x))
    return y if shared_y is None else y + shared_y


def _experts_of_node(
    rows: Tensor, weights: Tensor, numbers: Tensor, layer: Experts, nodes: NodeGroups, share: int
) -> Tensor:
    """Pass the received copies `rows_CD` through this node's experts: the weighted sum over those, `y_CD`."""
    copy, choice = (numbers >= 0).nonzero(as_tuple=True)
    routes = plan_routes(numbers[copy, choice][:, None], share, nodes.intra_node)
    group = nodes.intra_node.group
    dispatching = dispatch_async(operators.permute(rows.index_select(0, copy), routes), routes.splits, group)
    received = operators.sort_by_expert(dispatching.wait(), routes)
    del dispatching  # it holds the rows in the order of arrival
    results = operators.unsort_by_expert(operators.grouped_swiglu(received, routes.counts, layer.weights), routes)
    results = operators.unpermute(combine_async(results, routes.splits, group).wait(), routes)
    choice_weights = weights.reshape(-1, 1).index_select(0, copy * weights.shape[1] + choice)
    return _sum_by_index(operators.weighted_sum(results, choice_weights), copy, len(rows))


def _sum_by_index(rows: Tensor, index: Tensor, length: int) -> Tensor:
    return rows.new_zeros(length, *rows.shape[1:]).index_add(0, index, rows)
