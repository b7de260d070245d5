"""Layers that can be interrupted at every all-to-all, forward and backward: `InterruptibleLayer`; layers in one piece.

Chapters: book/ep/one-f-one-b-overlap, book/whole/two-tokens.  In: `x_..D`, or token ids.  Out: `y_..D`; in the backward
`dx_..D` and `.grad`.
A layer with experts is split into ten pieces, thirteen with a shared expert.  Each computes, or launches an all-to-all,
and stores its tensors for a later piece (a: after attention and its residual; n: its norm, or a where there is none):
  A  a, n and the router's weights and experts, from x        S  the shared expert of n
  D  k copies of each token to the ranks of its experts       M  the experts of this rank        C  results back
  y = a + sum over j of w_j Y_j + S
The backward of A and of S is autograd's, split into I and W; all others are written out (`dualpipe_lab.ep.moe`).
Between M_B and M_W a microbatch holds the inputs and output gradients of the experts' products, between A_B and A_W
(S_B and S_W) the intermediates of the split backward.
A layer that adds to the loss, such as a balance loss per sequence, returns it from A; its gradient starts in A_B.
Gradients that no engine of autograd computes are added by `accumulate_grad`, so that Ddp and ZeRO see them.
  P  a layer without all-to-alls, in one piece: an embedding, a dense layer, norm and head (`PlainLayer`)
P_B and P_W are the two halves of autograd's backward, so that P_W fills the window of another layer's all-to-all.  P_B
returns None for token ids, which have no gradient.
The layers of a stage are a chain: each takes the output of the one before.  A tensor that two layers in one piece use
is kept by the first and taken by a later one (`LinkedLayer`), which leaves the tensor's gradient for the first.
The last layer of the last stage may compute the loss, where the loss has weights: its output is the loss, with the
gradient 1.
Elsewhere: Megatron `TransformerLayerNode` in fine_grained_callables.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dualpipe_lab.comm import Pending
from dualpipe_lab.ep import moe
from dualpipe_lab.ep.all_to_all import start_rows
from dualpipe_lab.ep.overlap.order import PLAIN, ROUTED
from dualpipe_lab.ep.router import Routing, TopKRouter
from dualpipe_lab.pp.runtime.split_backward import SplitBackward, accumulate_grad, announce_weight_grad
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


class Routed(NamedTuple):
    """What A_F computes.

    Attributes:
        a: `a_..D`, after attention and its residual; the layer adds the experts' results to it.
        n: `n_TD`, what is sent to the experts; `a` itself, or its norm.
        routing: of these tokens.
        loss: this layer's summand of the stage's loss, a scalar; None for none.
    """

    a: Tensor
    n: Tensor
    routing: Routing
    loss: Tensor | None = None


class RoutedLayer:
    """A layer with experts that can be interrupted: what its pieces need of it.

    Attributes:
        letters: of its pieces, "ADMC" or "ASDMC".
        experts: the sharded experts.
        shared: from `n_TD` to `y_TD`, the shared expert; None without one.
    """

    letters = ROUTED
    experts: moe.Experts
    shared: Callable[[Tensor], Tensor] | None = None
    _routes: moe.Routes | None = None

    def fix_routes(self, router: Any, fixed: Tensor) -> None:
        """Let a `TopKRouter` choose `fixed_TK` whatever its logits are; all ranks of the experts call this."""
        router.choose = lambda logits: fixed
        self._routes = self.routes_of(fixed)

    def begin(self, weight: float = 1, given: Given | None = None) -> "LayerPass":
        """Return the pass of one microbatch through this layer."""
        return LayerPass(self, weight)

    def routes_of(self, experts: Tensor) -> moe.Routes:
        """Return the routes of a microbatch; its ranks exchange counts unless they are fixed."""
        if self._routes is not None:
            return self._routes
        return moe.plan_routes(experts, self.experts.num_experts, self.experts.ep)

    def route(self, x: Tensor) -> Routed:
        """Compute A: attention, norm and router of `x_..D`."""
        raise NotImplementedError

    def add(self, a: Tensor, y: Tensor) -> Tensor:
        """Return the output `y_..D`, given `a_..D` and the results `y_TD` for it."""
        raise NotImplementedError

    def grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, `dy_TD`, given that of the output."""
        raise NotImplementedError


class InterruptibleLayer(RoutedLayer, nn.Module):
    """An MoE transformer layer whose forward and backward can be interrupted at every all-to-all.

    Args:
        attention: from `x_..D` to `a_..D`: attention, its norm and its residual; any module.
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
        if fixed is not None:
            self.fix_routes(router, fixed)

    def route(self, x: Tensor) -> Routed:
        """Compute A: attention and router of `x_..D`."""
        a = self.attention(x)
        tokens = a.flatten(0, -2)
        return Routed(a, tokens, self.router(tokens))

    def add(self, a: Tensor, y: Tensor) -> Tensor:
        """Return the output `y_..D`, given `a_..D` and the results `y_TD` for it."""
        return a + y.view(a.shape)

    def grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, `dy_TD`, given that of the output."""
        return dy.flatten(0, -2)


class LayerPass:
    """One microbatch in one layer: the pieces, in the order of their dependencies.

    The pieces that launch an all-to-all return at once; `wait` is called before the next piece.

    Args:
        layer: the layer.
        weight: of the microbatch in the loss, by which the layer's own loss is multiplied.

    Attributes:
        loss: after A_F, the layer's weighted summand of the loss, detached; None for none.
    """

    def __init__(self, layer: RoutedLayer, weight: float = 1) -> None:
        self.layer, self.group, self._weight = layer, layer.experts.ep.group, weight
        self.loss: Tensor | None = None
        self._held: dict[str, Any] = {}
        self._pending: Pending[Tensor] | None = None

    def wait(self) -> None:
        """Complete the all-to-all that was launched last."""
        assert self._pending is not None
        self._pending.wait()

    def attention(self, x: Tensor) -> None:
        """A_F: attention and router."""
        x, is_graded = x.detach(), torch.is_grad_enabled()
        x.requires_grad_(is_graded)
        a, n, routing, loss = self.layer.route(x)
        if is_graded:
            roots = [a, n, routing.weights, *([] if loss is None else [loss])]
            self._held["split"] = SplitBackward([get_gradient_edge(root) for root in roots], [x])
        self.loss = None if loss is None else loss.detach() * self._weight
        self._held |= {
            "a": a.detach(), "n": n.detach(), "weights": routing.weights.detach(),
            "routes": self.layer.routes_of(routing.indices),
        }  # fmt: skip

    def dispatch(self) -> None:
        """D_F: launch the dispatch."""
        n = self._held.pop("n") if self.layer.shared is None else self._held["n"]  # S_F takes it too
        self._launch(moe.permute(n, self._held["routes"]), back=False)

    def shared(self) -> None:
        """S_F: the shared expert."""
        assert self.layer.shared is not None, "the letters of a layer with a shared expert"
        n = self._held["n"].detach().requires_grad_(torch.is_grad_enabled())
        y = self.layer.shared(n)
        if y.requires_grad:
            self._held["shared_split"] = SplitBackward([get_gradient_edge(y)], [n])
        self._held["shared_y"] = y.detach()

    def experts(self) -> None:
        """M_F: the experts of this rank."""
        routes = self._held["routes"]
        rows = moe.regroup(self._received(), routes)
        y, self._held["for_input_grad"] = moe.experts_forward(rows, routes.counts, self.layer.experts.weights)
        self._held["y"] = moe.ungroup(y, routes)

    def combine(self) -> None:
        """C_F: launch the exchange of the results."""
        self._launch(self._held.pop("y"), back=True)

    def output(self) -> Tensor:
        """Return `y_..D`: the weighted results and the shared expert's, added to the attention's output."""
        held = self._held
        if "output" not in held:
            held["y_TKD"] = moe.unpermute(self._received(), held["routes"])
            y = moe.weighted_sum(held["y_TKD"], held["weights"])
            y = y + held.pop("shared_y") if "shared_y" in held else y
            held.pop("n", None)
            held["output"] = self.layer.add(held.pop("a"), y)
        output: Tensor = held["output"]
        return output

    def combine_grad(self, dy: Tensor) -> None:
        """C_B: compute the gradient of the router's weights, and launch the exchange of the results' gradients."""
        held = self._held
        self.output()  # if no later layer has asked for it
        del held["output"]
        rows, held["dweights"] = moe.weighted_sum_grad(
            self._grad_of_results(dy), held.pop("y_TKD"), held.pop("weights")
        )
        held["da"] = dy
        self._launch(moe.unpermute_grad(rows, held["routes"]), back=False)

    def shared_input_grad(self, dy: Tensor) -> None:
        """S_B: the input gradient of the shared expert."""
        (self._held["dn"],) = self._held["shared_split"].input_grad([self._grad_of_results(dy)])

    def shared_weight_grad(self) -> None:
        """S_W: accumulate the weight gradients of the shared expert."""
        self._held.pop("shared_split").weight_grad()

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
            if parameter.requires_grad:
                announce_weight_grad(parameter, is_made=True)
                accumulate_grad(parameter, grad, is_new=True)

    def dispatch_grad(self) -> None:
        """D_B: launch the exchange of the rows' gradients."""
        self._launch(self._held.pop("dx"), back=True)

    def attention_input_grad(self) -> Tensor:
        """A_B: return `dx_..D`, the input gradient of attention and router."""
        held = self._held
        held.pop("dresults")
        dn = moe.permute_grad(self._received(), held.pop("routes"))
        dn = dn + held.pop("dn") if "dn" in held else dn
        grads = [held.pop("da"), dn, held.pop("dweights")]
        if self.loss is not None:
            grads.append(torch.full_like(self.loss, self._weight))
        (dx,) = held["split"].input_grad(grads)
        assert dx is not None, "the attention has a residual"
        return dx

    def attention_weight_grad(self) -> None:
        """A_W: accumulate the weight gradients of attention and router."""
        self._held.pop("split").weight_grad()

    @property
    def is_over(self) -> bool:
        """Whether the backward has ended and no tensor is held."""
        return not self._held

    def _grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, for C_B and S_B, whichever comes first."""
        if "dresults" not in self._held:
            self._held["dresults"] = self.layer.grad_of_results(dy)
        found: Tensor = self._held["dresults"]
        return found

    def _launch(self, rows: Tensor, back: bool) -> None:
        splits = self._held["routes"].splits
        self._pending = start_rows(rows, splits.transposed if back else splits, self.group)

    def _received(self) -> Tensor:
        """Return the received rows and drop the handle, which holds them too."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


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


class PlainLayer(LinkedLayer):
    """A function or module without all-to-alls, as one piece of an order.

    Args:
        function: of one tensor, which it does not change; returns one tensor.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda x, _, given: Linked(function(x)))
