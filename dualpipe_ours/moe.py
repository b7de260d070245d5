"""A mixture of experts on the ranks of a group: rows go to their experts, and results come back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from .column import linear
from .exchange import Exchange, start_exchange

Expert = tuple[Tensor, Tensor, Tensor]  # gate (f, d), up (f, d), down (d, f): leaves


class Plan(NamedTuple):
    """Who sends whom how many rows, and in which order they lie.

    Attributes:
        sends: rows for each rank.
        receives: rows from each rank.
        order: places of the choices, by expert.
        per_token: choices of a token.
        rows: of what arrives, the places of each expert of this rank.
    """

    sends: list[int]
    receives: list[int]
    order: Tensor
    per_token: int
    rows: list[Tensor]


def plan(chosen: Tensor, num_experts: int, ranks: list[int]) -> Plan:
    """Count the rows; chosen (T, k), and expert e is on `ranks[e * N // num_experts]`."""
    num, here = len(ranks), num_experts // len(ranks)
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    arriving, works = start_exchange(counts, [here] * num, [here] * num, ranks, tag=0)
    for work in works:
        work.wait()
    sends, receives = counts.view(num, here).sum(1).tolist(), arriving.view(num, here).sum(1).tolist()
    # rows arrive by rank, and of each rank by expert: those of one expert do not lie together
    expert_of = torch.arange(here, device=chosen.device).repeat(num).repeat_interleave(arriving)
    rows = [(expert_of == expert).nonzero().flatten() for expert in range(here)]
    return Plan(sends, receives, chosen.flatten().argsort(stable=True), chosen.shape[1], rows)


def rows_of(x: Tensor, note: Plan) -> Tensor:
    """Tokens (T, d) -> the rows to send (T k, d): that of each choice's token, by expert."""
    return x[note.order // note.per_token]


def compute(rows: Tensor, note: Plan, experts: Sequence[Expert]) -> Tensor:
    """What the experts of this rank make of the rows that have arrived (R, d), in the same order."""
    parts = [
        linear(silu(linear(rows[own], gate)) * linear(rows[own], up), down)
        for own, (gate, up, down) in zip(note.rows, experts, strict=True)
    ]
    return torch.cat(parts)[torch.cat(note.rows).argsort()]


def sum_of(rows: Tensor, weights: Tensor, note: Plan) -> Tensor:
    """Results by expert (T k, d) and weights (T, k) -> the weighted sum of each token (T, d)."""
    scaled = rows * weights.flatten()[note.order][:, None]
    return scaled.new_zeros(len(weights), rows.shape[1]).index_add(0, note.order // note.per_token, scaled)


def moe(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[Expert], num_experts: int, ranks: list[int]
) -> Tensor:
    """The layer: there, compute, back; tokens (T, d) -> (T, d)."""
    note = plan(chosen, num_experts, ranks)
    there = Exchange.apply(rows_of(x, note), note.sends, note.receives, ranks)
    back = Exchange.apply(compute(there, note, experts), note.receives, note.sends, ranks)
    return sum_of(back, weights, note)
