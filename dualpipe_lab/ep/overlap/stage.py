"""Pipeline stages of interruptible layers, and the hook with which a pipeline runtime overlaps F&B pairs.

Chapter: book/ep/one-f-one-b-overlap.  In: a program with pairs, such as DualPipe's.  Out: its runtime's gradients.
  F, I     their all-to-alls are exposed: there is no other work of the same microbatch
  B        its own weight gradients overlap them; with `fill=False` it is the serial backward
  W        no all-to-all
  F&B      `overlapped_forward_backward`: each half computes while the other half's all-to-alls are under way; a half
           whose stage is not of interruptible layers runs as one piece
ZeRO-3 gathers all weights of a stage when a forward or backward of it begins, and frees them when that has ended.
A stage has any layers: with experts, or in one piece (`PlainLayer`), such as an embedding or a head.
Give the hook to the runtime: `PipelineRuntime(program, stages, loss_fn, overlapped=overlapped_forward_backward)`.
Elsewhere: DualPipe's `overlapped_forward_backward(module0, inputs0, criterion0, ...)`, which its user writes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualpipe_lab.dp.flat_parameter import is_absent
from dualpipe_lab.ep.overlap import builders
from dualpipe_lab.ep.overlap.executor import Layer, MicrobatchPass, Pass, execute
from dualpipe_lab.ep.overlap.linked import Given
from dualpipe_lab.ep.overlap.order import PLAIN, Op, Order, Ticks
from dualpipe_lab.grad_ready import Synchronizer, synchronizers_of
from dualpipe_lab.pp.program import B, F
from dualpipe_lab.pp.runtime.stage import ForwardResult, Loss, ReadyAction, Stage, Tensors, scaled


class InterruptibleStage(Stage):
    """A pipeline stage of interruptible layers.

    Args:
        index: the number of the stage.
        layers: in the order of the forward.
        ticks: nanoseconds of every kind of compute, as for `execute`.
        fill: overlap the all-to-alls of an unpaired backward with its own weight gradients.
        module: the module that the layers are made from, with all their parameters (default: a list of the layers).
        has_loss: whether the last layer computes the loss, because that has weights (`LinkedLayer`).
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        ticks: Ticks | None = None,
        fill: bool = True,
        module: nn.Module | None = None,
        has_loss: bool = False,
    ) -> None:
        modules = [layer for layer in layers if isinstance(layer, nn.Module)]
        super().__init__(index, nn.ModuleList(modules) if module is None else module)
        self.layers, self.ticks, self._fill, self._has_loss = list(layers), ticks, fill, has_loss
        self.letters = [layer.letters for layer in layers]
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
        one = self.begin_forward(microbatch, inputs, extra, weight, loss_fn)
        self.execute(builders.forward_alone(one.letters, microbatch), forward=one)
        return self.finish_forward(one, loss_fn, weight)

    def backward(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """B: input and weight gradients."""
        order = builders.backward_alone(self.letters, microbatch, self._fill)
        self.execute(order, backward=self.begin_backward(microbatch, grads))
        return self.finish_backward(self.passes.pop(microbatch))

    def input_grad(self, microbatch: int, grads: Sequence[Tensor]) -> Tensors:
        """I: input gradients; the tensors that W needs are kept."""
        order = builders.input_grads_alone(self.letters, microbatch)
        self.execute(order, backward=self.begin_backward(microbatch, grads))
        return self.finish_backward(self.passes[microbatch])

    def weight_grad(self, microbatch: int) -> None:
        """W: weight gradients."""
        order = builders.weight_grads_alone(self.letters, microbatch)
        self.execute(order, backward=self.passes.pop(microbatch))

    def execute(self, order: Order, forward: Pass | None = None, backward: Pass | None = None) -> None:
        """Execute an order without spans of its own: the pipeline records one span for the action."""
        execute(order, forward, backward, self.ticks, traced=False)

    def layers_for(self, extra: Mapping[str, Any]) -> Sequence[Layer]:
        """Return the layers that a forward with these further inputs runs: here all of them, and no such input.

        Raises:
            ValueError: inputs that no layer takes.
        """
        if extra:
            rule = f"the layers of stage {self.index} take x alone"
            raise ValueError(f"{rule}, got more inputs: {', '.join(map(str, extra))}")
        return self.layers

    def begin_forward(
        self,
        microbatch: int,
        inputs: Tensors,
        extra: Mapping[str, Any] | None = None,
        weight: float = 1,
        loss_fn: Loss | None = None,
    ) -> MicrobatchPass:
        """Begin the forward of a microbatch, which holds the stage's weights until `finish_forward`.

        Raises:
            ValueError: more than one input, which no layer takes; weights under ZeRO-3 in a stage that trains none.
        """
        if len(inputs) != 1:
            more = ", ".join([*map(str, extra or ()), *["a tensor"] * (len(inputs) - 1)])
            raise ValueError(f"the layers of stage {self.index} take x alone, got more inputs: {more or 'none at all'}")
        layers = self.layers_for(extra or {})
        self._hold()
        (x,) = inputs
        one = MicrobatchPass(layers, x, weight, Given(weight, extra or {}, loss_fn))
        if torch.is_grad_enabled():
            self.passes[microbatch] = one
        return one

    def finish_forward(self, one: MicrobatchPass, loss_fn: Loss | None, weight: float) -> ForwardResult:
        """Return the output and the layers' losses; on the last stage the loss, whose gradient starts the backward."""
        self._release()
        if loss_fn is None:
            return ForwardResult((one.output,), one.loss)
        if self._has_loss:
            one.dy = torch.ones_like(one.output)  # of the loss itself
            return ForwardResult((), one.output if one.loss is None else one.output + one.loss)
        y = one.output.detach().requires_grad_(torch.is_grad_enabled())
        loss = scaled(loss_fn(y), weight)
        if torch.is_grad_enabled():
            has_graph = loss.requires_grad  # not for weight 0
            one.dy = torch.autograd.grad(loss, [y])[0] if has_graph else torch.zeros_like(y)
        return ForwardResult((), loss.detach() if one.loss is None else loss.detach() + one.loss)

    def begin_backward(self, microbatch: int, grads: Sequence[Tensor]) -> MicrobatchPass:
        """Begin the backward of a microbatch with the gradient of its output; the weights are held until its end."""
        one = self.passes[microbatch]
        self._hold()
        if grads:
            (one.dy,) = grads
        return one

    def finish_backward(self, one: MicrobatchPass) -> Tensors:
        """Return the gradient of the input; nothing for token ids."""
        self._release()
        return () if one.dx is None else (one.dx,)

    def _hold(self) -> None:
        for owner in self._synchronizers():
            owner.hold(list(self.module.parameters()))

    def _release(self) -> None:
        for owner in self._synchronizers():
            owner.release(list(self.module.parameters()))

    def _synchronizers(self) -> list[Synchronizer]:
        """What sums the gradients of this stage; raises ValueError for weights that nothing here can gather."""
        parameters = list(self.module.parameters())
        found = list(dict.fromkeys(owner for each in parameters for owner in synchronizers_of(each)))
        if not found and any(is_absent(parameter) for parameter in parameters):
            raise ValueError(
                f"ZeRO-3 gathers the weights of a stage in pieces by those that it trains, and stage {self.index} "
                "trains none; use Ddp, Zero1 or Zero2, or a plain stage here"
            )
        return found


def overlapped_forward_backward(forward: ReadyAction, backward: ReadyAction) -> None:
    """Run an F&B pair of a pipeline runtime with its two halves overlapped.

    Stages may have different layers.  A stage that is not an `InterruptibleStage` runs as one piece, beside the other
    half's all-to-alls.

    Raises:
        InvalidOrder: both halves are of one microbatch.
    """
    up, down = _half(forward), _half(backward)
    order = builders.one_f_one_b_overlap(
        up.letters, forward.action.microbatch, backward.action.microbatch, backward_layers=down.letters
    )
    if backward.action.kind != B:  # I: its weight gradients come later
        order = builders.without_weight_grads(order)
    execute(order, up.begin(), down.begin(), up.ticks or down.ticks, traced=False)
    up.finish()
    down.finish()


def _half(ready: ReadyAction) -> "_InterruptibleHalf | _PlainHalf":
    return _InterruptibleHalf(ready) if isinstance(ready.stage, InterruptibleStage) else _PlainHalf(ready)


class _InterruptibleHalf:
    """One half of a pair, through a stage of interruptible layers."""

    def __init__(self, ready: ReadyAction) -> None:
        assert isinstance(ready.stage, InterruptibleStage), "see _half"
        self._ready, self._stage = ready, ready.stage
        self.letters, self.ticks = ready.stage.letters, ready.stage.ticks

    def begin(self) -> MicrobatchPass:
        ready, microbatch = self._ready, self._ready.action.microbatch
        if ready.action.kind == F:
            self._pass = self._stage.begin_forward(microbatch, ready.inputs, ready.extra, ready.weight, ready.loss_fn)
        else:
            self._pass = self._stage.begin_backward(microbatch, ready.inputs)
        return self._pass

    def finish(self) -> None:
        ready, microbatch = self._ready, self._ready.action.microbatch
        if ready.action.kind == F:
            ready.result, ready.loss = self._stage.finish_forward(self._pass, ready.loss_fn, ready.weight)
            return
        ready.result = self._stage.finish_backward(self._pass)
        if ready.action.kind == B:
            del self._stage.passes[microbatch]


class _PlainHalf:
    """One half of a pair, through a stage that cannot be interrupted: it runs where P_F or P_B stands."""

    letters, ticks = (PLAIN,), None

    def __init__(self, ready: ReadyAction) -> None:
        self._ready = ready

    def begin(self) -> "_PlainHalf":
        return self

    def run(self, op: Op) -> None:
        if not op.kind.endswith("_W"):  # B has computed the weight gradients
            self._ready.run()

    def wait(self, op: Op) -> None:
        raise AssertionError(f"{op}: a layer in one piece launches no all-to-all")

    def finish(self) -> None:
        assert self._ready.result is not None, "the order contains P_F or P_B"
