"""One stage at work: forward, and backward in one piece (B) or in two (I for the input, W for the weights).

Chapter: book/pp/pp-basic.  In: a module, activations, gradients.  Out: the same; weight gradients add up in `.grad`.
Live activations: from F until B, or until W where the backward is split.  The output itself is not kept: the graph
behind it is all that a backward needs, so an output may be a view.
A stage with a forward or a backward of its own is a subclass that overrides these methods.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dualpipe_lab.pp.runtime.split import SplitBackward

Tensors: TypeAlias = tuple[Tensor, ...]
Loss: TypeAlias = Callable[[Tensor], Tensor]


class WithLoss(NamedTuple):
    """What a module returns that adds to the loss of its microbatch, such as the balance loss of a router.

    The runtime gives `loss` (a scalar) the weight that the microbatch has; `output` goes to the next stage.
    """

    output: Tensor | Tensors
    loss: Tensor


class Result(NamedTuple):
    """What F leaves: the tensors for the next stage, and the loss of this stage if there is one; all detached."""

    output: Tensors
    loss: Tensor | None


@dataclass
class Live:
    """What a microbatch leaves behind between its forward and its backward.

    Attributes:
        inputs: the tensors whose gradients the previous stage waits for.
        roots: where the backward starts, one for each output that has a graph, then one for the loss.
        sent: the positions, among the gradients that come back, of those that belong to the first roots.
        split: the backward between its I and its W.
    """

    inputs: Tensors
    roots: list[GradientEdge]
    sent: list[int]
    seed: Tensor | None
    split: SplitBackward | None = None


class Stage:
    """A module that works on one microbatch at a time and remembers what its backwards need."""

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index, self.module = index, module
        self.live: dict[int, Live] = {}

    @property
    def num_live(self) -> int:
        """Microbatches whose activations are held."""
        return len(self.live)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        extra: Mapping[str, Any] | None = None,
        loss_fn: Loss | None = None,
        weight: float = 1,
    ) -> Result:
        """F: run the module on the inputs that came, and on extra ones that only this stage gets.

        `loss_fn` makes the loss of the last stage from its output; `weight` scales every loss.
        """
        inputs = tuple(self._received(x) for x in inputs)
        output = self.call(microbatch, inputs, extra or {})
        losses = [scaled(output.loss, weight)] if isinstance(output, WithLoss) else []
        tensors = as_tensors(self.index, output)
        if loss_fn is not None:
            losses.append(scaled(loss_fn(*tensors), weight))
            tensors = ()
        loss = sum(losses[1:], losses[0]) if losses else None
        self.live[microbatch] = self.keep(inputs, tensors, loss)
        return Result(tuple(y.detach() for y in tensors), None if loss is None else loss.detach())

    def call(self, microbatch: int, inputs: Tensors, extra: Mapping[str, Any]) -> Any:
        """Run the module."""
        return self.module(*inputs, **extra)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """B: accumulate the weight gradients, return the gradients of the inputs."""
        live = self.live.pop(microbatch)
        if live.roots:
            torch.autograd.backward(live.roots, _incoming(live, grads))
        return tuple(_or_zeros(x, x.grad) for x in live.inputs)

    def input_grad(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """I: return the gradients of the inputs and keep what W needs."""
        live = self.live[microbatch]
        live.split = SplitBackward(live.roots, live.inputs)
        found = live.split.input_grad(_incoming(live, grads))
        return tuple(_or_zeros(x, grad) for x, grad in zip(live.inputs, found, strict=True))

    def weight_grad(self, microbatch: int) -> None:
        """W: accumulate the weight gradients."""
        split = self.live.pop(microbatch).split
        assert split is not None, "validate() has seen I before W"
        split.weight_grad()

    def keep(self, inputs: Tensors, output: Tensors, loss: Tensor | None) -> Live:
        """Return what the backward needs of a forward."""
        graded = [y for y in output if has_gradient(y)]
        sent = [position for position, y in enumerate(graded) if y.requires_grad]
        roots = [graded[position] for position in sent]
        if loss is not None and loss.requires_grad:
            roots.append(loss)
        seed = None if loss is None else torch.ones_like(loss)
        asked = tuple(x for x in inputs if x.requires_grad)
        return Live(asked, [get_gradient_edge(y) for y in roots], sent, seed)

    def _received(self, x: Tensor) -> Tensor:
        x = x.detach()
        # Nobody waits for the gradient of the data.
        return x.requires_grad_() if self.index and has_gradient(x) else x


def has_gradient(x: Tensor) -> bool:
    """Whether a gradient comes back for a tensor that crosses a boundary: for floats, and not for integers."""
    return bool(x.is_floating_point() or x.is_complex())


def as_tensors(stage: int, output: Any) -> Tensors:
    """Return the tensors of a module's output; TypeError if it is something else."""
    if isinstance(output, WithLoss):
        output = output.output
    tensors = output if isinstance(output, tuple) else (output,)
    for y in tensors:
        if not isinstance(y, Tensor):
            raise TypeError(
                f"stage {stage} must return a tensor, a tuple of tensors or WithLoss(output, loss), got "
                f"{type(y).__name__}"
            )
    return tensors


def scaled(loss: Tensor, weight: float) -> Tensor:
    """Return weight * loss; for weight 0 a bare 0, as the mean over no tokens is not a number, nor is its gradient."""
    if loss.numel() != 1 or not has_gradient(loss):
        raise ValueError(f"the loss of a microbatch is one number, got shape {tuple(loss.shape)} of {loss.dtype}")
    return loss * weight if weight else torch.zeros_like(loss.detach())


def _incoming(live: Live, grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of every root."""
    incoming = [grads[position] for position in live.sent]
    return incoming if len(incoming) == len(live.roots) else [*incoming, _seed(live)]


def _seed(live: Live) -> Tensor:
    assert live.seed is not None
    return live.seed


def _or_zeros(x: Tensor, grad: Tensor | None) -> Tensor:
    return torch.zeros_like(x) if grad is None else grad
