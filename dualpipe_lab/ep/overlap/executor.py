"""Layers that can be interrupted at every all-to-all, and `execute`, which runs an `Order` through them.

Chapters: book/ep/one-f-one-b-overlap, book/whole/two-tokens.  In: an `Order`, a `MicrobatchPass` for each half, whose
input is `x_..D` or token ids.  Out: `y_..D`; in the backward `dx_..D` and `.grad`.
A layer is a table of pieces, one for each letter of its operations.  A piece takes tensors of the microbatch by name
and gives others; its backward takes their gradients and gives those of its inputs.  An all-to-all is waited for right
before its output is used.
Outputs and gradients have the same bits for every order, which decides when an operation runs, not what it computes.
Elsewhere: Megatron `TransformerLayerNode` in fine_grained_callables.py.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

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

# Tensors of a microbatch between its pieces, or their gradients, by name: each is given once and taken once.  Every
# layer takes `x` and gives the next one's; `rows` under way are a `Pending`; a `loss` is part of the microbatch's.
Named: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class MicrobatchContext:
    """What the layers of a stage are given for one microbatch."""

    weight: float = 1  # of the microbatch in the loss
    extra: Mapping[str, Any] = field(default_factory=dict)  # the stage's inputs besides x
    loss_fn: Loss | None = None  # None where only the output is wanted

    def score(self, output: Tensor) -> Named:
        """Return the weighted loss of the output; without a loss function the output itself."""
        return {"x": output} if self.loss_fn is None else {"loss": scaled(self.loss_fn(output), self.weight, [output])}


class Piece(NamedTuple):
    """One letter of a layer: functions that take what they need out of a `Named` and put their results into it."""

    forward: Callable[[Named], None]
    input_grad: Callable[[Named], None]
    weight_grad: Callable[[], None] = lambda: None


class AutogradPiece:
    """A piece whose backward is autograd's, split into I and W, so that W fills the window of an all-to-all.

    Between I and W it holds the intermediates of the split backward.

    Args:
        function: of tensors that it does not change; returns tensors by name.
        takes: the names of its arguments.
    """

    def __init__(self, function: Callable[..., Named], *takes: str) -> None:
        self.function, self.takes = function, takes
        self.split: SplitBackward | None = None

    def forward(self, values: Named) -> None:
        inputs, is_graded = [values.pop(name).detach() for name in self.takes], torch.is_grad_enabled()
        taken = zip(self.takes, inputs, strict=True)
        graded = {name: x.requires_grad_() for name, x in taken if is_graded and has_gradient(x)}
        outputs = self.function(*inputs)
        values.update({name: y.detach() for name, y in outputs.items()})
        if is_graded:
            self._inputs, self._has_graph = graded, {name: y.requires_grad for name, y in outputs.items()}
            self._seed = {"loss": torch.ones_like(outputs["loss"])} if "loss" in outputs else {}
            roots = [get_gradient_edge(y) for y in outputs.values() if y.requires_grad]
            self.split = SplitBackward(roots, list(graded.values()), has_hooks=False)

    def input_grad(self, grads: Named) -> None:
        assert self.split is not None, "the forward has run"
        grads.update(self._seed)
        incoming = [(grads.pop(name), has_graph) for name, has_graph in self._has_graph.items()]
        found = self.split.input_grad([grad for grad, has_graph in incoming if has_graph])
        for (name, x), dx in zip(self._inputs.items(), found, strict=True):
            grads[name] = torch.zeros_like(x) if dx is None else dx
        del self._inputs

    def weight_grad(self) -> None:
        assert self.split is not None, "the input gradient has been computed"
        self.split.weight_grad()
        self.split = None


class Layer(Protocol):
    """What a `MicrobatchPass` goes through; `letters` are those of its forward, as in an `Order`."""

    @property
    def letters(self) -> str: ...

    def begin(self, given: MicrobatchContext) -> Mapping[str, Piece | AutogradPiece]:
        """Return the pieces of a microbatch by letter."""


class Routed(NamedTuple):
    """The results of attention and router."""

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

    def begin(self, given: MicrobatchContext) -> Mapping[str, Piece | AutogradPiece]:
        one = _RoutedPass(self, given)
        return {
            "A": AutogradPiece(one.attention, "x"),
            "D": Piece(partial(one.send, back=False), partial(one.send, back=True)),
            "S": AutogradPiece(one.shared, "n"),
            "M": Piece(one.experts, one.experts_input_grad, one.experts_weight_grad),
            "C": Piece(partial(one.send, back=True), partial(one.send, back=False)),
            "sum": Piece(one.sum, one.sum_grad),
        }

    def routes_of(self, experts: Tensor) -> Routes:
        """Return the routes of a microbatch; its ranks exchange counts unless they are fixed."""
        if self._routes is not None:
            return self._routes
        return plan_routes(experts, self.experts.num_experts, self.experts.ep)

    def route(self, x: Tensor, padding: Tensor | None = None) -> Routed:
        """Run attention and router; `padding_..`: True where a position is padding, which is not routed."""
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


class _RoutedPass:
    """One microbatch in a layer with experts: y = a + sum over j of w_j Y_j + S.

    a is x after attention and its residual, Y_j are the results of a token's experts, S is the shared expert's.
    """

    def __init__(self, layer: OverlappableLayer, given: MicrobatchContext) -> None:
        self.layer, self.weight, self.padding = layer, given.weight, given.extra.get("padding")

    def attention(self, x: Tensor) -> Named:
        a, n, routing, loss, self.kept = self.layer.route(x, self.padding)
        self.routes = self.layer.routes_of(routing.indices)
        given = {"a": a, "rows": operators.permute(n, self.routes), "weights": routing.weights}
        given |= {} if self.layer.shared is None else {"n": n}
        return given if loss is None else given | {"loss": loss * self.weight}

    def send(self, tensors: Named, back: bool) -> None:
        """Launch the exchange of rows, to the ranks of the experts or `back` to those of the tokens."""
        splits = self.routes.splits.transposed if back else self.routes.splits
        tensors["rows"] = all_to_all_rows_async(tensors["rows"], splits, self.layer.experts.ep.group)

    def shared(self, n: Tensor) -> Named:
        assert self.layer.shared is not None, "the letters of a layer with a shared expert"
        return {"shared": self.layer.shared(n)}

    def experts(self, values: Named) -> None:
        rows = operators.sort_by_expert(values.pop("rows"), self.routes)
        y, self.for_input_grad = grouped.experts_forward(rows, self.routes.counts, self.layer.experts.weights)
        values["rows"] = operators.unsort_by_expert(y, self.routes)

    def experts_input_grad(self, grads: Named) -> None:
        grad, saved = operators.sort_by_expert(grads.pop("rows"), self.routes), self.for_input_grad
        del self.for_input_grad
        dx, self.for_weight_grad = grouped.experts_input_grad(grad, self.layer.experts.weights, saved)
        grads["rows"] = operators.unsort_by_expert(dx, self.routes)

    def experts_weight_grad(self) -> None:
        found = grouped.experts_weight_grad(self.for_weight_grad)
        del self.for_weight_grad
        for parameter, grad in zip(self.layer.experts.weights, found, strict=True):
            if parameter.requires_grad:
                announce_weight_grad(parameter, is_made=True)
                # no engine of autograd computes this gradient: the call shows it to DDP and ZeRO
                accumulate_grad(parameter, grad, is_new=True)

    def sum(self, values: Named) -> None:
        self.y_TKD, self.weights = operators.unpermute(values.pop("rows"), self.routes), values.pop("weights")
        y = operators.weighted_sum(self.y_TKD, self.weights)
        y = y if self.layer.shared is None else y + values.pop("shared")
        y = y if self.padding is None else put_back(y, self.kept, self.padding.numel())
        values["x"] = self.layer.add(values.pop("a"), y)

    def sum_grad(self, grads: Named) -> None:
        grads["a"] = dy = grads.pop("x")
        dresults = leave_out(self.layer.grad_of_results(dy), self.kept)
        rows, grads["weights"] = operators.weighted_sum_grad(dresults, self.y_TKD, self.weights)
        del self.y_TKD, self.weights
        grads["rows"] = operators.unpermute_grad(rows, self.routes)
        grads.update({} if self.layer.shared is None else {"shared": dresults})


@dataclass(frozen=True)
class PlainLayer:
    """A function without all-to-alls, as one piece of an order.

    Attributes:
        function: of the microbatch and of tensors that it does not change; returns tensors by name: the next layer's
            `x`, the `loss`, or one that a later layer takes.
        takes: the names of these tensors.
    """

    function: Callable[..., Named]
    takes: tuple[str, ...] = ("x",)
    letters: str = PLAIN

    def begin(self, given: MicrobatchContext) -> Mapping[str, Piece | AutogradPiece]:
        return {"P": AutogradPiece(partial(self.function, given), *self.takes)}


class MicrobatchPass:
    """The forward of one microbatch through layers, and later its backward.

    Args:
        layers: in the order of the forward.
        x: `x_..D`, the input of the first one, or token ids where that is an embedding.
        given: what the layers share for this microbatch (default: the weight 1 in the loss).

    Attributes:
        letters: of every layer.
        loss: the weighted losses of all layers, summed; None if no layer has one.
        dy: `dy_..D`, the gradient of the output; set it before the backward.
        dx: `dx_..D`, after the backward the gradient of the input; None for token ids.
    """

    def __init__(self, layers: Sequence[Layer], x: Tensor | None, given: MicrobatchContext | None = None) -> None:
        self.given, self.letters = given or MicrobatchContext(), [layer.letters for layer in layers]
        self.loss: Tensor | None = None
        self._values, self._grads = Named() if x is None else Named(x=x), Named()
        self._pieces = [layer.begin(self.given) for layer in layers]

    @property
    def output(self) -> Tensor:
        """`y_..D`, after the wait for C_F of the last layer."""
        self._sum_results(len(self._pieces) - 1)
        output: Tensor = self._values["x"]
        return output

    @property
    def dy(self) -> Tensor | None:
        return self._grads.get("x")

    @dy.setter
    def dy(self, grad: Tensor) -> None:
        self._grads["x"] = grad

    @property
    def dx(self) -> Tensor | None:
        return self._grads.get("x")

    def run(self, op: Op) -> None:
        """Run a compute operation, or launch an all-to-all."""
        for kind, layer in op.pieces:
            part, half = kind.split("_")
            piece = self._pieces[layer][part]
            if half == "F":
                if part in "AP":
                    self._sum_results(layer - 1)
                piece.forward(self._values)
                self._add_loss(self._values)
            elif half == "B":
                self._begin_backward()
                if part in "CS" and "x" in self._grads:  # whichever comes first
                    self._pieces[layer]["sum"].input_grad(self._grads)
                piece.input_grad(self._grads)
            else:
                piece.weight_grad()

    def wait(self, op: Op) -> None:
        tensors = self._values if op.is_forward else self._grads
        tensors["rows"] = tensors["rows"].wait()

    def run_loss(self) -> None:
        """Run the loss function as a piece of its own, forward and backward; its output stays."""
        piece, values = AutogradPiece(self.given.score, "x"), Named(x=self.output)
        piece.forward(values)
        self._add_loss(values)
        if piece.split is not None:
            piece.input_grad(self._grads)

    def _sum_results(self, layer: int) -> None:
        """Sum a layer's results when they are needed: a shared expert's may come after those of the combine."""
        if "a" in self._values:
            self._pieces[layer]["sum"].forward(self._values)

    def _add_loss(self, values: Named) -> None:
        if "loss" in values:
            loss = values.pop("loss")
            self.loss = loss if self.loss is None else self.loss + loss

    def _begin_backward(self) -> None:
        """Free the output, which may be summed only now, with what the forward has left."""
        if self._values:
            assert self.output is None or self.dx is not None, "set dy of the microbatch before its backward"
            self._values.clear()


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
