"""An MoE transformer layer in ten pieces: each computes, or issues an all-to-all, and leaves the rest for later.

Chapter: book/ep/one-f-one-b-overlap.  In: `x_TD`, T tokens of this rank.  Out: `y_TD`; gradients in `.grad`.
  A  a = front(x), attention with its residual; weights and experts = router(a)
  D  k copies of each token to the ranks of its experts        M  the experts of this rank        C  and back
  y = a + sum over j of w_j Y_j
The front's backward is autograd's, split into I and W; that of everything else is written out (`dualpipe_lab.ep.moe`).
Between M_B and M_W a microbatch keeps the inputs and output gradients of the experts' products, between A_B and A_W
what the front's forks hold.
Elsewhere: Megatron `TransformerLayerNode` in fine_grained_callables.py.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dualpipe_lab.ep import moe as smoe
from dualpipe_lab.ep.all_to_all import Arriving, start_rows
from dualpipe_lab.ep.router import TopKRouter
from dualpipe_lab.pp.runtime.split_backward import SplitBackward


class CutLayer(nn.Module):
    """A layer whose forward and backward can be interrupted.

    Args:
        front: from `x_TD` to `a_TD`: attention, its norm and its residual; any module.
        router: of all experts, the same on every rank.
        experts: those of this rank.
        fixed: `experts_TK` where a token's experts do not depend on it: no counts are exchanged at run time, so the
            all-to-alls of a pair are all that its ranks say to each other.  All ranks construct the layer then.
    """

    def __init__(
        self, front: nn.Module, router: TopKRouter, experts: smoe.Experts, fixed: Tensor | None = None
    ) -> None:
        super().__init__()
        self.front, self.router, self.experts = front, router, experts
        self._routes = None if fixed is None else self._plan(fixed)
        if fixed is not None:
            router.choose = lambda logits: fixed  # type: ignore[method-assign]

    def begin(self) -> "LayerPass":
        """Return what takes one microbatch through this layer."""
        return LayerPass(self)

    def routes_of(self, experts: Tensor) -> smoe.Routes:
        """Return the routes of a microbatch; its ranks exchange counts unless they are fixed."""
        return self._plan(experts) if self._routes is None else self._routes

    def _plan(self, experts: Tensor) -> smoe.Routes:
        return smoe.plan_routes(experts, self.experts.num_experts, self.experts.ep)


class LayerPass:
    """One microbatch in one layer: the pieces, in the order in which they need each other.

    The pieces that start an all-to-all return at once; `wait` is called before the next piece.
    """

    def __init__(self, layer: CutLayer) -> None:
        self.layer, self.group = layer, layer.experts.ep.group
        self._held: dict[str, Any] = {}
        self._arriving: Arriving | None = None

    def wait(self) -> None:
        """Wait for the all-to-all that was started last."""
        assert self._arriving is not None
        self._arriving.wait()

    def attention(self, x: Tensor) -> None:
        """A_F."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            a = self.layer.front(x)
            routing = self.layer.router(a)
        roots = [get_gradient_edge(a), get_gradient_edge(routing.weights)]
        routes = self.layer.routes_of(routing.indices)
        self._held = {
            "split": SplitBackward(roots, [x]), "a": a.detach(), "weights": routing.weights.detach(),
            "routes": routes,
        }  # fmt: skip

    def dispatch(self) -> None:
        """D_F."""
        routes = self._held["routes"]
        self._start(smoe.permute(self._held["a"], routes), back=False)

    def experts(self) -> None:
        """M_F."""
        routes = self._held["routes"]
        rows = smoe.regroup(self._arrived(), routes)
        y, self._held["kept"] = smoe.experts_forward(rows, routes.counts, self.layer.experts.weights)
        self._held["y"] = smoe.ungroup(y, routes)

    def combine(self) -> None:
        """C_F."""
        self._start(self._held.pop("y"), back=True)

    def output(self) -> Tensor:
        """What arrived, weighed, beside the residual: `y_TD`."""
        if "output" not in self._held:
            held = self._held
            held["y_TKD"] = smoe.unpermute(self._arrived(), held["routes"])
            held["output"] = held.pop("a") + smoe.weigh(held["y_TKD"], held["weights"])
        output: Tensor = self._held["output"]
        return output

    def combine_grad(self, dy: Tensor) -> None:
        """C_B: the weights get their gradient here, at the source, where the results of the experts are."""
        held = self._held
        self.output()  # nobody may have asked for it
        del held["output"]
        rows, held["dweights"] = smoe.weigh_grad(dy, held.pop("y_TKD"), held.pop("weights"))
        held["da"] = dy
        self._start(smoe.unpermute_grad(rows, held["routes"]), back=False)

    def experts_input_grad(self) -> None:
        """M_B."""
        held, weights = self._held, self.layer.experts.weights
        grad = smoe.regroup(self._arrived(), held["routes"])
        dx, held["late"] = smoe.experts_input_grad(grad, weights, held.pop("kept"))
        held["dx"] = smoe.ungroup(dx, held["routes"])

    def experts_weight_grad(self) -> None:
        """M_W."""
        found = smoe.experts_weight_grad(self._held.pop("late"))
        for parameter, grad in zip(self.layer.experts.weights, found, strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def dispatch_grad(self) -> None:
        """D_B."""
        self._start(self._held.pop("dx"), back=True)

    def attention_input_grad(self) -> Tensor:
        """A_B: `dx_TD`."""
        held = self._held
        da = held.pop("da") + smoe.permute_grad(self._arrived(), held.pop("routes"))
        (dx,) = held["split"].input_grad([da, held.pop("dweights")])
        assert dx is not None, "the front has a residual"
        return dx

    def attention_weight_grad(self) -> None:
        """A_W."""
        self._held.pop("split").weight_grad()

    @property
    def is_over(self) -> bool:
        """Whether nothing is held any more."""
        return not self._held

    def _start(self, rows: Tensor, back: bool) -> None:
        splits = self._held["routes"].splits
        self._arriving = start_rows(rows, splits.transposed if back else splits, self.group)

    def _arrived(self) -> Tensor:
        """The rows that came; a second wait costs nothing."""
        assert self._arriving is not None
        arriving, self._arriving = self._arriving, None
        return arriving.wait()
