"""One stage at work: forward, and backward in one piece (B) or in two (I for the input, W for the weights).

In: a module, activations, gradients.  Out: the same; weight gradients accumulate in `.grad`.
Live activations: from F until B, or until W where the backward is split, because W still needs them.
I walks the graph for the input alone; W walks it again for the weights, so a split backward costs an input pass more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor], Tensor]


@dataclass
class _Live:
    """What a microbatch leaves behind between its forward and its backward."""

    x: Tensor
    root: Tensor  # the output, or the loss on the last stage
    dy: Tensor | None = None


class Stage:
    """A module that works on one microbatch at a time and remembers what its backwards need."""

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index, self.module = index, module
        self._live: dict[int, _Live] = {}

    @property
    def num_live(self) -> int:
        """Microbatches whose activations are held."""
        return len(self._live)

    def forward(self, microbatch: int, x: Tensor, loss: Loss | None = None) -> Tensor:
        """F: return the detached output, or the detached loss where `loss` is given."""
        x = x.detach()
        if x.is_floating_point():
            x.requires_grad_()
        y = self.module(x)
        if not isinstance(y, Tensor):
            raise TypeError(f"stage {self.index} must return one tensor, got {type(y).__name__}")
        root = loss(y) if loss else y
        self._live[microbatch] = _Live(x, root)
        return root.detach()

    def backward(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """B: accumulate the weight gradients, return the input's."""
        live = self._live.pop(microbatch)
        torch.autograd.backward(live.root, dy)
        return live.x.grad

    def input_grad(self, microbatch: int, dy: Tensor | None) -> Tensor | None:
        """I: return the input's gradient and keep what W needs."""
        live = self._live[microbatch]
        live.dy = dy
        if self.index == 0 or not live.x.requires_grad:
            return None  # nobody asks for the gradient of the data
        (dx,) = torch.autograd.grad(live.root, live.x, dy, retain_graph=True)
        return dx

    def weight_grad(self, microbatch: int) -> None:
        """W: accumulate the weight gradients."""
        live = self._live.pop(microbatch)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if not parameters:
            return
        grads = torch.autograd.grad(live.root, parameters, live.dy, allow_unused=True)
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
