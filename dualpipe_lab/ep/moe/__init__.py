"""The sparse mixture of experts: k of E experts process each token, and the experts are sharded over ranks.

Chapter: book/ep/smoe.  In: `x_TD`, the router's weights and choices.  Out: `y_TD`, y_t = sum over j of w_tj FFN_j(x_t).
Legend: T tokens of this rank, K experts per token, S = T K slots, R received rows, D hidden, F inner.
`permutation` has the routes, `operators` the movements of rows, `experts` forward, I and W without autograd;
`dualpipe_lab.ep.overlap.executor` puts other work between the steps.
Elsewhere: Megatron `MoELayer`, its token dispatchers, `finalize_model_grads` and its `expert_data_parallel` buffers,
scaled by 1 / dp; torchtitan moe.py; DeepSeek-V3 `MoE`.
Source: Shazeer et al. 2017 (arXiv 1701.06538), section 3.1; Lepikhin et al. 2020 (arXiv 2006.16668), section 3.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.all_to_all import combine_async, dispatch_async
from dualpipe_lab.ep.moe import operators
from dualpipe_lab.ep.moe.experts import SwiGLUWeights
from dualpipe_lab.ep.moe.permutation import ExpertParallel, plan_routes
from dualpipe_lab.ep.router import Routing, kept_positions, leave_out, put_back
from dualpipe_lab.grad_sums import all_reduce_together_async, dense_grad
from dualpipe_lab.launch.context import device
from dualpipe_lab.tp.shard import Shard, initialize_parameters, load_full_state_dict

__all__ = ["ExpertParallel", "Experts", "MoE", "expert_parameters", "operators", "reduce_gradients"]


class Experts(nn.Module):
    """E SwiGLU experts without biases, sharded over the ep group: E / e on this rank.

    Args:
        hidden_size, ffn_size: of one expert.
        num_experts: E, of all ranks together.
        ep: the groups (default: the world holds each expert once).
        dtype: of the weights.

    Attributes:
        gate, up, down: `gate_EFD`, `up_EFD`, `down_EDF` of this rank's experts.
        shards: the range of experts that this rank holds, by parameter.

    Raises:
        ValueError: the experts do not divide among the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        *,
        ep: ExpertParallel | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(ep, ExpertParallel | None):
            raise TypeError(f"ep is an ExpertParallel, got {type(ep).__name__}; pass ep=ExpertParallel(group)")
        self.ep, self.num_experts = ep or ExpertParallel(), num_experts
        start, stop = self.ep.span(num_experts)
        self.gate = nn.Parameter(torch.empty(stop - start, ffn_size, hidden_size, dtype=dtype, device=device()))
        self.up = nn.Parameter(torch.empty(stop - start, ffn_size, hidden_size, dtype=dtype, device=device()))
        self.down = nn.Parameter(torch.empty(stop - start, hidden_size, ffn_size, dtype=dtype, device=device()))
        self.shards = {name: Shard(0, start, stop, num_experts, mesh_axis="ep") for name in ("gate", "up", "down")}
        initialize_parameters(self)

    @classmethod
    def from_full(cls, gate: Tensor, up: Tensor, down: Tensor, ep: ExpertParallel | None = None) -> "Experts":
        """Shard the full weights of all experts, `gate_EFD`, `up_EFD` and `down_EDF`, and keep this rank's part."""
        num_experts, ffn_size, hidden_size = gate.shape
        experts = cls(hidden_size, ffn_size, num_experts, ep=ep, dtype=gate.dtype)
        load_full_state_dict(experts, {"gate": gate, "up": up, "down": down})
        return experts

    @property
    def weights(self) -> SwiGLUWeights:
        """The three weights, as the plain functions take them."""
        return SwiGLUWeights(self.gate, self.up, self.down)

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Send every token to its experts and sum the weighted results: `y_TD`.

        One rank is the case e = 1 of the same code.  If experts are chosen evenly, a rank sends 4 (e - 1) / e T k h
        numbers in dispatch and combine, forward and backward.

        Args:
            x: `x_TD`, this rank's tokens; none is allowed.
            weights: `weights_TK`; they get a gradient.
            experts: `experts_TK`, k different ones per token.
            shared: a shared expert; it computes on `x` while the dispatch is under way, in forward and backward, and
                its result is added.

        Raises:
            ValueError: an expert does not exist, or a token has chosen one twice.
        """
        routes = plan_routes(experts, self.num_experts, self.ep)  # exchanges counts; a rank without tokens takes part
        dispatching = dispatch_async(operators.permute(x, routes), routes.splits, self.ep.group)
        shared_y = None if shared is None else shared(x)
        rows = operators.sort_by_expert(
            dispatching.wait(), routes
        )  # rows_RD: T k on average, at most e T min(k, E / e)
        del dispatching  # it holds the rows in the order of arrival
        # kept for the backward: R (h + 2 f) numbers here, and y_TKD on the source, for the gradient of the weights
        rows = operators.unsort_by_expert(operators.grouped_swiglu(rows, routes.counts, self.weights), routes)
        rows = combine_async(rows, routes.splits, self.ep.group).wait()
        y = operators.weighted_sum(operators.unpermute(rows, routes), weights)
        return y if shared_y is None else y + shared_y


class MoE(nn.Module):
    """A sparse mixture of experts: a router, its experts, and optionally a shared expert that every token uses.

    Args:
        router: from `x_TD` to a `Routing`; its weight is the same on every rank.
        experts: the sharded experts.
        shared: from `x_TD` to `y_TD`; it computes while the dispatch is under way.
    """

    def __init__(
        self, router: Callable[[Tensor], Routing], experts: Experts, *, shared: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor, routing: Routing | None = None, padding: Tensor | None = None) -> Tensor:
        """Return `y_..D` for `x_..D`; all dimensions but the last are positions.

        Args:
            x: `x_..D`.
            routing: of the tokens among these, if they have been routed already.
            padding: `padding_..`, True where a position is padding: it is not routed, and gets zeros.
        """
        return self._run(x, routing, padding)[0]

    def with_routing(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Return `y_..D` and the routing, whose logits and load the balance losses need; arguments as in `forward`."""
        return self._run(x, None, padding)

    def _run(self, x: Tensor, routing: Routing | None, padding: Tensor | None) -> tuple[Tensor, Routing]:
        rows = x.flatten(0, -2)
        kept = kept_positions(padding, len(rows))
        tokens = leave_out(rows, kept)
        routing = self.router(tokens) if routing is None else routing
        if len(routing.indices) != len(tokens):
            rule = f"a routing is of the tokens that are no padding, {len(tokens)} of {len(rows)} positions"
            raise ValueError(f"{rule}, got one of {len(routing.indices)}; make it by router(x, padding)")
        return put_back(self.run_experts(tokens, routing), kept, len(rows)).view(x.shape), routing

    def run_experts(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return `y_TD` for tokens that have been routed."""
        y: Tensor = self.experts(tokens, routing.weights, routing.indices, self.shared)
        return y


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are sharded over the ep group: those of all `Experts` in the model."""
    return [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]


def reduce_gradients(model: nn.Module, ep: ExpertParallel, num_tokens: int, data: Group | None = None) -> None:
    """All-reduce every gradient to that of the mean loss over all tokens; a missing gradient counts as zeros.

    Router and shared expert are summed over all dp = edp e data ranks, experts over their edp ranks.  An expert's
    gradient contains the tokens of all e ranks of its ep group before any reduction, so it is divided by the same
    number; a mean over the edp ranks would be e times too large.

    Args:
        model: after the backward of the loss summed over this rank's tokens.
        ep: the groups of its experts.
        num_tokens: tokens of all ranks together, the same number on each.
        data: all ranks with different data: edp times e of them (default: the world).

    Raises:
        ValueError: no tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"a mean needs tokens, got {num_tokens} on all ranks together; skip the step")
    sharded = {*expert_parameters(model)}
    grads = {parameter: dense_grad(parameter) for parameter in model.parameters() if parameter.requires_grad}
    all_reduce_together_async([grad for p, grad in grads.items() if p not in sharded], data).wait()
    if ep.edp_group is not None:
        all_reduce_together_async([grad for p, grad in grads.items() if p in sharded], ep.edp_group).wait()
    for grad in grads.values():
        grad /= num_tokens
