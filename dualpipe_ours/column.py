"""A linear layer with its backward by hand, and the same cut by columns."""

from typing import Any

import torch
from torch import Tensor

from .ring import all_reduce


def now(weight: Tensor, x: Tensor, dy: Tensor) -> Tensor | None:
    """The gradient of the weight, at once: (out, in)."""
    return dy.t() @ x


HOOKS = {"weight_grad": now}  # read at each backward


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        return dy @ weight, HOOKS["weight_grad"](weight, x, dy)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(T, in), (out, in) -> (T, out)."""
    return _Linear.apply(x, weight)


class CopyToRanks(torch.autograd.Function):
    """Hands x on; sums its gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: list[int]) -> Tensor:
        """What it gets."""
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """The sum of what the ranks' columns say."""
        dx = dy.clone()  # others may hold dy
        all_reduce(dx, ctx.ranks)
        return dx, None


def column_linear(x: Tensor, weight: Tensor, ranks: list[int]) -> Tensor:
    """This rank's outputs: (T, in), (out / N, in) -> (T, out / N)."""
    return linear(CopyToRanks.apply(x, ranks), weight)
