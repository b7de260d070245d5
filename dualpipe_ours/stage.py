"""A stage of a pipeline: what it keeps of a forward, and its backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Stage:
    """A function of a tensor, and its weights."""

    def __init__(self, f: Callable[[Tensor], Tensor], parameters: Iterable[Tensor]) -> None:
        self.f, self.parameters = f, list(parameters)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """The output without its graph, and what the backward needs."""
        x = x.detach().requires_grad_(x.is_floating_point())  # a leaf: x.grad is for the stage before
        y = self.f(x)
        return y.detach(), (x, y)

    def backward(self, saved: Any, dy: Tensor) -> Tensor | None:
        """Add to the gradients of the weights; return that of the input, if it can have one."""
        x, y = saved
        torch.autograd.backward(y, dy)  # starts the chain rule in the middle
        return x.grad if x.is_floating_point() else None
