"""The executor: one microbatch up and another one down through layers that are cut in pieces, in any legal order.

Chapter: book/ep/one-f-one-b-overlap.  In: an `Order`, a `Passage` each for F, B.  Out: output, input gradient, `.grad`.
  outputs and gradients   the same bits for every order: an order says when, not what
  time                    on the virtual clock, that of `simulate`, to the nanosecond
An all-to-all is issued as soon as what it sends is there, and waited for right before what it brings is needed.
"""

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from dualpipe_lab.ep.overlap.host import ISSUE, RUN, Call, host_calls
from dualpipe_lab.ep.overlap.layer import CutLayer
from dualpipe_lab.ep.overlap.operations import Op, Ticks
from dualpipe_lab.ep.overlap.order import Order
from dualpipe_lab.ep.overlap.simulator import Streams, span_kind, span_of
from dualpipe_lab.timeline import Span, Time
from dualpipe_lab.world.context import rank_context


class Passage:
    """One microbatch on its way up through layers, and later down again.

    Args:
        layers: from below.
        x: `x_TD`, the input of the first one.

    Attributes:
        dy: `dy_TD`, the gradient of the output; set before the way down.
        dx: `dx_TD`, the gradient of the input; None until A_B of layer 0.
    """

    def __init__(self, layers: Sequence[CutLayer], x: Tensor) -> None:
        self._passes = [layer.begin() for layer in layers]
        self._x: Tensor | None = x
        self.dy: Tensor | None = None
        self.dx: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """`y_TD`, once C_F of the last layer was waited for."""
        return self._passes[-1].output()

    @property
    def is_over(self) -> bool:
        """Whether all has come back down, and nothing is held."""
        return all(one.is_over for one in self._passes)

    def run(self, op: Op) -> None:
        """Do a piece of work, or issue an all-to-all."""
        for piece in op.pieces:
            self._run(piece)

    def wait(self, op: Op) -> None:
        """Wait for an all-to-all."""
        self._passes[op.layer].wait()

    def _run(self, op: Op) -> None:
        here, kind = self._passes[op.layer], op.kind
        if kind == "A_F":
            here.attention(self._arriving_at(op.layer))
        elif kind == "C_B":
            here.combine_grad(self._returning_to(op.layer))
        elif kind == "A_B":
            self.dx = here.attention_input_grad()
        else:
            {
                "D_F": here.dispatch, "M_F": here.experts, "C_F": here.combine,
                "M_B": here.experts_input_grad, "M_W": here.experts_weight_grad, "D_B": here.dispatch_grad,
                "A_W": here.attention_weight_grad,
            }[kind]()  # fmt: skip

    def _arriving_at(self, layer: int) -> Tensor:
        if layer:
            return self._passes[layer - 1].output()
        assert self._x is not None
        x, self._x = self._x, None
        return x

    def _returning_to(self, layer: int) -> Tensor:
        """The gradient of a layer's output: that of the input of the layer above it, which came down last."""
        dy = self.dy if layer == len(self._passes) - 1 else self.dx
        assert dy is not None, "set passage.dy before the way down"
        return dy


def execute(
    order: Order,
    forward: Passage | None = None,
    backward: Passage | None = None,
    ticks: Ticks | None = None,
    traced: bool = True,
    calls: Sequence[Call] | None = None,
) -> Streams:
    """Carry out an order on this rank; the other ranks of the layers' group do the same.

    Args:
        order: what, and in which order.
        forward: the microbatch on its way up, if the order has a forward.
        backward: the microbatch on its way down, if the order has a backward; its `dy` is set.
        ticks: nanoseconds that each kind of work takes on this rank's clock at least; None: the time it takes.
        traced: record a span for each piece of work in the launch's timeline.
        calls: what the host does, if it is something else than `host_calls(order)`.

    Returns:
        When each operation ran and travelled, in nanoseconds since the call: what `simulate` predicts.

    Raises:
        InvalidOrder: as `host_calls`.
        ValueError: a passage is missing, or not asked for.
    """
    asked = any(op.is_forward for op in order.pieces), any(not op.is_forward for op in order.pieces)
    if asked != (forward is not None, backward is not None):
        needed = [name for name, is_asked in zip(("forward", "backward"), asked, strict=True) if is_asked]
        raise ValueError(f"{order.name!r} takes a passage for its {' and its '.join(needed)}, and no other")
    log = _Log(order, ticks, traced)
    for verb, op in calls or host_calls(order):
        passage = forward if op.is_forward else backward
        assert passage is not None
        if verb == ISSUE:
            passage.run(op)
        elif verb == RUN:
            log.run(op, passage)
        else:
            log.wait(op, passage)
    return Streams(tuple(log.compute), tuple(log.comm))


class _Log:
    """Takes the time of what it lets a passage do."""

    def __init__(self, order: Order, ticks: Ticks | None, traced: bool) -> None:
        self.order, self.ticks, self.traced, self.context = order, ticks, traced, rank_context()
        self.zero = self.context.clock.now()
        self.compute: list[Span] = []
        self.comm: list[Span] = []

    def run(self, op: Op, passage: Passage) -> None:
        clock = self.context.clock
        named = self.context.span(span_kind(op), op.layer, self.order.microbatch(op), str(op))
        with named if self.traced else nullcontext():
            started = clock.now()
            passage.run(op)
            if self.ticks:
                clock.wait_until(started + int(self.ticks[op.kind]))
        self.note(self.compute, op, started, clock.now())

    def wait(self, op: Op, passage: Passage) -> None:
        known = len(self.context.trace.collectives)
        passage.wait(op)
        for span in self.context.trace.collectives[known:]:  # none if it took no time
            self.note(self.comm, op, span.start, span.end)

    def note(self, row: list[Span], op: Op, start: Time, end: Time) -> None:
        if end > start:
            row.append(span_of(self.order, op, 0, start - self.zero, end - self.zero))
