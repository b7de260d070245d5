"""The sparse mixture of experts: k of E experts process each token, and the experts are sharded over ranks.

Chapter: book/ep/smoe.  In: `x_TD`, `weights_TK`, `experts_TK`.  Out: `y_TD`.  As a module: `Experts`, `MoE`.
The layer in pieces, without autograd, for schedules that put other work between them (legend: T tokens of this rank,
K experts per token, S = T K slots, R received rows, D hidden, F inner, E experts of this rank):
  forward                                                    backward
  routes = plan_routes(experts_TK, num_experts, ep)          -
  rows_SD = permute(x_TD, routes)                            dx_TD = permute_grad(drows_SD, routes)
  start_rows(rows_SD, routes.splits, ep.group)  .wait()      start_rows(grad_RD, routes.splits.transposed, ep.group)
  rows_RD = regroup(rows_RD, routes)                         ungroup(drows_RD, routes)
  y_RD, saved = experts_forward(rows_RD, routes.counts, w)   I: dx_RD, saved = experts_input_grad(dy_RD, w, saved)
                                                             W: dw = experts_weight_grad(saved)
  y_RD = ungroup(y_RD, routes)                               regroup(dy_RD, routes)
  start_rows(y_RD, routes.splits.transposed, ..) .wait()     start_rows(dy_SD, routes.splits, ep.group) .wait()
  y_TKD = unpermute(y_SD, routes)                            dy_SD = unpermute_grad(dy_TKD, routes)
  y_TD = weighted_sum(y_TKD, weights_TK)                     dy_TKD, dweights_TK = weighted_sum_grad(dy_TD, y_TKD, ..)
`start_rows` is that of `dualpipe_lab.ep.all_to_all`; `operators` has the same steps for autograd.
Elsewhere: Megatron `MoELayer` and its token dispatchers; torchtitan moe.py.
Source: Shazeer et al. 2017 (arXiv 1701.06538), section 3.1; Lepikhin et al. 2020 (arXiv 2006.16668), section 3.
"""

from dualpipe_lab.ep.expert_rules import check_divides
from dualpipe_lab.ep.moe.experts import (
    SavedForInputGrad,
    SavedForWeightGrad,
    SwiGLUWeights,
    experts_forward,
    experts_input_grad,
    experts_weight_grad,
    grouped_product,
    grouped_weight_grad,
)
from dualpipe_lab.ep.moe.layer import Experts, MoE, expert_parameters, reduce_gradients
from dualpipe_lab.ep.moe.permutation import (
    ExpertParallel,
    Routes,
    permute,
    permute_grad,
    plan_routes,
    regroup,
    ungroup,
    unpermute,
    unpermute_grad,
    weighted_sum,
    weighted_sum_grad,
)

__all__ = [
    "ExpertParallel",
    "Experts",
    "MoE",
    "Routes",
    "SavedForInputGrad",
    "SavedForWeightGrad",
    "SwiGLUWeights",
    "check_divides",
    "expert_parameters",
    "experts_forward",
    "experts_input_grad",
    "experts_weight_grad",
    "grouped_product",
    "grouped_weight_grad",
    "permute",
    "permute_grad",
    "plan_routes",
    "reduce_gradients",
    "regroup",
    "ungroup",
    "unpermute",
    "unpermute_grad",
    "weighted_sum",
    "weighted_sum_grad",
]
