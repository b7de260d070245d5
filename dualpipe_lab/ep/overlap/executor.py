"""The executor: the forward of one microbatch and the backward of another through interruptible layers.

Chapter: book/ep/one-f-one-b-overlap.  In: an `Order`, a `MicrobatchPass` for each half.  Out: outputs, gradients.
  outputs and gradients   the same bits for every order: an order decides when an operation runs, not what it computes
  time                    on the virtual clock, that of `simulate`, to the nanosecond
An all-to-all is launched as soon as its input is ready, and waited for right before its output is used.
The pieces themselves are in `layer` (layers with experts) and `plain` (layers in one piece).
Elsewhere: Megatron `TransformerLayerNode` in fine_grained_callables.py.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor

from dualpipe_lab.ep.overlap.layer import Given
from dualpipe_lab.ep.overlap.order import Op, Order, Ticks
from dualpipe_lab.ep.overlap.simulator import ISSUE, RUN, Call, StreamSpans, host_calls, span_kind, span_of
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.timeline import Span, Time

# the method of a layer's pass for each kind; some take the layer's input or its output's gradient
_PIECES = {
    "A_F": "attention", "D_F": "dispatch", "S_F": "shared", "M_F": "experts", "C_F": "combine",
    "C_B": "combine_grad", "S_B": "shared_input_grad", "S_W": "shared_weight_grad", "M_B": "experts_input_grad",
    "M_W": "experts_weight_grad", "D_B": "dispatch_grad", "A_B": "attention_input_grad", "A_W": "attention_weight_grad",
    "P_F": "forward", "P_B": "input_grad", "P_W": "weight_grad",
}  # fmt: skip
_TAKES_INPUT, _TAKES_OUTPUT_GRAD, _RETURNS_INPUT_GRAD = ("A_F", "P_F"), ("C_B", "S_B", "P_B"), ("A_B", "P_B")


class Layer(Protocol):
    """A layer of a stage: an `InterruptibleLayer`, a `PlainLayer`, or another with the same methods.

    Attributes:
        letters: of its pieces: "ADMC", "ASDMC" or "P".
    """

    letters: str

    def begin(self, weight: float = 1, given: Given | None = None) -> Any:
        """Return the pass of one microbatch, of this weight in the loss, through this layer.

        `given`: what the layers of the stage share for this microbatch.
        """


class Pass(Protocol):
    """One microbatch in the layers of a stage: a `MicrobatchPass`, or a stage that runs in one piece."""

    def run(self, op: Op) -> None:
        """Run a compute operation, or launch an all-to-all."""

    def wait(self, op: Op) -> None:
        """Complete an all-to-all."""


class MicrobatchPass:
    """The forward of one microbatch through layers, and later its backward.

    Args:
        layers: in the order of the forward.
        x: `x_..D`, the input of the first one, or token ids where that is an embedding.
        weight: of the microbatch in the loss; the layers' own losses are multiplied by it.
        given: what the layers share for this microbatch (default: that weight alone).

    Attributes:
        letters: of every layer.
        dy: `dy_..D`, the gradient of the output; set it before the backward.
        dx: `dx_..D`, the gradient of the input; None until the backward of layer 0 has run, and for token ids.
    """

    def __init__(self, layers: Sequence[Layer], x: Tensor, weight: float = 1, given: Given | None = None) -> None:
        given = given or Given(weight)
        self.letters = [layer.letters for layer in layers]
        self._passes = [layer.begin(weight, given) for layer in layers]
        self._x: Tensor | None = x
        self.dy: Tensor | None = None
        self.dx: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """`y_..D`, after the wait for C_F of the last layer."""
        output: Tensor = self._passes[-1].output()
        return output

    @property
    def loss(self) -> Tensor | None:
        """The weighted losses of all layers, summed; None if no layer has one."""
        losses = [one.loss for one in self._passes if one.loss is not None]
        return sum(losses[1:], losses[0]) if losses else None

    @property
    def is_over(self) -> bool:
        """Whether the backward of all layers has ended and no tensor is held."""
        return all(one.is_over for one in self._passes)

    def run(self, op: Op) -> None:
        """Run a compute operation, or launch an all-to-all."""
        for piece in op.pieces:
            self._run(piece)

    def wait(self, op: Op) -> None:
        """Complete an all-to-all."""
        self._passes[op.layer].wait()

    def _run(self, op: Op) -> None:
        piece = getattr(self._passes[op.layer], _PIECES[op.kind])
        if op.kind in _TAKES_INPUT:
            piece(self._input_of(op.layer))
        elif op.kind in _TAKES_OUTPUT_GRAD:
            found = piece(self._output_grad_of(op.layer))
        else:
            found = piece()
        if op.kind in _RETURNS_INPUT_GRAD:
            self.dx = found

    def _input_of(self, layer: int) -> Tensor:
        if layer:
            y: Tensor = self._passes[layer - 1].output()
            return y
        assert self._x is not None
        x, self._x = self._x, None
        return x

    def _output_grad_of(self, layer: int) -> Tensor:
        """Return the gradient of a layer's output: the input gradient of the layer after it."""
        dy = self.dy if layer == len(self._passes) - 1 else self.dx
        assert dy is not None, "set dy of the microbatch before its backward"
        return dy


def execute(
    order: Order,
    forward: Pass | None = None,
    backward: Pass | None = None,
    ticks: Ticks | None = None,
    traced: bool = True,
    calls: Sequence[Call] | None = None,
) -> StreamSpans:
    """Execute an order on this rank; the other ranks of the layers' group execute the same.

    Args:
        order: the operations of both streams.
        forward: the microbatch of the forward operations, if there are any.
        backward: the microbatch of the backward operations, if there are any; its `dy` is set.
        ticks: the least duration in nanoseconds of each kind of compute on this rank's clock; None: as it takes.
        traced: record a span for each compute operation in the launch's timeline.
        calls: the calls of the host (default: `host_calls(order)`).

    Returns:
        Start and end of each operation in nanoseconds since the call, as `simulate` predicts them.

    Raises:
        InvalidOrder: as `host_calls`.
        ValueError: a microbatch is missing, or one is given that the order does not have.
    """
    asked = any(op.is_forward for op in order.pieces), any(not op.is_forward for op in order.pieces)
    if asked != (forward is not None, backward is not None):
        needed = [name for name, is_asked in zip(("forward", "backward"), asked, strict=True) if is_asked]
        raise ValueError(f"{order.name!r} takes a MicrobatchPass for its {' and its '.join(needed)}, and no other")
    recorder = _Recorder(order, ticks, traced)
    for verb, op in calls or host_calls(order):
        microbatch = forward if op.is_forward else backward
        assert microbatch is not None
        if verb == ISSUE:
            microbatch.run(op)
        elif verb == RUN:
            recorder.run(op, microbatch)
        else:
            recorder.wait(op, microbatch)
    return StreamSpans(tuple(recorder.compute), tuple(recorder.comm))


class _Recorder:
    """Runs operations and records their spans."""

    def __init__(self, order: Order, ticks: Ticks | None, traced: bool) -> None:
        self.order, self.ticks, self.traced, self.context = order, ticks, traced, rank_context()
        self.zero = self.context.clock.now()
        self.compute: list[Span] = []
        self.comm: list[Span] = []

    def run(self, op: Op, microbatch: Pass) -> None:
        clock = self.context.clock
        named = self.context.span(span_kind(op), op.layer, self.order.microbatch(op), str(op))
        with named if self.traced else nullcontext():
            started = clock.now()
            microbatch.run(op)
            if self.ticks:
                clock.wait_until(started + int(self.ticks[op.kind]))
        self.record(self.compute, op, started, clock.now())

    def wait(self, op: Op, microbatch: Pass) -> None:
        known = len(self.context.trace.collectives)
        microbatch.wait(op)
        for span in self.context.trace.collectives[known:]:  # none if it took no time
            self.record(self.comm, op, span.start, span.end)

    def record(self, row: list[Span], op: Op, start: Time, end: Time) -> None:
        if end > start:
            row.append(span_of(self.order, op, 0, start - self.zero, end - self.zero))
