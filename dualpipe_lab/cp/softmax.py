"""Safe softmax and its backward, each in two lines of mathematics.

Chapter: book/cp/softmax.  In: scores.  Out: weights that sum to 1; the gradient of the scores.
  forward    m = max x,  y = exp(x - m) / sum exp(x - m)       no exponent is above 0, so nothing overflows
  backward   dx = y * (dy - <y, dy>)                           needs y alone; the matrix of derivatives is never built
A row without any visible score (all -inf) has weight 0 everywhere and passes no gradient; torch gives NaN there.
Elsewhere: `torch.softmax`; its backward `aten._softmax_backward_data`.
Source: Blanchard, Higham and Higham 2021, "Accurately computing the log-sum-exp and softmax functions", section 4.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NOTHING = float("-inf")  # the score of what is not to be seen, and the largest of no scores


def accumulate_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over many numbers are kept: 16-bit numbers are added up in fp32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def reference(maximum: Tensor) -> Tensor:
    """What to subtract before an exponential: the maximum, and 0 where there is none: -inf - (-inf) would be NaN."""
    return maximum.masked_fill(maximum == NOTHING, 0)


def softmax(x: Tensor) -> Tensor:
    """The softmax over the last axis.

    >>> softmax(torch.tensor([[1e4, 1e4], [0.0, -float("inf")], [-float("inf"), -float("inf")]])).tolist()
    [[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]
    """
    wide = x.to(accumulate_in(x.dtype))
    if x.shape[-1] == 0:
        return x.clone()
    powers = torch.exp(wide - reference(wide.amax(-1, keepdim=True)))
    total = powers.sum(-1, keepdim=True)
    return (powers / total.masked_fill(total == 0, 1)).to(x.dtype)


def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """The gradient of the scores, from the weights and their gradient; both of one shape."""
    wide, dwide = (tensor.to(accumulate_in(tensor.dtype)) for tensor in (y, dy))
    return (wide * (dwide - (wide * dwide).sum(-1, keepdim=True))).to(dy.dtype)


class Softmax(torch.autograd.Function):
    """The pair as one operation: `Softmax.apply(x)` saves y and nothing else."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """Compute y, and keep it."""
        y = softmax(x)
        context.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy: Tensor) -> Tensor:
        """Compute dx from y and dy."""
        (y,) = context.saved_tensors
        return softmax_backward(y, dy)
