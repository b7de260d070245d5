"""The executor: the forward of one microbatch and the backward of another through interruptible MoE layers.

Chapter: book/ep/one-f-one-b-overlap.  In: an `Order`, a `MicrobatchPass` for each half.  Out: `y_TD`, `dx_TD`, `.grad`.
A layer is split into ten pieces.  Each computes, or launches an all-to-all, and stores its tensors for a later piece:
  A  a = attention(x), with its residual; weights and experts = router(a)
  D  k copies of each token to the ranks of its experts        M  the experts of this rank        C  results back
  y = a + sum over j of w_j Y_j
The backward of attention is autograd's, split into I and W; all others are written out (`dualpipe_lab.ep.moe`).
Between M_B and M_W a microbatch holds the inputs and output gradients of the experts' products, between A_B and A_W
the intermediates of the attention's split backward.
  outputs and gradients   the same bits for every order: an order decides when an operation runs, not what it computes
  time                    on the virtual clock, that of `simulate`, to the nanosecond
An all-to-all is launched as soon as its input is ready, and waited for right before its output is used.
Elsewhere: Megatron `TransformerLayerNode` in fine_grained_callables.py.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dualpipe_lab.comm import Pending
from dualpipe_lab.ep import moe
from dualpipe_lab.ep.all_to_all import start_rows
from dualpipe_lab.ep.overlap.host import ISSUE, RUN, Call, host_calls
from dualpipe_lab.ep.overlap.order import Op, Order, Ticks
from dualpipe_lab.ep.overlap.simulator import StreamSpans, span_kind, span_of
from dualpipe_lab.ep.router import TopKRouter
from dualpipe_lab.pp.runtime.split_backward import SplitBackward
from dualpipe_lab.timeline import Span, Time
from dualpipe_lab.world.context import rank_context


class InterruptibleLayer(nn.Module):
    """An MoE transformer layer whose forward and backward can be interrupted at every all-to-all.

    Args:
        attention: from `x_TD` to `a_TD`: attention, its norm and its residual; any module.
        router: of all experts, the same on every rank.
        experts: the sharded experts.
        fixed: `experts_TK` where a token's experts do not depend on it: ranks exchange no counts at run time, so the
            all-to-alls of a pair are its only messages.  All ranks construct the layer then.
    """

    def __init__(
        self, attention: nn.Module, router: TopKRouter, experts: moe.Experts, fixed: Tensor | None = None
    ) -> None:
        super().__init__()
        self.attention, self.router, self.experts = attention, router, experts
        self._routes = None if fixed is None else self._plan(fixed)
        if fixed is not None:
            router.choose = lambda logits: fixed  # type: ignore[method-assign]

    def begin(self) -> "LayerPass":
        """Return the pass of one microbatch through this layer."""
        return LayerPass(self)

    def routes_of(self, experts: Tensor) -> moe.Routes:
        """Return the routes of a microbatch; its ranks exchange counts unless they are fixed."""
        return self._plan(experts) if self._routes is None else self._routes

    def _plan(self, experts: Tensor) -> moe.Routes:
        return moe.plan_routes(experts, self.experts.num_experts, self.experts.ep)


class LayerPass:
    """One microbatch in one layer: the ten pieces, in the order of their dependencies.

    The pieces that launch an all-to-all return at once; `wait` is called before the next piece.
    """

    def __init__(self, layer: InterruptibleLayer) -> None:
        self.layer, self.group = layer, layer.experts.ep.group
        self._held: dict[str, Any] = {}
        self._pending: Pending[Tensor] | None = None

    def wait(self) -> None:
        """Complete the all-to-all that was launched last."""
        assert self._pending is not None
        self._pending.wait()

    def attention(self, x: Tensor) -> None:
        """A_F: attention and router."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            a = self.layer.attention(x)
            routing = self.layer.router(a)
        roots = [get_gradient_edge(a), get_gradient_edge(routing.weights)]
        routes = self.layer.routes_of(routing.indices)
        self._held = {
            "split": SplitBackward(roots, [x]), "a": a.detach(), "weights": routing.weights.detach(),
            "routes": routes,
        }  # fmt: skip

    def dispatch(self) -> None:
        """D_F: launch the dispatch."""
        routes = self._held["routes"]
        self._launch(moe.permute(self._held["a"], routes), back=False)

    def experts(self) -> None:
        """M_F: the experts of this rank."""
        routes = self._held["routes"]
        rows = moe.regroup(self._received(), routes)
        y, self._held["for_input_grad"] = moe.experts_forward(rows, routes.counts, self.layer.experts.weights)
        self._held["y"] = moe.ungroup(y, routes)

    def combine(self) -> None:
        """C_F: launch the combine."""
        self._launch(self._held.pop("y"), back=True)

    def output(self) -> Tensor:
        """Return `y_TD`: the weighted sum of the experts' results plus the residual."""
        if "output" not in self._held:
            held = self._held
            held["y_TKD"] = moe.unpermute(self._received(), held["routes"])
            held["output"] = held.pop("a") + moe.weighted_sum(held["y_TKD"], held["weights"])
        output: Tensor = self._held["output"]
        return output

    def combine_grad(self, dy: Tensor) -> None:
        """C_B: compute the gradient of the router's weights, and launch the exchange of the results' gradients."""
        held = self._held
        self.output()  # if no later layer has asked for it
        del held["output"]
        rows, held["dweights"] = moe.weighted_sum_grad(dy, held.pop("y_TKD"), held.pop("weights"))
        held["da"] = dy
        self._launch(moe.unpermute_grad(rows, held["routes"]), back=False)

    def experts_input_grad(self) -> None:
        """M_B: the input gradient of the experts."""
        held, weights = self._held, self.layer.experts.weights
        grad = moe.regroup(self._received(), held["routes"])
        dx, held["for_weight_grad"] = moe.experts_input_grad(grad, weights, held.pop("for_input_grad"))
        held["dx"] = moe.ungroup(dx, held["routes"])

    def experts_weight_grad(self) -> None:
        """M_W: accumulate the weight gradients of the experts."""
        found = moe.experts_weight_grad(self._held.pop("for_weight_grad"))
        for parameter, grad in zip(self.layer.experts.weights, found, strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def dispatch_grad(self) -> None:
        """D_B: launch the exchange of the rows' gradients."""
        self._launch(self._held.pop("dx"), back=True)

    def attention_input_grad(self) -> Tensor:
        """A_B: return `dx_TD`, the input gradient of attention and router."""
        held = self._held
        da = held.pop("da") + moe.permute_grad(self._received(), held.pop("routes"))
        (dx,) = held["split"].input_grad([da, held.pop("dweights")])
        assert dx is not None, "the attention has a residual"
        return dx

    def attention_weight_grad(self) -> None:
        """A_W: accumulate the weight gradients of attention and router."""
        self._held.pop("split").weight_grad()

    @property
    def is_over(self) -> bool:
        """Whether the backward has ended and no tensor is held."""
        return not self._held

    def _launch(self, rows: Tensor, back: bool) -> None:
        splits = self._held["routes"].splits
        self._pending = start_rows(rows, splits.transposed if back else splits, self.group)

    def _received(self) -> Tensor:
        """Return the received rows and drop the handle, which holds them too."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


class MicrobatchPass:
    """The forward of one microbatch through layers, and later its backward.

    Args:
        layers: in the order of the forward.
        x: `x_TD`, the input of the first one.

    Attributes:
        dy: `dy_TD`, the gradient of the output; set it before the backward.
        dx: `dx_TD`, the gradient of the input; None until A_B of layer 0 has run.
    """

    def __init__(self, layers: Sequence[InterruptibleLayer], x: Tensor) -> None:
        self._passes = [layer.begin() for layer in layers]
        self._x: Tensor | None = x
        self.dy: Tensor | None = None
        self.dx: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """`y_TD`, after the wait for C_F of the last layer."""
        return self._passes[-1].output()

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
        here, kind = self._passes[op.layer], op.kind
        if kind == "A_F":
            here.attention(self._input_of(op.layer))
        elif kind == "C_B":
            here.combine_grad(self._output_grad_of(op.layer))
        elif kind == "A_B":
            self.dx = here.attention_input_grad()
        else:
            {
                "D_F": here.dispatch, "M_F": here.experts, "C_F": here.combine,
                "M_B": here.experts_input_grad, "M_W": here.experts_weight_grad, "D_B": here.dispatch_grad,
                "A_W": here.attention_weight_grad,
            }[kind]()  # fmt: skip

    def _input_of(self, layer: int) -> Tensor:
        if layer:
            return self._passes[layer - 1].output()
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
    forward: MicrobatchPass | None = None,
    backward: MicrobatchPass | None = None,
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

    def run(self, op: Op, microbatch: MicrobatchPass) -> None:
        clock = self.context.clock
        named = self.context.span(span_kind(op), op.layer, self.order.microbatch(op), str(op))
        with named if self.traced else nullcontext():
            started = clock.now()
            microbatch.run(op)
            if self.ticks:
                clock.wait_until(started + int(self.ticks[op.kind]))
        self.record(self.compute, op, started, clock.now())

    def wait(self, op: Op, microbatch: MicrobatchPass) -> None:
        known = len(self.context.trace.collectives)
        microbatch.wait(op)
        for span in self.context.trace.collectives[known:]:  # none if it took no time
            self.record(self.comm, op, span.start, span.end)

    def record(self, row: list[Span], op: Op, start: Time, end: Time) -> None:
        if end > start:
            row.append(span_of(self.order, op, 0, start - self.zero, end - self.zero))
