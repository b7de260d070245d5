"""Stages for `pp.py`: one that sleeps where it should work, and two that work."""

import time
from typing import Any

import torch
from torch import Tensor, nn

ROWS, WIDTH = 16, 64


class Sleep(torch.autograd.Function):
    """The identity; its forward lasts until `end`, its backward `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: float, seconds: float) -> Tensor:
        """Return at `end` of `time.perf_counter`, at once if that is over."""
        ctx.seconds, y = seconds, x.clone()
        if (remaining := end - time.perf_counter()) > 0:
            time.sleep(remaining)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Take `seconds`."""
        time.sleep(ctx.seconds)
        return grad, None, None


class Emulated(nn.Module):
    """F, I and W take `seconds` each: F to its last operation, I on the way of activations, W on that to a weight.

    The first stage has an entry to split at.
    """

    def __init__(self, seconds: float, first: bool) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.entry = nn.Parameter(torch.ones(ROWS, WIDTH)) if first else None

    def forward(self, x: Tensor) -> Tensor:
        """x_TH -> x_TH: rows, features."""
        end = time.perf_counter() + self.seconds
        if self.entry is not None:
            x = x * self.entry
        x = x + Sleep.apply(self.weight, 0.0, self.seconds)
        return Sleep.apply(x, end, self.seconds)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x_BSD -> x_BSD: batch, sequence, model."""
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


REAL = {
    "MLP": (lambda: nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), torch.randn(128, 256)),
    "transformer": (lambda: Block(128), torch.randn(2, 64, 128)),
}
