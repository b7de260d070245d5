"""A stage whose forward and whole backward take model time, so that waiting shows on the virtual clock."""

from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.launch.context import compute


class _Pass(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to mypy
    """Hands a tensor on; its backward lasts `ms`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # torch calls it with one
        compute(ctx.ms, "B")
        return gradients[0], None


class Timed(nn.Module):  # type: ignore[misc]  # as above
    """A module that takes `forward_ms` forwards and `backward_ms` backwards."""

    def __init__(self, module: nn.Module, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.module, self.forward_ms, self.backward_ms = module, forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        """Run the module, then let the clock go on."""
        y = self.module(x)
        compute(self.forward_ms, "F")
        passed: Tensor = _Pass.apply(y, self.backward_ms)
        return passed
