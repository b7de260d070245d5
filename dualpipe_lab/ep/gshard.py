"""`GShardMoE`: experts with a fixed number of slots, so that every exchange has the same shape on every rank.

Chapter: book/ep/gshard.  In: this rank's tokens `x_TD`.  Out: `y_TD`, the balance loss, what was dropped.
  forward    route; fill E * C slots; even all-to-all; the experts of this rank on e * C rows each; all-to-all; read
  bytes      4 (e - 1) / e * E C h beta per rank and microbatch, half of them backward, known before the step; an x that
             needs no gradient, the same on all ranks, spares the last of the four
  memory     the rows of a rank's experts: E C h, whatever the load; what does not fit is dropped
A choice that finds no slot adds nothing; a token that loses all its choices gets y = 0, and lives on by its residual.
Weights are normalised before anything is dropped.  The same slots on any number of ranks mean the same result: an
expert has C slots for each rank of origin, and nobody's tokens compete with another rank's.
Gradients: an expert's contains the tokens of all ep ranks.  Sum it over the ranks that hold the same expert, the
router's over all ranks, and divide both by the same number of tokens, never by the number of replicas.
Elsewhere: DeepSpeed `MOELayer` and `top2gating`, fairseq's, Tutel; k = 1 is the Switch layer.
Source: Lepikhin et al. 2020 (arXiv 2006.16668), section 2.2; Fedus et al. 2022 (arXiv 2101.03961), section 2.2.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.all_to_all import Splits, combine, dispatch
from dualpipe_lab.ep.capacity import DROPPED, capacity, fill_slots, find_slots, read_slots
from dualpipe_lab.ep.moe.config import ExpertParallel
from dualpipe_lab.ep.router import Routing, TopKRouter, tokens_per_expert
from dualpipe_lab.ep.router_losses import balance_loss, sum_over_ranks
from dualpipe_lab.tp.shard import Shard, initialize_parameters, load_full_state_dict


class GShardOutput(NamedTuple):
    """What a layer returns.

    Attributes:
        y: `y_TD`, without the residual.
        balance: the balance loss of first choices, without a coefficient: of this rank's tokens, or this rank's share
            of that of all ranks.
        num_dropped: choices of this rank that found no slot.
        routing: experts, weights and load before dropping.
    """

    y: Tensor
    balance: Tensor
    num_dropped: int
    routing: Routing


class GShardMoE(nn.Module):
    """A router, and this rank's E / e of the experts.

    Args:
        hidden_size, ffn_size: of a token, and of an expert's inner layer.
        num_experts: E, of all ranks together.
        num_tokens: of a rank and microbatch, at most; it sets the capacity, so that shapes depend on nothing else.
        num_experts_per_token: k; 1 is Switch, whose weights are not normalised.
        capacity_factor: slots over what an even load needs.
        global_balance: the balance loss of all ranks' tokens, for one more all-reduce of E + 1 integers.
        group: the ep ranks (default: the world).
        dtype: of all weights.

    Raises:
        ValueError: experts that do not divide among the ranks, and what `TopKRouter` and `capacity` refuse.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        num_tokens: int,
        num_experts_per_token: int = 2,
        capacity_factor: float | Fraction = 1,
        global_balance: bool = False,
        group: Group | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        k = num_experts_per_token
        self.num_experts, self.num_tokens, self.group, self.global_balance = (
            num_experts, num_tokens, group, global_balance,
        )  # fmt: skip
        ep = ExpertParallel(group)
        start, stop = ep.span(num_experts)
        self.ep_size = ep.size
        self.capacity = capacity(num_tokens, num_experts, k, capacity_factor)
        self.router = TopKRouter(hidden_size, num_experts, k, normalise=k > 1, dtype=dtype)
        self.first = nn.Parameter(torch.empty(stop - start, hidden_size, ffn_size, dtype=dtype))
        self.second = nn.Parameter(torch.empty(stop - start, ffn_size, hidden_size, dtype=dtype))
        mine = Shard(0, start, stop, num_experts)
        self.shards = {"first": mine, "second": mine}
        initialize_parameters(self)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a whole state: `router.weight` [E, h], `first` [E, h, f], `second` [E, f, h]."""
        load_full_state_dict(self, state)

    def forward(self, x: Tensor) -> GShardOutput:
        """Pass `x_TD` through its experts; all ranks call this, also one without tokens.

        Raises:
            ValueError: more tokens than `num_tokens`, or logits that are no numbers.
        """
        if len(x) > self.num_tokens:
            raise ValueError(
                f"this layer has slots for {self.num_tokens} tokens per rank, got {len(x)}; build it with more"
            )
        routing = self.router(x)
        slots = find_slots(routing.indices, self.num_experts, self.capacity)
        filled = fill_slots(x, slots, self.num_experts * self.capacity)
        y = read_slots(self._through_experts(filled), slots, routing.weights.to(x.dtype))
        return GShardOutput(y, self._balance(routing), int((slots == DROPPED).sum()), routing)

    def _through_experts(self, filled: Tensor) -> Tensor:
        """`slots_ND` of this rank's tokens -> the same slots, with what the experts made of them."""
        own = len(filled) // self.ep_size
        splits = Splits((own,) * self.ep_size, (own,) * self.ep_size)  # static: no counts are exchanged
        rows = dispatch(filled, splits, self.group)  # by origin, then by expert
        by_origin = self.ep_size, -1, self.capacity, filled.shape[-1]
        by_expert = rows.view(by_origin).transpose(0, 1).flatten(1, 2)
        made: Tensor = Experts.apply(by_expert, self.first, self.second)
        back = made.unflatten(1, (self.ep_size, self.capacity)).transpose(0, 1)
        return combine(back.reshape(filled.shape), splits, self.group)

    def _balance(self, routing: Routing) -> Tensor:
        load, num_tokens = tokens_per_expert(routing.indices[:, :1], self.num_experts), len(routing.indices)
        if self.global_balance:
            load, num_tokens = sum_over_ranks(load, num_tokens, self.group)
        return balance_loss(routing.logits, load, num_tokens)

    def extra_repr(self) -> str:
        """Experts here, and slots."""
        slots = f"{self.capacity} slots each for each of {self.ep_size} ranks"
        return f"{len(self.first)} of {self.num_experts} experts, {slots}"


class Experts(torch.autograd.Function):
    """y = relu(x W_1) W_2 for each expert's rows: `x_LRD`, `first_LDF`, `second_LFD` -> `y_LRD`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        inner = torch.bmm(x, first).relu_()
        ctx.save_for_backward(x, inner, first, second)
        return torch.bmm(inner, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, inner, first, second = ctx.saved_tensors
        d_inner = torch.bmm(grad, second.transpose(1, 2)) * (inner > 0)
        return (
            torch.bmm(d_inner, first.transpose(1, 2)),
            torch.bmm(x.transpose(1, 2), d_inner),
            torch.bmm(inner.transpose(1, 2), grad),
        )
