"""One copy of a token per node: rows cross the slow network once, and go on to their experts inside of the node.

Chapter: book/ep/v3-moe.  In: `x_TD`, `weights_TK`, `experts_TK`.  Out: `y_TD`, as from `Experts`.
  out     a copy of the token, its weights and the numbers of its experts, to the rank with the same place on each of
          its experts' nodes; from there to the experts inside of the node
  home    the experts' results to that rank, which weighs and sums them; one row per node back to the token
  rows between nodes    (tokens, other nodes) pairs instead of (tokens, experts on other nodes): at most k, and no more
                        than the nodes a router allows
  between nodes, bytes  4 h + 2 k numbers per row and layer, both ways and both passes, and k whole numbers once
The weighted sum is formed on the node, in another order than at home: equal to `Experts` but for rounding.
Elsewhere: DeepEP, whose kernels forward rows between InfiniBand and NVLink; Megatron's flex dispatcher uses it.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, members
from dualpipe_lab.ep.all_to_all import agree, combine, dispatch, start_combine, start_dispatch, start_rows
from dualpipe_lab.ep.moe import operators
from dualpipe_lab.ep.moe.config import ExpertParallel
from dualpipe_lab.ep.moe.layer import Experts
from dualpipe_lab.ep.moe.routes import check_choices, plan_routes


@dataclass(frozen=True)
class Nodes:
    """The ranks of one expert-parallel group, by node: neighbouring ranks share one.

    Attributes:
        across: this rank and those with the same place on the other nodes.
        inside: the ranks of this node.
    """

    across: Group
    inside: ExpertParallel

    @classmethod
    def of(cls, num_nodes: int, ep: ExpertParallel | None = None) -> "Nodes":
        """Make both groups; every rank of `ep` (default: the world) calls this, in the same order.

        Raises:
            ValueError: the nodes do not divide the ranks.
        """
        ranks = members((ep or ExpertParallel()).group)
        if num_nodes < 1 or len(ranks) % num_nodes:
            raise ValueError(f"nodes divide the ranks, got {len(ranks)} ranks on {num_nodes} nodes")
        size, place = len(ranks) // num_nodes, ranks.index(comm.get_rank())
        first = place // size * size
        across = comm.new_group(ranks[place % size :: size], members_only=True)
        inside = comm.new_group(ranks[first : first + size], members_only=True)
        return cls(across, ExpertParallel(inside))

    @property
    def num_nodes(self) -> int:
        """Nodes of the group."""
        return comm.get_world_size(self.across)


def through_nodes(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    layer: Experts,
    nodes: Nodes,
    meanwhile: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Send every token once to each of its nodes, and sum what its experts answer.

    Args:
        x: `x_TD`, this rank's tokens; none is allowed.
        weights: `weights_TK`; they get a gradient.
        experts: `experts_TK`, k different ones per token.
        layer: its weights are used; its ranks are those of the nodes.
        nodes: the groups.
        meanwhile: runs on `x` while rows travel between nodes, and is added: a shared expert.

    Raises:
        ValueError: as `Experts.forward`, or experts that do not divide among the nodes.
    """
    check_choices(experts, layer.num_experts)
    share = layer.num_experts // nodes.num_nodes
    home = experts // share  # node of each choice
    wanted = torch.nn.functional.one_hot(home, nodes.num_nodes).amax(1)
    node, token = wanted.t().nonzero(as_tuple=True)  # a copy for each pair, node by node
    splits = agree(wanted.sum(0).tolist(), nodes.across)
    is_there = home[token] == node[:, None]
    numbers = torch.where(is_there, experts[token] % share, -1)
    travelling = start_dispatch(Spread.apply(x, token), splits, nodes.across)
    other = None if meanwhile is None else meanwhile(x)
    numbers = start_rows(numbers, splits, nodes.across).wait()
    rows = travelling.wait()
    own = dispatch(Spread.apply(weights, token) * is_there, splits, nodes.across)
    y = Collect.apply(combine(_inside(rows, own, numbers, layer, nodes, share), splits, nodes.across), token, len(x))
    return y if other is None else y + other


def _inside(rows: Tensor, weights: Tensor, numbers: Tensor, layer: Experts, nodes: Nodes, share: int) -> Tensor:
    """`y_CD` of the copies `rows_CD` that this rank got: the weighted sum over those of their experts that are here."""
    copy, choice = (numbers >= 0).nonzero(as_tuple=True)
    routes = plan_routes(numbers[copy, choice][:, None], share, nodes.inside)
    group = nodes.inside.group
    sent = start_dispatch(operators.permute(Spread.apply(rows, copy), routes), routes.splits, group)
    arrived = operators.regroup(sent.wait(), routes)
    answers = operators.ungroup(operators.grouped_swiglu(arrived, routes.counts, layer.weights), routes)
    back = operators.unpermute(start_combine(answers, routes.splits, group).wait(), routes)
    place = copy * weights.shape[1] + choice
    own = Spread.apply(weights.reshape(-1, 1), place)
    out: Tensor = Collect.apply(operators.weigh(back, own), copy, len(rows))
    return out


class Spread(torch.autograd.Function):
    """Rows by number, some several times / the sum of what a row's copies contribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.length, *grad.shape[1:]).index_add_(0, index, grad), None


class Collect(torch.autograd.Function):
    """Sums of rows by number / the gradient of its sum for each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(length, *rows.shape[1:]).index_add_(0, index, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grad.index_select(0, index), None, None
