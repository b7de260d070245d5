"""Pipeline stages of cut layers, and the hook that makes an overlapped pair overlap.

Chapter: book/ep/one-f-one-b-overlap.  In: a program with pairs, such as DualPipe's.  Out: its runtime's gradients.
  F, I     nothing in them hides their all-to-alls
  B        its own weight gradients do; with `fill=False` it is the plain serial backward
  W        no all-to-all
  F&B      `overlapped_forward_backward`: each half computes while the other's rows travel
Give the runtime the hook: `PipelineRuntime(program, stages, loss_fn, overlapped=overlapped_forward_backward)`.
Elsewhere: DualPipe's `overlapped_forward_backward(module0, inputs0, criterion0, ...)`, which its user writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.ep.overlap import builders
from dualpipe_lab.ep.overlap.executor import Passage, execute
from dualpipe_lab.ep.overlap.layer import CutLayer
from dualpipe_lab.ep.overlap.operations import Ticks
from dualpipe_lab.ep.overlap.order import Order
from dualpipe_lab.pp.program import B
from dualpipe_lab.pp.runtime.stage import ForwardResult, Loss, ReadyAction, Stage, Tensors, scaled


class CutStage(Stage):
    """A stage of cut layers.

    Args:
        index: which stage.
        layers: from below.
        ticks: nanoseconds of every kind of work, as for `execute`.
        fill: let a whole backward hide all-to-alls behind its own weight gradients.
    """

    def __init__(self, index: int, layers: Sequence[CutLayer], ticks: Ticks | None = None, fill: bool = True) -> None:
        super().__init__(index, nn.ModuleList(layers))
        self.layers, self.ticks, self._fill = list(layers), ticks, fill
        self.passages: dict[int, Passage] = {}

    @property
    def num_live(self) -> int:
        """Microbatches whose activations are held."""
        return len(self.passages)

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        extra: Mapping[str, Any] | None = None,
        loss_fn: Loss | None = None,
        weight: float = 1,
    ) -> ForwardResult:
        """F, serial."""
        passage = self.enter(microbatch, inputs, extra)
        self.execute(builders.forward_alone(len(self.layers), microbatch), forward=passage)
        return self.leave(passage, loss_fn, weight)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """B."""
        order = builders.backward_alone(len(self.layers), microbatch, self._fill)
        self.execute(order, backward=self.turn(microbatch, grads))
        return self.back(self.passages.pop(microbatch))

    def input_grad(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """I: what W needs stays."""
        order = builders.input_grads_alone(len(self.layers), microbatch)
        self.execute(order, backward=self.turn(microbatch, grads))
        return self.back(self.passages[microbatch])

    def weight_grad(self, microbatch: int) -> None:
        """W."""
        order = builders.weight_grads_alone(len(self.layers), microbatch)
        self.execute(order, backward=self.passages.pop(microbatch))

    def execute(self, order: Order, forward: Passage | None = None, backward: Passage | None = None) -> None:
        """Carry out an order; the pipeline's span stands for all of it."""
        execute(order, forward, backward, self.ticks, traced=False)

    def enter(self, microbatch: int, inputs: Tensors, extra: Mapping[str, Any] | None = None) -> Passage:
        """Begin a microbatch's way up; ValueError for more than one input, which no layer would get."""
        if extra or len(inputs) != 1:
            more = ", ".join([*map(str, extra or ()), *["a tensor"] * (len(inputs) - 1)])
            raise ValueError(f"the layers of stage {self.index} take x alone, got more inputs: {more or 'none at all'}")
        (x,) = inputs
        passage = Passage(self.layers, x)
        if torch.is_grad_enabled():
            self.passages[microbatch] = passage
        return passage

    def leave(self, passage: Passage, loss_fn: Loss | None, weight: float) -> ForwardResult:
        """End it: on the last stage with the loss, where the way down begins."""
        if loss_fn is None:
            return ForwardResult((passage.output,), None)
        y = passage.output.detach().requires_grad_(torch.is_grad_enabled())
        loss = scaled(loss_fn(y), weight)
        if loss.requires_grad:
            (passage.dy,) = torch.autograd.grad(loss, [y])
        return ForwardResult((), loss.detach())

    def turn(self, microbatch: int, grads: Sequence[Tensor]) -> Passage:
        """Begin a microbatch's way down."""
        passage = self.passages[microbatch]
        if grads:
            (passage.dy,) = grads
        return passage

    def back(self, passage: Passage) -> Tensors:
        """End it."""
        assert passage.dx is not None
        return (passage.dx,)


def overlapped_forward_backward(forward: ReadyAction, backward: ReadyAction) -> None:
    """Run an overlapped pair of a pipeline's runtime with both halves side by side.

    Raises:
        TypeError: a stage that is not a `CutStage`.
        InvalidOrder: both halves are of one microbatch.
    """
    up, down = forward.stage, backward.stage
    if not (isinstance(up, CutStage) and isinstance(down, CutStage)):
        raise TypeError(
            f"overlapped_forward_backward cuts layers into pieces; make stages {up.index} and {down.index} CutStages"
        )
    first, second = forward.action.microbatch, backward.action.microbatch
    order = builders.one_f_one_b_overlap(len(up.layers), first, second, backward_layers=len(down.layers))
    if backward.action.kind != B:  # I: its weight gradients come later
        order = replace(order, compute=tuple(op for op in order.compute if not op.kind.endswith("_W")))
    rising, returning = up.enter(first, forward.inputs, forward.extra), down.turn(second, backward.inputs)
    up.execute(order, rising, returning)
    forward.result, forward.loss = up.leave(rising, forward.loss_fn, forward.weight)
    backward.result = down.back(returning)
    if backward.action.kind == B:
        del down.passages[second]
