"""DeepSeek-V3's router: experts from the best groups, by sigmoids and a bias."""

import torch
from torch import Tensor

from .column import linear


def choose(x: Tensor, router: Tensor, bias: Tensor, k: int, num_groups: int, num_kept: int) -> tuple[Tensor, Tensor]:
    """(T, d) -> chosen (T, k) and weights (T, k); the bias chooses, and has no gradient."""
    affinity = linear(x, router).sigmoid()
    scores = (affinity + bias).detach()
    groups = scores.unflatten(-1, (num_groups, -1))
    kept = groups.topk(2, -1).values.sum(-1).topk(num_kept, -1).indices
    closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, False)
    chosen = groups.masked_fill(closed[..., None], -torch.inf).flatten(-2).topk(k, -1).indices
    weights = affinity.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True)
