"""The steps of the layer on this rank: each local movement of rows with its gradient, and the experts for autograd.

Chapter: book/ep/smoe.  In: rows, `Routes`.  Out: rows in another order, or their weighted sum.
The exchanges between the steps are `dispatch` and `combine` of `dualpipe_lab.ep.all_to_all`.
Elsewhere: Megatron moe_utils.py `permute` and `unpermute`; torchtitan token_dispatcher.py.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.ep.moe import experts as grouped
from dualpipe_lab.ep.moe.experts import SavedForInputGrad, SwiGLUWeights
from dualpipe_lab.ep.moe.permutation import Routes


def permute(x: Tensor, routes: Routes) -> Tensor:
    """Copy every token `x_TD` k times, sorted by expert: `rows_SD`."""
    out: Tensor = _Permute.apply(x, routes)
    return out


def permute_grad(grad: Tensor, routes: Routes) -> Tensor:
    """Sum the gradients `grad_SD` of the k copies of each token: `dx_TD`."""
    # in the order of the choices: bits do not depend on where the rows were
    return unpermute(grad, routes).sum(1)


def sort_by_expert(rows: Tensor, routes: Routes) -> Tensor:
    """Reorder `rows_RD` from arrival, by source, to the order of the experts; the gradient of `unsort_by_expert`."""
    out: Tensor = _Reorder.apply(rows, routes.expert_major, routes.arrival)
    return out


def unsort_by_expert(rows: Tensor, routes: Routes) -> Tensor:
    """Reorder `rows_RD` from the order of the experts to that of arrival; the gradient of `sort_by_expert`."""
    out: Tensor = _Reorder.apply(rows, routes.arrival, routes.expert_major)
    return out


def unpermute(rows: Tensor, routes: Routes) -> Tensor:
    """Move every row of `rows_SD` back to its slot: `y_TKD`."""
    out: Tensor = _Reorder.apply(rows, routes.inverse, routes.order)
    return out.view(routes.num_tokens, routes.top_k, *rows.shape[1:])


def unpermute_grad(grad: Tensor, routes: Routes) -> Tensor:
    """Put the slots' gradients `grad_TKD` into the order in which rows are sent: `grad_SD`."""
    return grad.flatten(0, 1).index_select(0, routes.order)


def weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """Sum the k results `y_TKD` of each token, each times its weight of `weights_TK`: `y_TD`; both get gradients.

    Weights may have more bits than rows: the sum is formed in the type of the weights, and rows keep theirs.
    """
    out: Tensor = _WeightedSum.apply(y, weights)
    return out


def weighted_sum_grad(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return `dy_TKD` and `dweights_TK` for the output gradient `grad_TD`."""
    grad = grad.unsqueeze(1).to(weights.dtype)
    return (weights.unsqueeze(-1) * grad).to(y.dtype), (grad * y).sum(-1)


def grouped_swiglu(rows: Tensor, counts: tuple[int, ...], weights: SwiGLUWeights) -> Tensor:
    """Pass every row of `rows_RD` through its expert: `y_RD`."""
    out: Tensor = _GroupedSwiGLU.apply(rows, counts, *weights)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return x.index_select(0, routes.order // routes.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return permute_grad(grad, ctx.routes), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights)
        return (weights.unsqueeze(-1) * y).sum(1).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_sum_grad(grad, *ctx.saved_tensors)


class _GroupedSwiGLU(torch.autograd.Function):
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
