"""A linear layer cut by rows: partial sums of every output."""

from typing import Any

import torch
from torch import Tensor

from .column import linear
from .ring import all_reduce


class SumFromRanks(torch.autograd.Function):
    """Sums x over the ranks; hands its gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: list[int]) -> Tensor:
        """The sum."""
        total = x.clone()
        all_reduce(total, ranks)
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """What it gets: every rank has the whole."""
        return dy, None


def row_linear(x: Tensor, weight: Tensor, ranks: list[int]) -> Tensor:
    """All outputs: (T, in / N), (out, in / N) -> (T, out)."""
    return SumFromRanks.apply(linear(x, weight), ranks)
