"""Moving and weighing rows: each step beside its gradient, in plain functions without autograd.

Chapter: book/ep/smoe.  In: rows and a `Routes`.  Out: new rows.
  step        forward                                backward
  permute     row of token q // k for each slot q    sum of the k copies of each token
  regroup     source-major to expert-major           ungroup
  ungroup     expert-major to source-major           regroup
  unpermute   rows back to their slots, `y_TKD`      slots in the order in which rows are sent
  weigh       y_t = sum over j of w_tj y_tj          dy_tj = w_tj dy_t,  dw_tj = <dy_t, y_tj>
Weights may have more bits than rows: sums are formed in the type of the weights, and rows keep theirs.
Copies are summed as `view(T, K, D).sum(1)`, in the order of the choices: bits do not depend on where the rows were.
Elsewhere: Megatron moe_utils.py, `permute` and `unpermute`.
"""

from torch import Tensor

from dualpipe_lab.ep.moe.routes import Routes


def permute(x: Tensor, routes: Routes) -> Tensor:
    """`rows_SD` of `x_TD`: k copies of every token, sorted by expert."""
    return x.index_select(0, routes.order // routes.top_k)


def permute_grad(grad: Tensor, routes: Routes) -> Tensor:
    """`dx_TD` of `grad_SD`: what the k copies of a token contribute, summed."""
    return unpermute(grad, routes).sum(1)


def unpermute(rows: Tensor, routes: Routes) -> Tensor:
    """`y_TKD` of `rows_SD`: every row back in its slot."""
    return rows.index_select(0, routes.inverse).view(routes.num_tokens, routes.top_k, *rows.shape[1:])


def unpermute_grad(grad: Tensor, routes: Routes) -> Tensor:
    """`grad_SD` of `grad_TKD`: slots in the order in which rows are sent."""
    return grad.flatten(0, 1).index_select(0, routes.order)


def regroup(rows: Tensor, routes: Routes) -> Tensor:
    """`rows_RD` as they arrive, source by source, into the order of the experts; the gradient of `ungroup`."""
    return rows.index_select(0, routes.expert_major)


def ungroup(rows: Tensor, routes: Routes) -> Tensor:
    """`rows_RD` in the order of the experts back into that of arrival; the gradient of `regroup`."""
    return rows.index_select(0, routes.arrival)


def weigh(y: Tensor, weights: Tensor) -> Tensor:
    """`y_TD`: the sum of a token's k results `y_TKD`, each times its weight of `weights_TK`."""
    return (weights.unsqueeze(-1) * y).sum(1).to(y.dtype)


def weigh_grad(grad: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`dy_TKD` and `dweights_TK` of `grad_TD`."""
    grad = grad.unsqueeze(1).to(weights.dtype)
    return (weights.unsqueeze(-1) * grad).to(y.dtype), (grad * y).sum(-1)
