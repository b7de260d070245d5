"""`GShardMoE`: experts with a fixed number of slots, so that every exchange has the same shape on every rank.

Chapter: book/ep/gshard.  In: this rank's tokens `x_TD`.  Out: `y_TD`, the balance loss, the number of dropped choices.
A choice without a slot adds nothing; a token that loses all its choices gets y = 0 and passes by the residual alone.
An expert has C slots for each source rank, so tokens of different ranks do not compete, and the same slots on any
number of ranks give the same result.  The rows of a rank's experts are E C h numbers, whatever the load.
Gradients: an expert's contains the tokens of all ep ranks.  Sum it over the ranks that replicate the expert, sum the
router's over all ranks, and divide both by the same number of tokens, never by the number of replicas.
Elsewhere: DeepSpeed `MOELayer` and `top2gating`, whose mask has T E C numbers where T k indices do the same here;
fairseq's; Tutel `fast_dispatcher` (indices); Megatron `moe_expert_capacity_factor`; k = 1 is the Switch layer.
Source: Lepikhin et al. 2020 (arXiv 2006.16668), section 2.2, algorithm 1; Fedus et al. 2022 (arXiv 2101.03961), 2.2.
"""

from fractions import Fraction
from math import ceil, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.all_to_all import Splits, combine, dispatch
from dualpipe_lab.ep.moe import ExpertParallel
from dualpipe_lab.ep.router import Routing, TopKRouter, kept_positions, leave_out, put_back, tokens_per_expert
from dualpipe_lab.ep.router_losses import balance_loss, sum_over_ranks
from dualpipe_lab.launch.context import device
from dualpipe_lab.tp.shard import Shard, initialize_parameters

DROPPED = -1  # the slot of a choice that got none


class GShardOutput(NamedTuple):
    """The result of a layer."""

    y: Tensor  # y_TD, without the residual
    balance: Tensor  # the balance loss of first choices, without a coefficient; with `global_balance` this rank's share
    num_dropped: int  # choices of this rank that got no slot
    routing: Routing  # before choices are dropped, without padding


class GShardMoE(nn.Module):
    """A mixture of experts with a capacity: a router, and E / e experts on this rank, `first` [E, h, f], `second`.

    Args:
        hidden_size, ffn_size: of a token, and of an expert's inner layer.
        num_experts: E, of all ranks together.
        num_tokens: of a rank and microbatch, at most; it sets the capacity, so that shapes do not depend on the load.
        num_experts_per_token: k; 1 is Switch, whose weights are not normalised.
        capacity_factor: slots divided by those that an even load needs.
        global_balance: the balance loss of all ranks' tokens, which costs an all-reduce of E + 1 integers.
        group: the ep ranks (default: the world).
        dtype: of all weights.

    Raises:
        ValueError: experts that do not divide among the ranks; and as `TopKRouter` and `capacity`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        num_tokens: int,
        num_experts_per_token: int = 2,
        capacity_factor: float | Fraction = 1,
        *,
        global_balance: bool = False,
        group: Group | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        k = num_experts_per_token
        self.num_experts, self.num_tokens, self.global_balance = num_experts, num_tokens, global_balance
        ep = ExpertParallel(group)
        start, stop = ep.span(num_experts)
        self.group, self.ep_size = group, ep.size
        self.capacity = capacity(num_tokens, num_experts, k, capacity_factor)
        self.router = TopKRouter(hidden_size, num_experts, k, normalise=k > 1, dtype=dtype)
        self.first = nn.Parameter(torch.empty(stop - start, hidden_size, ffn_size, dtype=dtype, device=device()))
        self.second = nn.Parameter(torch.empty(stop - start, ffn_size, hidden_size, dtype=dtype, device=device()))
        shard = Shard(0, start, stop, num_experts, mesh_axis="ep")
        self.shards = {"first": shard, "second": shard}
        initialize_parameters(self)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> GShardOutput:
        """Send `x_TD` through its experts; all ranks call this, also one without tokens.

        `padding_T`: True where a position is padding: it takes no slot, counts in no balance loss, and gets zeros.

        Raises:
            ValueError: more tokens than `num_tokens`, logits that are no numbers, or a mask of another size.
        """
        num_positions, kept = len(x), kept_positions(padding, len(x))
        x = leave_out(x, kept)
        if len(x) > self.num_tokens:
            raise ValueError(
                f"this layer has slots for {self.num_tokens} tokens per rank, got {len(x)}; build it with more"
            )
        routing = self.router(x)
        slots = find_slots(routing.indices, self.num_experts, self.capacity)
        filled = fill_slots(x, slots, self.num_experts * self.capacity)
        y = read_slots(self._dispatch_and_combine(filled), slots, routing.weights.to(x.dtype))
        y = put_back(y, kept, num_positions)
        return GShardOutput(y, self._balance(routing), int((slots == DROPPED).sum()), routing)

    def _dispatch_and_combine(self, filled: Tensor) -> Tensor:
        """Send the filled slots `slots_ND` to their experts and return the results in the same slots."""
        share = len(filled) // self.ep_size
        splits = Splits((share,) * self.ep_size, (share,) * self.ep_size)  # static: no counts are exchanged
        rows = dispatch(filled, splits, self.group)  # by source rank, then by expert
        by_source = self.ep_size, -1, self.capacity, filled.shape[-1]
        by_expert = rows.view(by_source).transpose(0, 1).flatten(1, 2)
        made: Tensor = BatchedMLP.apply(by_expert, self.first, self.second)
        back = made.unflatten(1, (self.ep_size, self.capacity)).transpose(0, 1)
        return combine(back.reshape(filled.shape), splits, self.group)

    def _balance(self, routing: Routing) -> Tensor:
        load, num_tokens = tokens_per_expert(routing.indices[:, :1], self.num_experts), len(routing.indices)
        if self.global_balance:
            load, num_tokens = sum_over_ranks(load, num_tokens, self.group)
        return balance_loss(routing.logits, load, num_tokens)


class BatchedMLP(torch.autograd.Function):
    """Compute y = relu(x W_1) W_2 for each expert's rows: `x_LRD`, `first_LDF`, `second_LFD` -> `y_LRD`."""

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


def capacity(num_tokens: int, num_experts: int, num_experts_per_token: int, capacity_factor: float | Fraction) -> int:
    """Return the number of slots per expert for the tokens of one rank: C = ceil(cf k T / E).

    The factor cf is the decimal number as written: in floats, 1.1 times 10 is more than 11.

    Raises:
        ValueError: no tokens, or a factor that is not above 0.

    >>> [capacity(16, 8, 2, cf) for cf in (0.5, 1, 1.25, 1.3)], capacity(10, 1, 1, 1.1)
    ([2, 4, 5, 6], 11)
    """
    factor = Fraction(str(capacity_factor)) if isfinite(capacity_factor) else Fraction(0)
    if num_tokens < 1 or factor <= 0:
        raise ValueError(f"capacity needs tokens and a finite factor above 0, got {num_tokens} and {capacity_factor}")
    return ceil(factor * num_experts_per_token * num_tokens / num_experts)


def exchange_bytes(num_slots: int, hidden_size: int, element_bytes: int, ep_size: int) -> int:
    """Return the bytes that a rank sends per exchange of its E * C slots, whatever the load: (e - 1) / e E C h beta.

    There are 4 exchanges per layer and microbatch: dispatch and combine, forward and backward.  An x that needs no
    gradient, the same on all ranks, saves the last of them.

    >>> exchange_bytes(num_slots=8 * 4, hidden_size=16, element_bytes=8, ep_size=4)
    3072

    Raises:
        ValueError: the slots do not divide among the ranks.
    """
    if num_slots % ep_size:
        raise ValueError(f"{num_slots} slots do not divide among {ep_size} ranks")
    return (ep_size - 1) * num_slots // ep_size * hidden_size * element_bytes


def queue_positions(indices: Tensor, num_experts: int) -> Tensor:
    """Return the position of each choice of `indices_TK` in its expert's queue, from 0: `positions_TK`.

    All first choices come before any second choice, also one of an earlier token.

    >>> queue_positions(torch.tensor([[0, 1], [1, 0], [1, 2]]), 3)
    tensor([[0, 2],
            [0, 1],
            [1, 0]])
    """
    experts = indices.t().reshape(-1)  # choice by choice
    order = experts.argsort(stable=True)
    load = tokens_per_expert(experts, num_experts)
    begins = load.cumsum(0) - load
    positions = torch.empty_like(experts)
    positions[order] = torch.arange(len(experts), device=experts.device) - begins[experts[order]]
    return positions.view(indices.shape[1], -1).t()


def find_slots(indices: Tensor, num_experts: int, num_slots_each: int) -> Tensor:
    """Return the slot of each choice among E * C, `slots_TK`; `DROPPED` where the expert has no slot left."""
    positions = queue_positions(indices, num_experts)
    return torch.where(positions < num_slots_each, indices * num_slots_each + positions, DROPPED)


def fill_slots(x: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Copy the tokens `x_TD` to the slots of their choices, `slots_TK`: `slots_ND`, with zeros in empty slots."""
    out: Tensor = _FillSlots.apply(x, slots, num_slots)
    return out


def read_slots(filled: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Sum `weights_TK` times `filled_ND` over the choices with a slot: `y_TD`, zeros for a token without any."""
    out: Tensor = _ReadSlots.apply(filled, slots, weights)
    return out


def _put(rows: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    kept = slots != DROPPED
    filled = rows.new_zeros(num_slots, rows.shape[-1])
    filled[slots[kept]] = rows[kept]
    return filled


def _get(filled: Tensor, slots: Tensor) -> Tensor:
    kept = slots != DROPPED
    rows = filled.new_zeros(*slots.shape, filled.shape[-1])
    rows[kept] = filled[slots[kept]]
    return rows


class _FillSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        return _put(x.unsqueeze(1).expand(*slots.shape, -1), slots, num_slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _get(grad, slots).sum(1), None, None


class _ReadSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, filled: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        rows = _get(filled, slots)
        ctx.save_for_backward(rows, slots, weights)
        ctx.num_slots = len(filled)
        return (weights.unsqueeze(-1) * rows).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, slots, weights = ctx.saved_tensors
        grad = grad.unsqueeze(1)
        return _put(weights.unsqueeze(-1) * grad, slots, ctx.num_slots), None, (rows * grad).sum(-1)
