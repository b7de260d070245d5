"""The steps of the layer as autograd sees them: thin Functions over the plain ones of `rows` and `experts`.

Chapter: book/ep/smoe.  In: rows that may need a gradient.  Out: the same as the plain function of the same name.
The exchanges between them are `dispatch` and `combine` of `dualpipe_lab.ep.all_to_all`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualpipe_lab.ep.moe import experts as grouped
from dualpipe_lab.ep.moe import rows as moved
from dualpipe_lab.ep.moe.experts import Kept, Weights
from dualpipe_lab.ep.moe.routes import Routes


def permute(x: Tensor, routes: Routes) -> Tensor:
    """`rows_SD` of `x_TD`: k copies of every token, sorted by expert; their gradients are summed by token."""
    out: Tensor = Permute.apply(x, routes)
    return out


def regroup(rows: Tensor, routes: Routes) -> Tensor:
    """`rows_RD` from the order of arrival into that of the experts."""
    out: Tensor = Reorder.apply(rows, routes.expert_major, routes.arrival)
    return out


def ungroup(rows: Tensor, routes: Routes) -> Tensor:
    """`rows_RD` from the order of the experts into that of arrival."""
    out: Tensor = Reorder.apply(rows, routes.arrival, routes.expert_major)
    return out


def unpermute(rows: Tensor, routes: Routes) -> Tensor:
    """`y_TKD` of `rows_SD`: every row back in its slot."""
    out: Tensor = Reorder.apply(rows, routes.inverse, routes.order)
    return out.view(routes.num_tokens, routes.top_k, *rows.shape[1:])


def weigh(y: Tensor, weights: Tensor) -> Tensor:
    """`y_TD`: the sum of `y_TKD` times `weights_TK`; both get gradients."""
    out: Tensor = Weigh.apply(y, weights)
    return out


def grouped_swiglu(rows: Tensor, counts: tuple[int, ...], weights: Weights) -> Tensor:
    """`y_RD` of `rows_RD`: each row through its expert."""
    out: Tensor = GroupedSwiGLU.apply(rows, counts, *weights)
    return out


class Permute(torch.autograd.Function):
    """Copies of rows / the sum of what the copies contribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return moved.permute(x, routes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return moved.permute_grad(grad, ctx.routes), None


class Reorder(torch.autograd.Function):
    """A permutation of rows / its inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


class Weigh(torch.autograd.Function):
    """The weighted sum of k results / each result's and each weight's gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights)
        return moved.weigh(y, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return moved.weigh_grad(grad, *ctx.saved_tensors)


class GroupedSwiGLU(torch.autograd.Function):
    """Three grouped products / I, then W."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: tuple[int, ...], gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights = Weights(gate, up, down)
        y, kept = grouped.experts_forward(rows, counts, weights)
        ctx.counts = counts
        ctx.save_for_backward(*kept[:3], *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, a, u, *weights = ctx.saved_tensors
        dx, late = grouped.experts_input_grad(grad, Weights(*weights), Kept(rows, a, u, ctx.counts))
        return dx, None, *grouped.experts_weight_grad(late)
