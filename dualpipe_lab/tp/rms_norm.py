"""`RMSNorm`, replicated, on a part of the tokens, or on a part of the features.

Chapter: book/tp/rmsnorm.  In: `x_..D`.  Out: y = gamma * n with n = x * scale, scale = (mean of x^2 + eps)^(-1/2).
  dgamma = sum over tokens of dy * n             dx = scale * (gamma * dy - n * mean of (gamma * dy * n))
  cut       each rank has               messages forward     messages backward
  none      all of x                    none                 none: dgamma is complete on every rank
  tokens    some tokens                 none                 the sum of dgamma: D numbers
  hidden    some features of all        sum of x^2: T        sum of gamma * dy * n: T; dgamma is the rank's own
The sum of dgamma is a sum, not a mean, and it belongs to `tokens` alone: with `none` it would multiply by t.
Elsewhere: torch `SequenceParallel`; Megatron marks such weights `sequence_parallel`.
Source: Zhang and Sennrich 2019 (arXiv 1910.07467); Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.
"""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dualpipe_lab.tp.async_collectives import Pending, start_sum
from dualpipe_lab.tp.config import TensorParallel
from dualpipe_lab.tp.parallel_linear import rows
from dualpipe_lab.tp.shard import Shard

Cut: TypeAlias = Literal["none", "tokens", "hidden"]


class RMSNorm(nn.Module):
    """Root mean square normalisation with a weight.

    Args:
        hidden_size: of the whole layer.
        eps: added to the mean of squares, inside of the root.
        tp: the ranks (default: the world).
        cut: what of x differs between the ranks.
        dtype: of the weight; in 16 bits the arithmetic is fp32.

    Attributes:
        shards: the part of the weight that the rank holds, with cut="hidden".
        partial: the weight, where its gradient is left partial: see `sum_partial_gradients`.

    Raises:
        ValueError: an unknown cut.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        tp: TensorParallel | None = None,
        cut: Cut = "none",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if cut not in ("none", "tokens", "hidden"):
            raise ValueError(f"a norm's input is cut by none, tokens or hidden, got {cut!r}")
        self.tp = tp or TensorParallel()
        self.hidden_size, self.eps, self.cut = hidden_size, eps, cut
        start, stop = self.tp.span(hidden_size) if cut == "hidden" else (0, hidden_size)
        self.weight = nn.Parameter(torch.ones(stop - start, dtype=dtype))
        self.shards = {"weight": Shard(0, start, stop, hidden_size)} if cut == "hidden" else {}
        self.partial = {"weight": self.tp.group} if cut == "tokens" and self.tp.coalesce else {}

    def forward(self, x: Tensor) -> Tensor:
        """`y_..D` of `x_..D`; D: features, all or with cut="hidden" the rank's."""
        out: Tensor = RmsNorm.apply(x, self.weight, self.hidden_size, self.eps, self.cut, self.tp)
        return out

    def extra_repr(self) -> str:
        """Size and cut."""
        return f"{self.hidden_size}, cut={self.cut!r}"


class RmsNorm(torch.autograd.Function):
    """The norm; it keeps x and one number per token."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, hidden_size: int, eps: float, cut: Cut, tp: TensorParallel
    ) -> Tensor:
        wide = _wide(x)
        squares = wide.square().sum(-1, keepdim=True)
        if cut == "hidden":
            squares = start_sum(squares, tp.group).wait()
        scale = torch.rsqrt_(squares.div_(hidden_size).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        ctx.hidden_size, ctx.cut, ctx.tp = hidden_size, cut, tp
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        tp, grad, normal = ctx.tp, _wide(grad), _wide(x) * scale
        weighted = grad * weight
        inner = (weighted * normal).sum(-1, keepdim=True)
        crossing = start_sum(inner, tp.group) if ctx.cut == "hidden" else Pending(None, inner)
        weight_grad = rows(grad * normal).sum(0)
        is_partial = ctx.cut == "tokens" and not tp.coalesce
        summing = start_sum(weight_grad, tp.group) if is_partial else Pending(None, weight_grad)
        dx = weighted.addcmul_(normal, crossing.wait().div_(ctx.hidden_size), value=-1).mul_(scale)
        return dx.to(x.dtype), summing.wait().to(weight.dtype), None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
