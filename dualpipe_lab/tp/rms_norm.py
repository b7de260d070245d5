"""`RMSNorm`, replicated, or with the tokens or the features of its input sharded over the ranks.

Chapter: book/tp/rmsnorm.  In: `x_..D`.  Out: y = gamma * n with n = x * scale, scale = (mean of x^2 + eps)^(-1/2).
  dgamma = sum over tokens of dy * n             dx = scale * (gamma * dy - n * mean of (gamma * dy * n))
  sharded   each rank holds             messages forward     messages backward
  none      all of x                    none                 none: dgamma is complete on every rank
  tokens    some tokens                 none                 the sum of dgamma: D numbers
  hidden    some features of all        sum of x^2: T        sum of gamma * dy * n: T; dgamma is complete for them
dgamma is summed, not averaged, and only for `tokens`: with `none` the sum would multiply it by t.
Elsewhere: torch `SequenceParallel`; Megatron marks such weights `sequence_parallel`.
Source: Zhang and Sennrich 2019 (arXiv 1910.07467); Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.
"""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.launch.context import device
from dualpipe_lab.tp.linear import at_least_float32, flat_tokens
from dualpipe_lab.tp.mappings import all_reduce_async
from dualpipe_lab.tp.shard import Shard, TensorParallel, ranks_of

Sharded: TypeAlias = Literal["none", "tokens", "hidden"]


class RMSNorm(nn.Module):
    """Root mean square normalisation with a weight.

    Args:
        hidden_size: of the full layer.
        eps: added to the mean of squares, inside of the root.
        tp: the ranks (default: the world).
        sharded: the dimension of x along which the ranks hold different shards.
        dtype: of the weight; in 16 bits the arithmetic is fp32.

    Attributes:
        shards: the shard of the weight, with sharded="hidden".
        partial: the weight and its group, if its gradient is left partial: see `sum_partial_gradients`.

    Raises:
        ValueError: an unknown value of `sharded`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        tp: TensorParallel | None = None,
        sharded: Sharded = "none",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if sharded not in ("none", "tokens", "hidden"):
            raise ValueError(f"a norm's input is sharded by none, tokens or hidden, got {sharded!r}")
        self.tp = ranks_of(tp)
        self.hidden_size, self.eps, self.sharded = hidden_size, eps, sharded
        start, stop = self.tp.span(hidden_size) if sharded == "hidden" else (0, hidden_size)
        self.weight = nn.Parameter(torch.ones(stop - start, dtype=dtype, device=device()))
        self.shards = {"weight": Shard(0, start, stop, hidden_size)} if sharded == "hidden" else {}
        self.partial = {"weight": self.tp.group} if sharded == "tokens" and self.tp.coalesce else {}

    def forward(self, x: Tensor) -> Tensor:
        """Return `y_..D` of `x_..D`; D: all features, or this rank's with sharded="hidden"."""
        out: Tensor = _RMSNormFunction.apply(x, self.weight, self.hidden_size, self.eps, self.sharded, self.tp)
        return out

    def extra_repr(self) -> str:
        """The size, and what is sharded."""
        return f"{self.hidden_size}, sharded={self.sharded!r}"


class _RMSNormFunction(torch.autograd.Function):
    """The norm; the backward needs x and one number per token."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, hidden_size: int, eps: float, sharded: Sharded, tp: TensorParallel
    ) -> Tensor:
        wide = at_least_float32(x)
        squares = wide.square().sum(-1, keepdim=True)
        if sharded == "hidden":
            squares = all_reduce_async(squares, tp.group).wait()
        scale = torch.rsqrt_(squares.div_(hidden_size).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        ctx.hidden_size, ctx.sharded, ctx.tp = hidden_size, sharded, tp
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        group, grad, normal = ctx.tp.group, at_least_float32(grad), at_least_float32(x) * scale
        weighted = grad * weight
        inner = (weighted * normal).sum(-1, keepdim=True)
        summing_inner = all_reduce_async(inner, group) if ctx.sharded == "hidden" else None
        dgamma = flat_tokens(grad * normal).sum(0) if ctx.needs_input_grad[1] else None
        is_partial = ctx.sharded == "tokens" and not ctx.tp.coalesce
        summing_dgamma = all_reduce_async(dgamma, group) if is_partial and dgamma is not None else None
        if summing_inner is not None:
            inner = summing_inner.wait()
        dx = weighted.addcmul_(normal, inner.div_(ctx.hidden_size), value=-1).mul_(scale)
        if summing_dgamma is not None:
            dgamma = summing_dgamma.wait()
        return dx.to(x.dtype), dgamma if dgamma is None else dgamma.to(weight.dtype), None, None, None, None
