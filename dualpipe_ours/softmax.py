"""Online softmax: what is known of a block of scores, in a state that merges."""

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]  # top (h, q), total (h, q), sum (h, q, d)


def state_of(scores: Tensor, values: Tensor) -> State:
    """Scores (h, q, k), hidden ones -inf, and values (h, k, d) -> largest score, sum of exponentials, of values."""
    none = scores.new_full((*scores.shape[:-1], 1), -torch.inf)  # for a block without keys
    top = torch.cat([scores, none], -1).amax(-1)
    weights = (scores - _finite(top)[..., None]).exp()
    return top, weights.sum(-1), weights @ values


def merge(a: State, b: State) -> State:
    """The state of the keys of both: sums that were measured from a smaller top shrink."""
    top = torch.maximum(a[0], b[0])
    of_a, of_b = (a[0] - _finite(top)).exp(), (b[0] - _finite(top)).exp()
    return top, of_a * a[1] + of_b * b[1], of_a[..., None] * a[2] + of_b[..., None] * b[2]


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0)  # -inf - -inf would be NaN
