"""Online softmax: a state that merges."""

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def state_of(scores: Tensor, values: Tensor) -> State:
    """(h, q, k), (h, k, d) -> the largest score, the sum of exponentials, the sum of values; hidden is -inf."""
    none = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.cat([scores, none], -1).amax(-1)
    weights = (scores - _finite(top)[..., None]).exp()
    return top, weights.sum(-1), weights @ values


def merge(a: State, b: State) -> State:
    """The state of the scores of both."""
    top = torch.maximum(a[0], b[0])
    scales = [(part[0] - _finite(top)).exp() for part in (a, b)]
    total = sum(scale * part[1] for scale, part in zip(scales, (a, b), strict=True))
    values = sum(scale[..., None] * part[2] for scale, part in zip(scales, (a, b), strict=True))
    return top, torch.as_tensor(total), torch.as_tensor(values)


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0)
