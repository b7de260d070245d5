"""`Experts` and `SMoE`: a feed-forward layer of E experts, of which every token uses k.

Chapter: book/ep/smoe.  In: `x_TD`, and what a router made of it.  Out: `y_TD`, y_t = sum over j of w_tj FFN_j(x_t).
  messages   counts, dispatch, combine; backward: both again: 4 (e - 1) / e T k h bytes if experts are chosen evenly
  rows       T k arrive on average; at most e T min(k, E / e)
  memory     y_TKD stays at the source for the gradient of the weights; R (h + 2 f) on the rank of the experts
One rank is the case e = 1 of the same code.  A rank without tokens takes part in every exchange.
Elsewhere: Megatron `MoELayer`; torchtitan `MoE`; DeepSeek-V3 `MoE`.
Source: Shazeer et al. 2017 (arXiv 1701.06538), section 3.1.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dualpipe_lab.ep.all_to_all import start_combine, start_dispatch
from dualpipe_lab.ep.moe import operators
from dualpipe_lab.ep.moe.config import ExpertParallel
from dualpipe_lab.ep.moe.experts import Weights
from dualpipe_lab.ep.moe.routes import plan_routes
from dualpipe_lab.ep.router import Routing
from dualpipe_lab.tp.shard import Shard, initialize_parameters, load_full_state_dict


class Experts(nn.Module):
    """E SwiGLU networks without biases, E / e of them on this rank.

    Args:
        hidden_size, ffn_size: of one expert.
        num_experts: E, of all ranks together.
        ep: the ranks (default: the world).
        dtype: of the weights.

    Attributes:
        gate, up, down: `gate_EFD`, `up_EFD`, `down_EDF` of this rank's experts.
        shards: which of all experts they are.

    Raises:
        ValueError: the experts do not divide among the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        ep: ExpertParallel | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ep, self.num_experts = ep or ExpertParallel(), num_experts
        start, stop = self.ep.span(num_experts)
        self.gate = nn.Parameter(torch.empty(stop - start, ffn_size, hidden_size, dtype=dtype))
        self.up = nn.Parameter(torch.empty(stop - start, ffn_size, hidden_size, dtype=dtype))
        self.down = nn.Parameter(torch.empty(stop - start, hidden_size, ffn_size, dtype=dtype))
        self.shards = {name: Shard(0, start, stop, num_experts) for name in ("gate", "up", "down")}
        initialize_parameters(self)

    @classmethod
    def from_full(cls, gate: Tensor, up: Tensor, down: Tensor, ep: ExpertParallel | None = None) -> "Experts":
        """This rank's experts of all, `gate_EFD`, `up_EFD` and `down_EDF`."""
        num_experts, ffn_size, hidden_size = gate.shape
        experts = cls(hidden_size, ffn_size, num_experts, ep, gate.dtype)
        load_full_state_dict(experts, {"gate": gate, "up": up, "down": down})
        return experts

    @property
    def weights(self) -> Weights:
        """As the plain functions take them."""
        return Weights(self.gate, self.up, self.down)

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        meanwhile: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Send every token to its experts and sum what comes back.

        Args:
            x: `x_TD`, this rank's tokens; none is allowed.
            weights: `weights_TK`; they get a gradient.
            experts: `experts_TK`, k different ones per token.
            meanwhile: runs on `x` while the rows travel, in both directions, and is added: a shared expert.

        Raises:
            ValueError: an expert does not exist, or a token has chosen one twice.
        """
        routes = plan_routes(experts, self.num_experts, self.ep)
        travelling = start_dispatch(operators.permute(x, routes), routes.splits, self.ep.group)
        other = None if meanwhile is None else meanwhile(x)
        rows = operators.regroup(travelling.wait(), routes)
        rows = operators.ungroup(operators.grouped_swiglu(rows, routes.counts, self.weights), routes)
        rows = start_combine(rows, routes.splits, self.ep.group).wait()
        y = operators.weigh(operators.unpermute(rows, routes), weights)
        return y if other is None else y + other

    def extra_repr(self) -> str:
        """All experts, and those of this rank."""
        start, stop = self.shards["gate"].start, self.shards["gate"].stop
        return f"{self.num_experts} experts, here {start} to {stop - 1}, {tuple(self.gate.shape[1:])}"


class SMoE(nn.Module):
    """A router, its experts, and optionally a network that every token uses.

    Args:
        router: from `x_TD` to a `Routing`; its weight is the same on every rank.
        experts: those of this rank.
        shared: from `x_TD` to `y_TD`; it runs while the rows travel.
    """

    def __init__(
        self, router: Callable[[Tensor], Routing], experts: Experts, shared: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor) -> Tensor:
        """`y_..D` of `x_..D`; all dimensions but the last are tokens."""
        return self.with_routing(x)[0]

    def with_routing(self, x: Tensor) -> tuple[Tensor, Routing]:
        """`y_..D`, and what the router did: its logits and load are what losses of balance need."""
        tokens = x.flatten(0, -2)
        routing = self.router(tokens)
        return self.through(tokens, routing).view(x.shape), routing

    def through(self, x: Tensor, routing: Routing) -> Tensor:
        """`y_TD` of `x_TD`, routed already."""
        y: Tensor = self.experts(x, routing.weights, routing.indices, self.shared)
        return y
