"""The steps of the layer for autograd: thin Functions over the plain ones of `permutation` and `experts`.

Chapter: book/ep/smoe.  In: rows that may need a gradient.  Out: the same as the plain function of the same name.
The exchanges between them are `dispatch` and `combine` of `dualpipe_lab.ep.all_to_all`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.ep.moe import experts as grouped
from dualpipe_lab.ep.moe import permutation
from dualpipe_lab.ep.moe.experts import SavedForInputGrad, SwiGLUWeights
from dualpipe_lab.ep.moe.permutation import Routes


def permute(x: Tensor, routes: Routes) -> Tensor:
    """Copy every token `x_TD` k times, sorted by expert: `rows_SD`.  Backward: sum the copies' gradients by token."""
    out: Tensor = Permute.apply(x, routes)
    return out


def regroup(rows: Tensor, routes: Routes) -> Tensor:
    """Reorder `rows_RD` from arrival, source by source, to the order of the experts."""
    out: Tensor = Reorder.apply(rows, routes.expert_major, routes.arrival)
    return out


def ungroup(rows: Tensor, routes: Routes) -> Tensor:
    """Reorder `rows_RD` from the order of the experts to that of arrival."""
    out: Tensor = Reorder.apply(rows, routes.arrival, routes.expert_major)
    return out


def unpermute(rows: Tensor, routes: Routes) -> Tensor:
    """Move every row of `rows_SD` back to its slot: `y_TKD`."""
    out: Tensor = Reorder.apply(rows, routes.inverse, routes.order)
    return out.view(routes.num_tokens, routes.top_k, *rows.shape[1:])


def weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """Sum the k results `y_TKD` of each token, each times its weight of `weights_TK`; both get gradients."""
    out: Tensor = WeightedSum.apply(y, weights)
    return out


def grouped_swiglu(rows: Tensor, counts: tuple[int, ...], weights: SwiGLUWeights) -> Tensor:
    """Pass every row of `rows_RD` through its expert: `y_RD`."""
    out: Tensor = GroupedSwiGLU.apply(rows, counts, *weights)
    return out


class Permute(torch.autograd.Function):
    """Forward: copy rows.  Backward: sum the gradients of the copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return permutation.permute(x, routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return permutation.permute_grad(grad, ctx.routes), None


class Reorder(torch.autograd.Function):
    """Forward: a permutation of rows.  Backward: its inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


class WeightedSum(torch.autograd.Function):
    """Forward: the weighted sum of k results.  Backward: the gradients of results and weights."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights)
        return permutation.weighted_sum(y, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return permutation.weighted_sum_grad(grad, *ctx.saved_tensors)


class GroupedSwiGLU(torch.autograd.Function):
    """Forward: three grouped products.  Backward: I, then W."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: tuple[int, ...], gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights = SwiGLUWeights(gate, up, down)
        y, saved = grouped.experts_forward(rows, counts, weights)
        ctx.counts = counts
        ctx.save_for_backward(*saved[:3], *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, a, u, *weights = ctx.saved_tensors
        dx, saved = grouped.experts_input_grad(grad, SwiGLUWeights(*weights), SavedForInputGrad(rows, a, u, ctx.counts))
        return dx, None, *grouped.experts_weight_grad(saved)
