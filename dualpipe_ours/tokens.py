"""Sequence parallelism: between the layers each rank has its own tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from .column import linear
from .ring import all_gather, reduce_scatter


class GatherTokens(torch.autograd.Function):
    """The tokens of all ranks; all ranks use them, so the backward sums, and each keeps its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: list[int]) -> Tensor:
        """(T / N, d) -> (T, d)."""
        ctx.ranks = ranks
        return all_gather(x, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """(T, d) -> (T / N, d)."""
        return reduce_scatter(dy, ctx.ranks), None


class ScatterTokens(torch.autograd.Function):
    """The sum over ranks, each its own tokens; every rank has added to them, so the backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: list[int]) -> Tensor:
        """(T, d) -> (T / N, d)."""
        ctx.ranks = ranks
        return reduce_scatter(x, ranks)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """(T / N, d) -> (T, d)."""
        return all_gather(dy, ctx.ranks), None


def mlp_between_cut_tokens(x: Tensor, up: Tensor, down: Tensor, ranks: list[int]) -> Tensor:
    """silu(x up^T) down^T of this rank's tokens: x (T / N, d), up (f / N, d), down (d, f / N) -> (T / N, d)."""
    hidden = silu(linear(GatherTokens.apply(x, ranks), up))
    return ScatterTokens.apply(linear(hidden, down), ranks)
