"""Pipeline stages of interruptible layers, and the hook with which a pipeline runtime overlaps F&B pairs.

Chapter: book/ep/one-f-one-b-overlap.  In: a program with pairs, such as DualPipe's.  Out: its runtime's gradients.
  F, I     their all-to-alls are exposed: there is no other work of the same microbatch
  B        its own weight gradients overlap them; with `fill=False` it is the serial backward
  W        no all-to-all
  F&B      `overlapped_forward_backward`: each half computes while the other half's all-to-alls are under way
Give the hook to the runtime: `PipelineRuntime(program, stages, loss_fn, overlapped=overlapped_forward_backward)`.
Elsewhere: DualPipe's `overlapped_forward_backward(module0, inputs0, criterion0, ...)`, which its user writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.ep.overlap import builders
from dualpipe_lab.ep.overlap.executor import InterruptibleLayer, MicrobatchPass, execute
from dualpipe_lab.ep.overlap.order import Order, Ticks
from dualpipe_lab.pp.program import B
from dualpipe_lab.pp.runtime.stage import ForwardResult, Loss, ReadyAction, Stage, Tensors, scaled


class InterruptibleStage(Stage):
    """A pipeline stage of interruptible layers.

    Args:
        index: the number of the stage.
        layers: in the order of the forward.
        ticks: nanoseconds of every kind of compute, as for `execute`.
        fill: overlap the all-to-alls of an unpaired backward with its own weight gradients.
    """

    def __init__(
        self, index: int, layers: Sequence[InterruptibleLayer], ticks: Ticks | None = None, fill: bool = True
    ) -> None:
        super().__init__(index, nn.ModuleList(layers))
        self.layers, self.ticks, self._fill = list(layers), ticks, fill
        self.passes: dict[int, MicrobatchPass] = {}

    @property
    def num_live(self) -> int:
        """The number of microbatches whose activations are held."""
        return len(self.passes)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        extra: Mapping[str, Any] | None = None,
        loss_fn: Loss | None = None,
        weight: float = 1,
    ) -> ForwardResult:
        """F: the serial forward."""
        one = self.begin_forward(microbatch, inputs, extra)
        self.execute(builders.forward_alone(len(self.layers), microbatch), forward=one)
        return self.finish_forward(one, loss_fn, weight)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """B: input and weight gradients."""
        order = builders.backward_alone(len(self.layers), microbatch, self._fill)
        self.execute(order, backward=self.begin_backward(microbatch, grads))
        return self.finish_backward(self.passes.pop(microbatch))

    def input_grad(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """I: input gradients; the tensors that W needs are kept."""
        order = builders.input_grads_alone(len(self.layers), microbatch)
        self.execute(order, backward=self.begin_backward(microbatch, grads))
        return self.finish_backward(self.passes[microbatch])

    def weight_grad(self, microbatch: int) -> None:
        """W: weight gradients."""
        order = builders.weight_grads_alone(len(self.layers), microbatch)
        self.execute(order, backward=self.passes.pop(microbatch))

    def execute(
        self, order: Order, forward: MicrobatchPass | None = None, backward: MicrobatchPass | None = None
    ) -> None:
        """Execute an order without spans of its own: the pipeline records one span for the action."""
        execute(order, forward, backward, self.ticks, traced=False)

    def begin_forward(self, microbatch: int, inputs: Tensors, extra: Mapping[str, Any] | None = None) -> MicrobatchPass:
        """Begin the forward of a microbatch; ValueError for more than one input, which no layer takes."""
        if extra or len(inputs) != 1:
            more = ", ".join([*map(str, extra or ()), *["a tensor"] * (len(inputs) - 1)])
            raise ValueError(f"the layers of stage {self.index} take x alone, got more inputs: {more or 'none at all'}")
        (x,) = inputs
        one = MicrobatchPass(self.layers, x)
        if torch.is_grad_enabled():
            self.passes[microbatch] = one
        return one

    def finish_forward(self, one: MicrobatchPass, loss_fn: Loss | None, weight: float) -> ForwardResult:
        """Return the output, or on the last stage the loss, whose gradient starts the backward."""
        if loss_fn is None:
            return ForwardResult((one.output,), None)
        y = one.output.detach().requires_grad_(torch.is_grad_enabled())
        loss = scaled(loss_fn(y), weight)
        if loss.requires_grad:
            (one.dy,) = torch.autograd.grad(loss, [y])
        return ForwardResult((), loss.detach())

    def begin_backward(self, microbatch: int, grads: Sequence[Tensor]) -> MicrobatchPass:
        """Begin the backward of a microbatch with the gradient of its output."""
        one = self.passes[microbatch]
        if grads:
            (one.dy,) = grads
        return one

    def finish_backward(self, one: MicrobatchPass) -> Tensors:
        """Return the gradient of the input."""
        assert one.dx is not None
        return (one.dx,)


def overlapped_forward_backward(forward: ReadyAction, backward: ReadyAction) -> None:
    """Run an F&B pair of a pipeline runtime with its two halves overlapped.

    Raises:
        TypeError: a stage that is not a `InterruptibleStage`.
        InvalidOrder: both halves are of one microbatch.
    """
    up, down = forward.stage, backward.stage
    if not (isinstance(up, InterruptibleStage) and isinstance(down, InterruptibleStage)):
        raise TypeError(
            f"overlapped_forward_backward interrupts layers; make stages {up.index} and {down.index} "
            "InterruptibleStages"
        )
    first, second = forward.action.microbatch, backward.action.microbatch
    order = builders.one_f_one_b_overlap(len(up.layers), first, second, backward_layers=len(down.layers))
    if backward.action.kind != B:  # I: its weight gradients come later
        order = replace(order, compute=tuple(op for op in order.compute if not op.kind.endswith("_W")))
    new, old = up.begin_forward(first, forward.inputs, forward.extra), down.begin_backward(second, backward.inputs)
    up.execute(order, new, old)
    forward.result, forward.loss = up.finish_forward(new, forward.loss_fn, forward.weight)
    backward.result = down.finish_backward(old)
    if backward.action.kind == B:
        del down.passes[second]
