"""Safe softmax and its backward, each in two lines of mathematics.

Chapter: book/cp/softmax.  In: scores.  Out: weights that sum to 1; the gradient of the scores.
  forward    m = max x,  y = exp(x - m) / sum exp(x - m)       no exponent is above 0, so nothing overflows
  backward   dx = y * (dy - <y, dy>)                           needs y alone; the matrix of derivatives is never built
A row without any visible score (all -inf) gets weights of 0 and gradients of 0; torch returns NaN for it.
Elsewhere: `torch.softmax`; its backward `aten._softmax_backward_data`.
Source: Blanchard, Higham and Higham 2021, "Accurately computing the log-sum-exp and softmax functions", section 4.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NEG_INF = float("-inf")  # the score of a masked key, and the maximum of no scores


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over many numbers of `dtype`: fp32 for 16-bit floats, else `dtype` itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def reference(maximum: Tensor) -> Tensor:
    """Return what to subtract before an exponential: the maximum, or 0 where it is -inf, since -inf - (-inf) is NaN."""
    return maximum.masked_fill(maximum == NEG_INF, 0)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the last axis; a row of -inf alone gets weights of 0.

    >>> softmax(torch.tensor([[1e4, 1e4], [0.0, -float("inf")], [-float("inf"), -float("inf")]])).tolist()
    [[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]
    """
    wide = x.to(accumulation_dtype(x.dtype))
    if x.shape[-1] == 0:
        return x.clone()
    powers = torch.exp(wide - reference(wide.amax(-1, keepdim=True)))
    total = powers.sum(-1, keepdim=True)
    return (powers / total.masked_fill(total == 0, 1)).to(x.dtype)


def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of the scores from the weights `y` and their gradient `dy`, which have one shape."""
    wide, dwide = (tensor.to(accumulation_dtype(tensor.dtype)) for tensor in (y, dy))
    return (wide * (dwide - (wide * dwide).sum(-1, keepdim=True))).to(dy.dtype)


class Softmax(torch.autograd.Function):
    """Softmax forward and backward as one autograd operation: `Softmax.apply(x)` saves y and no other tensor."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """Compute y, and save it for the backward."""
        y = softmax(x)
        context.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(context: Any, dy: Tensor) -> Tensor:
        """Compute dx from y and dy."""
        (y,) = context.saved_tensors
        return softmax_backward(y, dy)
