"""Layers that can be interrupted at every all-to-all, and `execute`, which runs an `Order` through them.

Chapters: book/ep/one-f-one-b-overlap, book/whole/two-tokens.  In: an `Order`, a `MicrobatchPass` for each half, whose
input is `x_..D` or token ids.  Out: `y_..D`; in the backward `dx_..D` and `.grad`.
A layer with experts is split into ten pieces, thirteen with a shared expert.  Each computes, or launches an all-to-all,
and stores its tensors for a later piece.  An all-to-all is waited for right before its output is used.
The backward of A, S and P is autograd's, split into I and W, so that W fills the window of an all-to-all; all others
are written out (`dualpipe_lab.ep.moe`).
Outputs and gradients have the same bits for every order, which decides when an operation runs, not what it computes.
Elsewhere: Megatron `TransformerLayerNode` in fine_grained_callables.py.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dualpipe_lab.comm import Pending
from dualpipe_lab.ep.all_to_all import all_to_all_rows_async
from dualpipe_lab.ep.moe import Experts, operators
from dualpipe_lab.ep.moe import experts as grouped
from dualpipe_lab.ep.moe.permutation import Routes, plan_routes
from dualpipe_lab.ep.overlap.order import PLAIN, ROUTED, SHARED, Op, Order, Ticks
from dualpipe_lab.ep.overlap.simulator import ISSUE, RUN, Call, StreamSpans, host_calls, span_kind, span_of
from dualpipe_lab.ep.router import Routing, kept_positions, leave_out, put_back
from dualpipe_lab.launch.context import rank_context
from dualpipe_lab.pp.runtime.split_backward import SplitBackward, accumulate_grad, announce_weight_grad
from dualpipe_lab.pp.runtime.stage import Loss, has_gradient, scaled
from dualpipe_lab.timeline import Span

# the method of a layer's pass for each kind; some take the layer's input or its output's gradient
_PIECES = {
    "A_F": "attention", "D_F": "dispatch", "S_F": "shared", "M_F": "experts", "C_F": "combine",
    "C_B": "combine_grad", "S_B": "shared_input_grad", "S_W": "shared_weight_grad", "M_B": "experts_input_grad",
    "M_W": "experts_weight_grad", "D_B": "dispatch_grad", "A_B": "attention_input_grad", "A_W": "attention_weight_grad",
    "P_F": "forward", "P_B": "input_grad", "P_W": "weight_grad",
}  # fmt: skip
_TAKES_INPUT, _TAKES_OUTPUT_GRAD, _RETURNS_INPUT_GRAD = ("A_F", "P_F"), ("C_B", "S_B", "P_B"), ("A_B", "P_B")


@dataclass
class MicrobatchContext:
    """What the layers of a stage share for one microbatch."""

    weight: float = 1  # of the microbatch in the loss
    extra: Mapping[str, Any] = field(default_factory=dict)  # the stage's inputs besides x
    loss_fn: Loss | None = None  # None where only the output is wanted
    tensors: dict[str, Tensor] = field(default_factory=dict)  # that one layer keeps for a later one
    grads: dict[str, Tensor] = field(default_factory=dict)  # of these tensors

    def loss_of(self, output: Tensor) -> Tensor:
        """Return the microbatch's weighted loss; without a loss function the output itself."""
        return output if self.loss_fn is None else scaled(self.loss_fn(output), self.weight, [output])


class Routed(NamedTuple):
    """The results of A_F."""

    a: Tensor  # a_..D, after attention and its residual
    n: Tensor  # n_TD, sent to the experts: a itself, or its norm
    routing: Routing
    loss: Tensor | None = None  # what this layer adds to the loss, a scalar, such as a balance loss
    kept: Tensor | None = None  # positions of the tokens of n among those of a; None: all, there is no padding


class OverlappableLayer(nn.Module):
    """An MoE transformer layer whose forward and backward can be interrupted at every all-to-all.

    Args:
        attention: from `x_..D` to `a_..D`: attention, its norm and its residual; any module.
        router: of all experts, the same on every rank.
        experts: the sharded experts.
        fixed: `experts_TK` where a token's experts do not depend on it: ranks exchange no counts at run time, so the
            all-to-alls of a pair are its only messages.  All ranks construct the layer then.
        shared: from `n_TD` to `y_TD`, a shared expert.
    """

    def __init__(
        self,
        attention: nn.Module,
        router: Any,
        experts: Experts,
        fixed: Tensor | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.router, self.experts, self.shared = attention, router, experts, shared
        self.letters = ROUTED if shared is None else SHARED
        self._routes: Routes | None = None
        if fixed is not None:
            router.choose = lambda logits: fixed
            self._routes = self.routes_of(fixed)

    def begin(self, given: MicrobatchContext | None = None) -> "LayerPass":
        return LayerPass(self, given or MicrobatchContext())

    def routes_of(self, experts: Tensor) -> Routes:
        """Return the routes of a microbatch; its ranks exchange counts unless they are fixed."""
        if self._routes is not None:
            return self._routes
        return plan_routes(experts, self.experts.num_experts, self.experts.ep)

    def route(self, x: Tensor, padding: Tensor | None = None) -> Routed:
        """Return the results of A_F; `padding_..`: True where a position is padding, which is not routed."""
        a = self.attention(x)
        rows = a.flatten(0, -2)
        kept = kept_positions(padding, len(rows))
        tokens = leave_out(rows, kept)
        return Routed(a, tokens, self.router(tokens), kept=kept)

    def add(self, a: Tensor, y: Tensor) -> Tensor:
        """Return the output `y_..D`, given `a_..D` and the results `y_TD` for it."""
        return a + y.view(a.shape)

    def grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, `dy_TD`, given that of the output."""
        return dy.flatten(0, -2)


class LayerPass:
    """One microbatch in one layer: a method per piece, in the order of their dependencies.

    The pieces that launch an all-to-all return at once; `wait` is called before the next piece.  The layer computes
    y = a + sum over j of w_j Y_j + S: a is x after attention and its residual, Y_j the results of a token's experts.
    Between M_B and M_W a microbatch holds the inputs and output gradients of the experts' products, between A_B and
    A_W (S_B and S_W) the intermediates of the split backward.
    """

    def __init__(self, layer: OverlappableLayer, given: MicrobatchContext) -> None:
        self.layer, self.group, self._weight = layer, layer.experts.ep.group, given.weight
        self._padding: Tensor | None = given.extra.get("padding")
        self._kept: Tensor | None = None
        self.loss: Tensor | None = None  # after A_F, what this layer adds to the weighted loss
        self._held: dict[str, Any] = {}
        self._pending: Pending[Tensor] | None = None

    def wait(self) -> None:
        assert self._pending is not None
        self._pending.wait()

    def attention(self, x: Tensor) -> None:
        x, is_graded = x.detach(), torch.is_grad_enabled()
        x.requires_grad_(is_graded)
        a, n, routing, loss, self._kept = self.layer.route(x, self._padding)
        if is_graded:
            roots = [a, n, routing.weights, *([] if loss is None else [loss])]
            self._held["split"] = SplitBackward([get_gradient_edge(root) for root in roots], [x], has_hooks=False)
        self.loss = None if loss is None else loss.detach() * self._weight
        self._held |= {
            "a": a.detach(), "n": n.detach(), "weights": routing.weights.detach(),
            "routes": self.layer.routes_of(routing.indices),
        }  # fmt: skip

    def dispatch(self) -> None:
        n = self._held.pop("n") if self.layer.shared is None else self._held["n"]  # S_F takes it too
        self._launch(operators.permute(n, self._held["routes"]), back=False)

    def shared(self) -> None:
        assert self.layer.shared is not None, "the letters of a layer with a shared expert"
        n = self._held["n"].detach().requires_grad_(torch.is_grad_enabled())
        y = self.layer.shared(n)
        if y.requires_grad:
            self._held["shared_split"] = SplitBackward([get_gradient_edge(y)], [n], has_hooks=False)
        self._held["shared_y"] = y.detach()

    def experts(self) -> None:
        routes = self._held["routes"]
        rows = operators.sort_by_expert(self._received(), routes)
        y, self._held["for_input_grad"] = grouped.experts_forward(rows, routes.counts, self.layer.experts.weights)
        self._held["y"] = operators.unsort_by_expert(y, routes)

    def combine(self) -> None:
        self._launch(self._held.pop("y"), back=True)

    def output(self) -> Tensor:
        """Return `y_..D`: the weighted results and the shared expert's, added to the attention's output."""
        held = self._held
        if "output" not in held:
            held["y_TKD"] = operators.unpermute(self._received(), held["routes"])
            y = operators.weighted_sum(held["y_TKD"], held["weights"])
            y = y + held.pop("shared_y") if "shared_y" in held else y
            held.pop("n", None)
            y = y if self._padding is None else put_back(y, self._kept, self._padding.numel())
            held["output"] = self.layer.add(held.pop("a"), y)
        output: Tensor = held["output"]
        return output

    def combine_grad(self, dy: Tensor) -> None:
        """C_B: compute the gradient of the router's weights, and launch the exchange of the results' gradients."""
        held = self._held
        self.output()  # if no later layer has asked for it
        del held["output"]
        dresults, y, weights = self._grad_of_results(dy), held.pop("y_TKD"), held.pop("weights")
        rows, held["dweights"] = operators.weighted_sum_grad(dresults, y, weights)
        held["da"] = dy
        self._launch(operators.unpermute_grad(rows, held["routes"]), back=False)

    def shared_input_grad(self, dy: Tensor) -> None:
        (self._held["dn"],) = self._held["shared_split"].input_grad([self._grad_of_results(dy)])

    def shared_weight_grad(self) -> None:
        self._held.pop("shared_split").weight_grad()

    def experts_input_grad(self) -> None:
        held, weights = self._held, self.layer.experts.weights
        grad = operators.sort_by_expert(self._received(), held["routes"])
        dx, held["for_weight_grad"] = grouped.experts_input_grad(grad, weights, held.pop("for_input_grad"))
        held["dx"] = operators.unsort_by_expert(dx, held["routes"])

    def experts_weight_grad(self) -> None:
        found = grouped.experts_weight_grad(self._held.pop("for_weight_grad"))
        for parameter, grad in zip(self.layer.experts.weights, found, strict=True):
            if parameter.requires_grad:
                announce_weight_grad(parameter, is_made=True)
                # no engine of autograd computes this gradient: the call shows it to DDP and ZeRO
                accumulate_grad(parameter, grad, is_new=True)

    def dispatch_grad(self) -> None:
        self._launch(self._held.pop("dx"), back=True)

    def attention_input_grad(self) -> Tensor:
        """A_B: return `dx_..D`, the input gradient of attention and router; the layer's own loss begins here."""
        held = self._held
        held.pop("dresults")
        dn = operators.permute_grad(self._received(), held.pop("routes"))
        dn = dn + held.pop("dn") if "dn" in held else dn
        grads = [held.pop("da"), dn, held.pop("dweights")]
        if self.loss is not None:
            grads.append(torch.full_like(self.loss, self._weight))
        (dx,) = held["split"].input_grad(grads)
        self._padding = self._kept = None
        assert dx is not None, "the attention has a residual"
        return dx

    def attention_weight_grad(self) -> None:
        self._held.pop("split").weight_grad()

    @property
    def is_over(self) -> bool:
        return not self._held

    def _grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, for C_B and S_B, whichever comes first."""
        if "dresults" not in self._held:
            self._held["dresults"] = leave_out(self.layer.grad_of_results(dy), self._kept)
        found: Tensor = self._held["dresults"]
        return found

    def _launch(self, rows: Tensor, back: bool) -> None:
        splits = self._held["routes"].splits
        self._pending = all_to_all_rows_async(rows, splits.transposed if back else splits, self.group)

    def _received(self) -> Tensor:
        """Return the received rows and drop the handle, which holds them too."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


class PlainLayer:
    """A function without all-to-alls, as one piece of an order.

    The layers of a stage are a chain: each takes the output of the one before.  A tensor that two layers in one piece
    use is kept by the first and taken by a later one, which leaves the tensor's gradient for the first.

    Args:
        function: of x, which it does not change, and of what the microbatch is given; returns the output, or the loss.
        keeps: the name of the tensor that the function puts into `MicrobatchContext.tensors`.
        takes: the name of the tensor that it reads there.
    """

    letters = PLAIN

    def __init__(
        self,
        function: Callable[[Tensor, MicrobatchContext], Tensor],
        keeps: str | None = None,
        takes: str | None = None,
    ) -> None:
        self.function, self.keeps, self.takes = function, keeps, takes

    def begin(self, given: MicrobatchContext | None = None) -> "PlainPass":
        return PlainPass(self, given or MicrobatchContext())


class PlainPass:
    """One microbatch in a layer in one piece."""

    loss: Tensor | None = None

    def __init__(self, layer: PlainLayer, given: MicrobatchContext) -> None:
        self._layer, self._given = layer, given
        self._output: Tensor | None = None
        self._split: SplitBackward | None = None
        self._inputs: list[Tensor] = []
        self._has_graph: list[bool] = []  # of the output, and of what is kept

    def forward(self, x: Tensor) -> None:
        layer, shared, inputs = self._layer, self._given.tensors, [x.detach()]
        if layer.takes is not None:
            inputs.append(shared[layer.takes].detach())
            shared[layer.takes] = inputs[1]
        graded = [one for one in inputs if torch.is_grad_enabled() and has_gradient(one)]
        for one in graded:
            one.requires_grad_()
        outputs = [layer.function(inputs[0], self._given)]
        if layer.takes is not None:
            del shared[layer.takes]
        if layer.keeps is not None:
            outputs.append(shared[layer.keeps])
            shared[layer.keeps] = outputs[1].detach()
        if torch.is_grad_enabled():
            self._inputs, self._has_graph = graded, [one.requires_grad for one in outputs]
            self._split = SplitBackward(
                [get_gradient_edge(one) for one in outputs if one.requires_grad], graded, has_hooks=False
            )
        self._output = outputs[0].detach()

    def output(self) -> Tensor:
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
        assert self._split is not None, "P_B has run"
        self._split.weight_grad()
        self._split = None

    @property
    def is_over(self) -> bool:
        return self._split is None and self._output is None


class MicrobatchPass:
    """The forward of one microbatch through layers, and later its backward.

    Args:
        layers: in the order of the forward.
        x: `x_..D`, the input of the first one, or token ids where that is an embedding.
        given: what the layers share for this microbatch (default: the weight 1 in the loss).

    Attributes:
        letters: of every layer.
        dy: `dy_..D`, the gradient of the output; set it before the backward.
        dx: `dx_..D`, the gradient of the input; None until the backward of layer 0 has run, and for token ids.
    """

    def __init__(
        self, layers: Sequence[OverlappableLayer | PlainLayer], x: Tensor, given: MicrobatchContext | None = None
    ) -> None:
        self.given, self.letters = given or MicrobatchContext(), [layer.letters for layer in layers]
        self._passes: list[Any] = [layer.begin(self.given) for layer in layers]
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
        for kind, layer in op.pieces:
            piece = getattr(self._passes[layer], _PIECES[kind])
            if kind in _TAKES_INPUT:
                found = piece(self._input_of(layer))
            elif kind in _TAKES_OUTPUT_GRAD:  # the input gradient of the layer behind
                dy = self.dy if layer == len(self._passes) - 1 else self.dx
                assert dy is not None, "set dy of the microbatch before its backward"
                found = piece(dy)
            else:
                found = piece()
            if kind in _RETURNS_INPUT_GRAD:
                self.dx = found

    def wait(self, op: Op) -> None:
        self._passes[op.layer].wait()

    def _input_of(self, layer: int) -> Tensor:
        if layer:
            y: Tensor = self._passes[layer - 1].output()
            return y
        assert self._x is not None
        x, self._x = self._x, None
        return x


class Pass(Protocol):
    """One half of an order for `execute`: a `MicrobatchPass`, or a stage that runs without pieces."""

    def run(self, op: Op) -> None: ...

    def wait(self, op: Op) -> None: ...


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
    context = rank_context()
    clock = context.clock
    zero, compute, comm = clock.now(), list[Span](), list[Span]()
    for verb, op in calls or host_calls(order):
        microbatch = forward if op.is_forward else backward
        assert microbatch is not None
        if verb == ISSUE:
            microbatch.run(op)
        elif verb == RUN:
            named = context.span(span_kind(op), op.layer, order.microbatch(op), str(op))
            with named if traced else nullcontext():
                started = clock.now()
                microbatch.run(op)
                if ticks:
                    clock.wait_until(started + int(ticks[op.kind]))
            compute.append(span_of(order, op, 0, started - zero, clock.now() - zero))
        else:
            known = len(context.trace.collectives)
            microbatch.wait(op)
            made = context.trace.collectives[known:]
            comm += [span_of(order, op, 0, one.start - zero, one.end - zero) for one in made]
    return StreamSpans(*(tuple(span for span in row if span.duration) for row in (compute, comm)))
