"""DeepSeek-V3's router: experts from the best groups, by sigmoids and a bias."""

import torch
from torch import Tensor

from .column import linear


def choose(x: Tensor, router: Tensor, bias: Tensor, k: int, num_groups: int, num_kept: int) -> tuple[Tensor, Tensor]:
    """(T, d) -> chosen (T, k) and weights (T, k); the bias chooses, and has no gradient."""
    scores = linear(x, router).sigmoid()
    groups = (scores + bias).detach().unflatten(-1, (num_groups, -1))  # (T, groups, experts of a group)
    kept = groups.topk(2, -1).values.sum(-1).topk(num_kept, -1).indices
    closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, False)
    # Values can be negative: only -inf is below all of them.
    chosen = groups.masked_fill(closed[..., None], -torch.inf).flatten(-2).topk(k, -1).indices
    weights = scores.gather(-1, chosen)  # without the bias
    return chosen, weights / weights.sum(-1, keepdim=True)
