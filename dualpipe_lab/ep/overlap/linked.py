"""`LinkedLayer`: a layer in one piece that is linked to others of its stage, by a tensor that is kept, or by the loss.

Chapter: book/whole/two-tokens.  In: `x_..D`, a kept tensor.  Out: the function's output, a tensor to keep; in the
backward the gradients of both.
The layers of a stage are a chain: each takes the output of the one before.  A tensor that two of them use is kept by
the first and taken by a later one.  Backwards, the later one leaves its gradient for the first.
The last layer of the last stage may compute the loss, where that has weights: its output is then the loss, and the
gradient of that is 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from dualpipe_lab.ep.overlap.order import PLAIN
from dualpipe_lab.pp.runtime.split_backward import SplitBackward
from dualpipe_lab.pp.runtime.stage import Loss, has_gradient, scaled


@dataclass
class Given:
    """What the layers of a stage share for one microbatch.

    Attributes:
        weight: of the microbatch in the loss.
        extra: the stage's inputs besides x, by name.
        loss_fn: of the last stage's output; None on other stages, and where only the output is wanted.
        tensors: that one layer keeps for another, detached, by name.
        grads: of these tensors, by name.
    """

    weight: float = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Loss | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)

    def loss_of(self, output: Tensor) -> Tensor:
        """Return the microbatch's weighted loss; without a loss function the output itself."""
        return output if self.loss_fn is None else scaled(self.loss_fn(output), self.weight)


class Linked(NamedTuple):
    """What the function of a `LinkedLayer` returns: its output, and a tensor to keep for another layer."""

    output: Tensor
    kept: Tensor | None = None


class LinkedLayer:
    """A function without all-to-alls, as one piece of an order, with links to other layers of its stage.

    Args:
        function: of x, of the tensor that it takes (or None), and of what the microbatch is given.
        keeps: the name of the tensor that it keeps for a later layer.
        takes: the name of the tensor that it takes from an earlier one.
    """

    letters = PLAIN

    def __init__(
        self,
        function: Callable[[Tensor, Tensor | None, Given], Linked],
        keeps: str | None = None,
        takes: str | None = None,
    ) -> None:
        self.function, self.keeps, self.takes = function, keeps, takes

    def begin(self, weight: float = 1, given: Given | None = None) -> "LinkedPass":
        """Return the pass of one microbatch through this layer."""
        return LinkedPass(self, given or Given(weight))


class LinkedPass:
    """One microbatch in a linked layer."""

    loss: Tensor | None = None

    def __init__(self, layer: LinkedLayer, given: Given) -> None:
        self._layer, self._given = layer, given
        self._output: Tensor | None = None
        self._split: SplitBackward | None = None
        self._inputs: list[Tensor] = []
        self._has_graph: list[bool] = []  # of the output, and of what is kept

    def forward(self, x: Tensor) -> None:
        """P_F: run the function."""
        layer, given, is_graded = self._layer, self._given, torch.is_grad_enabled()
        x = x.detach()
        taken = None if layer.takes is None else given.tensors.pop(layer.takes).detach()
        inputs = [one for one in (x, taken) if is_graded and one is not None and has_gradient(one)]
        for one in inputs:
            one.requires_grad_()
        found = layer.function(x, taken, given)
        if is_graded:
            outputs = [one for one in found if one is not None]
            self._has_graph = [one.requires_grad for one in outputs]
            self._split = SplitBackward([get_gradient_edge(one) for one in outputs if one.requires_grad], inputs)
            self._inputs = inputs
        if layer.keeps is not None:
            assert found.kept is not None, "a layer that keeps a tensor returns it"
            given.tensors[layer.keeps] = found.kept.detach()
        self._output = found.output.detach()

    def output(self) -> Tensor:
        """Return the output."""
        assert self._output is not None, "P_F has run"
        return self._output

    def input_grad(self, dy: Tensor) -> Tensor | None:
        """P_B: return the gradient of x, None for token ids; leave that of the tensor that was taken."""
        assert self._split is not None, "P_F has run"
        layer, given, self._output = self._layer, self._given, None
        grads = [dy] if layer.keeps is None else [dy, given.grads.pop(layer.keeps)]
        found = self._split.input_grad([grad for grad, has in zip(grads, self._has_graph, strict=True) if has])
        full = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(self._inputs, found, strict=True)]
        self._inputs = []
        if layer.takes is not None:
            given.grads[layer.takes] = full.pop()
        return full[0] if full else None

    def weight_grad(self) -> None:
        """P_W: accumulate the weight gradients."""
        assert self._split is not None, "P_B has run"
        self._split.weight_grad()
        self._split = None

    @property
    def is_over(self) -> bool:
        """Whether the backward has ended and no tensor is held."""
        return self._split is None and self._output is None
