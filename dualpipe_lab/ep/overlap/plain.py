"""`PlainLayer`: a layer without all-to-alls, in one piece: an embedding, a dense layer, norm and head.

Chapter: book/ep/one-f-one-b-overlap.  In: `x_..D`, or token ids.  Out: the function's output; `dx_..D` and `.grad`.
P_F runs a function of a tensor, P_B and P_W are the two halves of autograd's backward (`SplitBackward`), so that P_W
fills the window of another layer's all-to-all.  Token ids have no gradient: P_B returns None for them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from dualpipe_lab.ep.overlap.linked import Given
from dualpipe_lab.ep.overlap.order import PLAIN
from dualpipe_lab.pp.runtime.split_backward import SplitBackward
from dualpipe_lab.pp.runtime.stage import has_gradient


class PlainLayer:
    """A function or module without all-to-alls, as one piece of an order.

    Args:
        function: of one tensor, which it does not change; returns one tensor.
    """

    letters = PLAIN

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def begin(self, weight: float = 1, given: Given | None = None) -> "PlainPass":
        """Return the pass of one microbatch through this layer."""
        return PlainPass(self.function)


class PlainPass:
    """One microbatch in a layer in one piece."""

    loss: Tensor | None = None

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._output: Tensor | None = None
        self._split: SplitBackward | None = None

    def forward(self, x: Tensor) -> None:
        """P_F: run the function."""
        x, is_graded = x.detach(), torch.is_grad_enabled()
        inputs = [x.requires_grad_()] if is_graded and has_gradient(x) else []
        y = self._function(x)
        if is_graded:
            self._split = SplitBackward([get_gradient_edge(y)] if y.requires_grad else [], inputs)
        self._output = y.detach()

    def output(self) -> Tensor:
        """Return the output."""
        assert self._output is not None, "P_F has run"
        return self._output

    def input_grad(self, dy: Tensor) -> Tensor | None:
        """P_B: return the gradient of the input; None if it has none."""
        assert self._split is not None, "P_F has run"
        self._output = None
        found = self._split.input_grad([dy])
        return found[0] if found else None

    def weight_grad(self) -> None:
        """P_W: accumulate the weight gradients."""
        assert self._split is not None, "P_B has run"
        self._split.weight_grad()
        self._split = None

    @property
    def is_over(self) -> bool:
        """Whether the backward has ended and no tensor is held."""
        return self._split is None and self._output is None
