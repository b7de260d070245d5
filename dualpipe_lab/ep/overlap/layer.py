"""`InterruptibleLayer`: an MoE layer whose forward and backward can be interrupted at every all-to-all.

Chapter: book/ep/one-f-one-b-overlap.  In: `x_..D`.  Out: `y_..D`; in the backward `dx_..D` and `.grad`.
A layer is split into ten pieces, thirteen with a shared expert.  Each computes, or launches an all-to-all, and stores
its tensors for a later piece (a: after attention and its residual; n: its norm, or a itself where there is none):
  A  a, n and the router's weights and experts, from x        S  the shared expert of n
  D  k copies of each token to the ranks of its experts       M  the experts of this rank        C  results back
  y = a + sum over j of w_j Y_j + S
The backward of A and of S is autograd's, split into I and W; all others are written out (`dualpipe_lab.ep.moe`).
Between M_B and M_W a microbatch holds the inputs and output gradients of the experts' products, between A_B and A_W
(S_B and S_W) the intermediates of the split backward.
A layer that adds to the loss, such as a balance loss per sequence, returns it from A; its gradient starts in A_B.
Gradients that no engine of autograd computes are added by `accumulate_grad`, so that Ddp and ZeRO see them.
Elsewhere: Megatron `TransformerLayerNode` in fine_grained_callables.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dualpipe_lab.comm import Pending
from dualpipe_lab.ep import moe
from dualpipe_lab.ep.all_to_all import start_rows
from dualpipe_lab.ep.overlap.linked import Given
from dualpipe_lab.ep.overlap.order import ROUTED
from dualpipe_lab.ep.router import Routing, TopKRouter
from dualpipe_lab.pp.runtime.split_backward import SplitBackward, accumulate_grad, announce_weight_grad


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


class Routes(Protocol):
    """A layer that can be interrupted: what its pieces need of it.

    Attributes:
        letters: of its pieces, "ADMC" or "ASDMC".
        experts: the sharded experts.
        shared: from `n_TD` to `y_TD`, the shared expert; None without one.
    """

    letters: str
    experts: moe.Experts
    shared: Callable[[Tensor], Tensor] | None

    def route(self, x: Tensor) -> Routed:
        """Compute A: attention, norm and router of `x_..D`."""

    def routes_of(self, experts: Tensor) -> moe.Routes:
        """Return the routes of a microbatch; its ranks exchange counts unless they are fixed."""

    def add(self, a: Tensor, y: Tensor) -> Tensor:
        """Return the output `y_..D`, given `a_..D` and the results `y_TD` for it."""

    def grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, `dy_TD`, given that of the output."""


class InterruptibleLayer(nn.Module):
    """An MoE transformer layer whose forward and backward can be interrupted at every all-to-all.

    Args:
        attention: from `x_..D` to `a_..D`: attention, its norm and its residual; any module.
        router: of all experts, the same on every rank.
        experts: the sharded experts.
        fixed: `experts_TK` where a token's experts do not depend on it: ranks exchange no counts at run time, so the
            all-to-alls of a pair are its only messages.  All ranks construct the layer then.
    """

    letters = ROUTED
    shared: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self, attention: nn.Module, router: TopKRouter, experts: moe.Experts, fixed: Tensor | None = None
    ) -> None:
        super().__init__()
        self.attention, self.router, self.experts = attention, router, experts
        self._routes = None if fixed is None else fix_routes(router, experts, fixed)

    def begin(self, weight: float = 1, given: Given | None = None) -> "LayerPass":
        """Return the pass of one microbatch through this layer."""
        return LayerPass(self, weight)

    def route(self, x: Tensor) -> Routed:
        """Compute A: attention and router of `x_..D`."""
        a = self.attention(x)
        tokens = a.flatten(0, -2)
        return Routed(a, tokens, self.router(tokens))

    def routes_of(self, experts: Tensor) -> moe.Routes:
        """Return the routes of a microbatch; its ranks exchange counts unless they are fixed."""
        return plan(self.experts, experts) if self._routes is None else self._routes

    def add(self, a: Tensor, y: Tensor) -> Tensor:
        """Return the output `y_..D`, given `a_..D` and the results `y_TD` for it."""
        return a + y.view(a.shape)

    def grad_of_results(self, dy: Tensor) -> Tensor:
        """Return the gradient of the results, `dy_TD`, given that of the output."""
        return dy.flatten(0, -2)


def plan(experts: moe.Experts, chosen: Tensor) -> moe.Routes:
    """Plan the routes of `chosen_TK`; all ranks of the experts call this."""
    return moe.plan_routes(chosen, experts.num_experts, experts.ep)


def fix_routes(router: Any, experts: moe.Experts, fixed: Tensor) -> moe.Routes:
    """Let a `TopKRouter` choose `fixed_TK` whatever its logits are, and return the routes of every microbatch."""
    router.choose = lambda logits: fixed
    return plan(experts, fixed)


class LayerPass:
    """One microbatch in one layer: the pieces, in the order of their dependencies.

    The pieces that launch an all-to-all return at once; `wait` is called before the next piece.

    Args:
        layer: the layer.
        weight: of the microbatch in the loss, by which the layer's own loss is multiplied.

    Attributes:
        loss: after A_F, the layer's weighted summand of the loss, detached; None for none.
    """

    def __init__(self, layer: Routes, weight: float = 1) -> None:
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
