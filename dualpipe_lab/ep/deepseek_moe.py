"""DeepSeek-V3's MoE layer: a router with biases and expert groups, and a shared expert that overlaps the dispatch.

Chapter: book/ep/v3-moe.  In: `x_..D`.  Out: `y_..D`, y = shared(x) + sum over the chosen i of w_i FFN_i(x).
Experts are selected by s_i + b_i, s_i = sigmoid(x W_r^T)_i.  Weights are w_i = scale s_i / sum over the chosen of s,
without the bias; their gradient is that of `router`.
Qwen3-MoE has softmax scores, no bias and no groups; its weights may keep their sum below 1.
Elsewhere: DeepSeek-V3 `Gate` and `MoE`; Megatron `moe_router_enable_expert_bias`; torchtitan `TokenChoiceTopKRouter`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2; Wang et al. 2024 (arXiv 2408.15664) for the bias.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, group_of, members
from dualpipe_lab.ep.expert_rules import check_groups
from dualpipe_lab.ep.moe import ExpertParallel, Experts, MoE
from dualpipe_lab.ep.node_dispatch import NodeGroups, hierarchical_experts
from dualpipe_lab.ep.router import Routing, Scoring, TopKRouter, top_experts
from dualpipe_lab.grad_sums import all_reduce_together_async
from dualpipe_lab.launch.context import device
from dualpipe_lab.pp.program import Program


class DeepSeekRouter(TopKRouter):
    """A router that selects by score plus bias within few groups, and counts loads; by default as DeepSeek-V3's.

    Args:
        hidden_size, num_experts, num_experts_per_token, dtype: as in `TopKRouter`.
        num_groups: groups of neighbouring experts, such as those of one node.
        num_groups_per_token: the largest number of groups that the experts of a token are in.
        scale: of the weights.
        scoring, normalise: as in `TopKRouter`.
        has_bias: whether a bias takes part in the selection.

    Attributes:
        bias: `bias_E`, added for the selection alone; a buffer, so no optimizer updates it.  None without one.
        load: `load_E`, int64, tokens since the last `update_biases`, without padding, counted in the backward.

    Raises:
        ValueError: groups that do not divide the experts, or hold fewer than k experts per token.
    """

    bias: Tensor | None
    load: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        num_groups: int = 1,
        num_groups_per_token: int = 1,
        *,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
        scoring: Scoring = "sigmoid",
        normalise: bool = True,
        has_bias: bool = True,
    ) -> None:
        check_groups(num_experts, num_experts_per_token, num_groups, num_groups_per_token)
        super().__init__(
            hidden_size, num_experts, num_experts_per_token,
            scoring=scoring, normalise=normalise, scale=scale, dtype=dtype,
        )  # fmt: skip
        self.num_groups, self.num_groups_per_token = num_groups, num_groups_per_token
        bias = torch.zeros(num_experts, dtype=self.weight.dtype, device=device()) if has_bias else None
        self.register_buffer("bias", bias)
        self.register_buffer("load", torch.zeros(num_experts, dtype=torch.int64, device=device()), persistent=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Routing:
        """Route the tokens `x_TD`, and count those that are no padding; arguments as for `TopKRouter`."""
        routing = super().forward(x, padding)
        return routing._replace(weights=CountLoad.apply(routing.weights, routing.load, self.load))

    def choose(self, logits: Tensor) -> Tensor:
        """Return `indices_TK` for `logits_TE`, best biased score first."""
        if self.bias is None and self.num_groups == 1:
            return super().choose(logits)
        selection = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
        selection = selection if self.bias is None else selection + self.bias
        return group_limited_topk(selection, self.num_experts_per_token, self.num_groups, self.num_groups_per_token)


class DeepSeekMoE(MoE):
    """DeepSeek-V3's MoE: routed experts, sharded over the ep group, and a shared expert that overlaps the dispatch.

    Args:
        router: of the layer; its weight is the same on every rank.
        hidden_size, ffn_size: of one routed expert.
        ep: the groups (default: the world holds each expert once).
        shared: from `x_TD` to `y_TD`, such as a `SwiGLU`.
        dtype: of the experts' weights.
        nodes: groups by node, to send one copy of a token to each node and forward it there (default: one copy per
            expert).
    """

    router: DeepSeekRouter

    def __init__(
        self,
        router: DeepSeekRouter,
        hidden_size: int,
        ffn_size: int,
        *,
        ep: ExpertParallel | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype | None = None,
        nodes: NodeGroups | None = None,
    ) -> None:
        super().__init__(router, Experts(hidden_size, ffn_size, router.num_experts, ep=ep, dtype=dtype), shared=shared)
        self.nodes = nodes

    def run_experts(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return `y_TD` for routed tokens, hierarchically if groups by node are given."""
        if self.nodes is None:
            return super().run_experts(tokens, routing)
        weights, experts = routing.weights, routing.indices
        return hierarchical_experts(tokens, weights, experts, self.experts, self.nodes, self.shared)


def group_limited_topk(
    selection: Tensor, num_experts_per_token: int, num_groups: int = 1, num_groups_per_token: int = 1
) -> Tensor:
    """Return `indices_TK` of the largest of `selection_TE` within the best groups; of equal ones the lower number.

    A group's score is the sum of its two largest members, or its only one.

    Raises:
        ValueError: groups that cannot work, or a score that is not finite.

    >>> group_limited_topk(torch.tensor([[0.9, 0.1, 0.6, 0.5]]), 2, num_groups=2)
    tensor([[2, 3]])
    """
    check_groups(selection.shape[-1], num_experts_per_token, num_groups, num_groups_per_token)
    if not selection.isfinite().all():
        token = int((~selection.isfinite()).any(-1).nonzero()[0, 0])
        raise ValueError(f"scores are finite, got {selection[token].tolist()} for token {token}")
    if num_groups_per_token < num_groups:
        grouped = selection.unflatten(-1, (num_groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        kept = top_experts(best, num_groups_per_token)
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
        # -inf, because 0 would beat a negative score
        selection = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return top_experts(selection, num_experts_per_token)


@torch.no_grad()
def update_biases(
    model: nn.Module | Mapping[int, nn.Module],
    speed: float,
    data: Group | None = None,
    program: Program | None = None,
    pp: Group | None = None,
) -> list[Tensor]:
    """Update every router's bias after the last backward of an optimizer step, and reset the load counters.

    Args:
        model: with any number of `DeepSeekRouter`, the same on all ranks of `data`; or this rank's stages by number.
        speed: gamma, the change of an expert's bias per step; a router without biases has its load returned alone.
        data: all ranks with different data and the same layers (default: the world); one message for all layers.
        program: of the pipeline.  Copies of a stage (DualPipe) count the microbatches of one direction each: their
            loads are added too, in one message of the ranks with a copy.  All ranks of `pp` call this.
        pp: the ranks of the program (default: the world).

    Returns:
        The `load_E` of all ranks, for each router; with stages, in the order of their numbers.

    Raises:
        ValueError: a bias of 16 bits, which rounds steps of this size away; stages that are not those of the program.
    """
    if program is not None:
        _check_stages(model, program, pp)
    stages = model if isinstance(model, Mapping) else {0: model}
    routers = {stage: _routers(stages[stage]) for stage in sorted(stages)}
    each = [router for found in routers.values() for router in found]
    if not each:
        return []
    biases = [router.bias for router in each]
    if narrow := [bias.dtype for bias in biases if bias is not None and bias.dtype.itemsize < 4]:
        raise ValueError(f"a bias has 32 bits or more, got {narrow[0]}: near 1 its steps are longer than {speed}")
    total = torch.cat([router.load for router in each])
    comm.all_reduce(total, group=data)
    if program is not None:
        sizes = [sum(router.num_experts for router in found) for found in routers.values()]
        _add_copies(dict(zip(routers, total.split(sizes), strict=True)), program, pp)
    loads = list(total.split([router.num_experts for router in each]))
    for router, bias, load in zip(each, biases, loads, strict=True):
        if bias is not None:
            bias += bias_step(load, speed).to(bias.dtype)
        router.load.zero_()
    return loads


def _routers(module: nn.Module) -> list[DeepSeekRouter]:
    return [child for child in module.modules() if isinstance(child, DeepSeekRouter)]


def _check_stages(model: nn.Module | Mapping[int, nn.Module], program: Program, pp: Group | None) -> None:
    rank = comm.get_rank(pp)
    placed = sorted(stage for stage, holders in program.holders.items() if rank in holders)
    if not isinstance(model, Mapping) or sorted(model) != placed:
        given = f"stages {sorted(model)}" if isinstance(model, Mapping) else f"a {type(model).__name__}"
        raise ValueError(
            f"{program.name!r} places stages {placed} on rank {rank}, got {given}; give {{stage: module}} of all these"
        )


def _add_copies(loads: dict[int, Tensor], program: Program, pp: Group | None) -> None:
    """Add the loads that other ranks of the pipeline have counted in their copies of these stages, in place."""
    ranks, shared = members(pp), dict[tuple[int, ...], list[Tensor]]()
    for stage, load in loads.items():
        if len(program.holders[stage]) > 1 and len(load):
            shared.setdefault(program.holders[stage], []).append(load)
    for holders, those in sorted(shared.items(), key=lambda found: found[0]):
        all_reduce_together_async(those, group_of([ranks[rank] for rank in holders])).wait()


def bias_step(load: Tensor, speed: float) -> Tensor:
    """Return the change of `bias_E`: up by `speed` for an expert below the mean load, down for one above.

    >>> bias_step(torch.tensor([4, 0, 2, 2]), 0.5).tolist()
    [-0.5, 0.5, 0.0, 0.0]
    """
    return speed * torch.sign(load.sum() - load * len(load)).to(torch.float64)  # whole numbers: the mean is exact


class CountLoad(torch.autograd.Function):
    """Forward: the weights unchanged.  Backward: their gradient unchanged; the load is added to the counter.

    The backward runs once per microbatch, also where the forward runs twice (recompute), and not in evaluation.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, load: Tensor, counter: Tensor) -> Tensor:
        ctx.load, ctx.counter = load, counter
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.counter.add_(ctx.load)
        return grad, None, None
