"""Slots of a fixed number per expert: which tokens get one, what happens to the others, and what travels.

Chapter: book/ep/gshard.  In: the experts that each token chose.  Out: a slot per choice, or none.
  capacity      C = ceil(cf k T / E) slots per expert and rank of origin
  order         all first choices in the order of the tokens, then all second choices, and so on; the first C stay
  exchange      (e - 1) / e * E C h beta bytes per rank and direction, whatever the load: cf (e - 1) / e * T k h beta
                if C is whole; 4 of these per layer and microbatch, dispatch and combine forward and backward
  einsum        dispatch mask: 1 where token t has slot c of expert x, T E C numbers; here T k indices do the same
Elsewhere: DeepSpeed `top2gating` (mask); Tutel `fast_dispatcher` (indices); Megatron `moe_expert_capacity_factor`.
Source: Lepikhin et al. 2020 (arXiv 2006.16668), section 2.2, algorithm 1.
"""

from fractions import Fraction
from math import ceil, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.ep.router import tokens_per_expert

DROPPED = -1  # the slot of a choice that found none


def capacity(num_tokens: int, num_experts: int, num_experts_per_token: int, capacity_factor: float | Fraction) -> int:
    """Slots per expert for the tokens of one rank: the even share times the factor, rounded up.

    The factor is taken as it is written: in floats, 1.1 times 10 is more than 11.

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
    """Bytes that a rank sends per exchange of its E * C slots.

    >>> exchange_bytes(num_slots=8 * 4, hidden_size=16, element_bytes=8, ep_size=4)
    3072

    Raises:
        ValueError: the slots do not divide among the ranks.
    """
    if num_slots % ep_size:
        raise ValueError(f"{num_slots} slots do not divide among {ep_size} ranks")
    return (ep_size - 1) * num_slots // ep_size * hidden_size * element_bytes


def queue_places(indices: Tensor, num_experts: int) -> Tensor:
    """`places_TK`: how many are before each choice of `indices_TK` in its expert's queue.

    All first choices stand before any second choice, also of an earlier token.

    >>> queue_places(torch.tensor([[0, 1], [1, 0], [1, 2]]), 3)
    tensor([[0, 2],
            [0, 1],
            [1, 0]])
    """
    experts = indices.t().reshape(-1)  # choice by choice
    order = experts.argsort(stable=True)
    load = tokens_per_expert(experts, num_experts)
    begins = load.cumsum(0) - load
    places = torch.empty_like(experts)
    places[order] = torch.arange(len(experts)) - begins[experts[order]]
    return places.view(indices.shape[1], -1).t()


def find_slots(indices: Tensor, num_experts: int, num_slots_each: int) -> Tensor:
    """`slots_TK`: the slot of each choice among E * C, an expert's slots side by side; `DROPPED` where it is full."""
    places = queue_places(indices, num_experts)
    return torch.where(places < num_slots_each, indices * num_slots_each + places, DROPPED)


def fill_slots(x: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """`slots_ND` with the tokens `x_TD` in them, a copy for each kept choice of `slots_TK`; zeros where nobody is."""
    out: Tensor = FillSlots.apply(x, slots, num_slots)
    return out


def read_slots(filled: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """`y_TD`: sum over the kept choices of `weights_TK` times `filled_ND`; zeros for a token that has none."""
    out: Tensor = ReadSlots.apply(filled, slots, weights)
    return out


def _put(rows: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """The rows `rows_TKD` in their slots; no slot has two."""
    kept = slots != DROPPED
    filled = rows.new_zeros(num_slots, rows.shape[-1])
    filled[slots[kept]] = rows[kept]
    return filled


def _get(filled: Tensor, slots: Tensor) -> Tensor:
    """`rows_TKD` from their slots, zeros for those without one."""
    kept = slots != DROPPED
    rows = filled.new_zeros(*slots.shape, filled.shape[-1])
    rows[kept] = filled[slots[kept]]
    return rows


class FillSlots(torch.autograd.Function):
    """Copy to each kept slot / sum over the slots of a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        return _put(x.unsqueeze(1).expand(*slots.shape, -1), slots, num_slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _get(grad, slots).sum(1), None, None


class ReadSlots(torch.autograd.Function):
    """Weighted sum over the slots of a token / w dy to each slot, and <dy, row> to each weight."""

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
