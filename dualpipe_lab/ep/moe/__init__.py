"""The sparse mixture of experts: every token uses k of E experts, which are spread over the ranks.

Chapter: book/ep/smoe.  In: `x_TD`, `weights_TK`, `experts_TK`.  Out: `y_TD`.  As a module: `Experts`, `SMoE`.
The layer in pieces, outside of autograd, for schedules that put other work between them (legend: T tokens of this rank,
K experts per token, S = T K slots, R rows that arrive, D hidden, F inner, E experts of this rank):
  forward                                                    backward
  routes = plan_routes(experts_TK, num_experts, ep)          -
  rows_SD = permute(x_TD, routes)                            dx_TD = permute_grad(drows_SD, routes)
  start_rows(rows_SD, routes.splits, ep.group)  .wait()      start_rows(grad_RD, routes.splits.transposed, ep.group)
  rows_RD = regroup(rows_RD, routes)                         ungroup(drows_RD, routes)
  y_RD, kept = experts_forward(rows_RD, routes.counts, w)    I: dx_RD, late = experts_input_grad(dy_RD, w, kept)
                                                             W: dw = experts_weight_grad(late)
  y_RD = ungroup(y_RD, routes)                               regroup(dy_RD, routes)
  start_rows(y_RD, routes.splits.transposed, ..) .wait()     start_rows(dy_SD, routes.splits, ep.group) .wait()
  y_TKD = unpermute(y_SD, routes)                            dy_SD = unpermute_grad(dy_TKD, routes)
  y_TD = weigh(y_TKD, weights_TK)                            dy_TKD, dweights_TK = weigh_grad(dy_TD, y_TKD, weights_TK)
`start_rows` is that of `dualpipe_lab.ep.all_to_all`; `operators` has the same steps for autograd.
Elsewhere: Megatron `MoELayer` and its token dispatchers; torchtitan moe.py.
Source: Shazeer et al. 2017 (arXiv 1701.06538), section 3.1; Lepikhin et al. 2020 (arXiv 2006.16668), section 3.
"""

from dualpipe_lab.ep.moe.config import ExpertParallel, check_divides
from dualpipe_lab.ep.moe.experts import (
    Kept,
    Late,
    Weights,
    experts_forward,
    experts_input_grad,
    experts_weight_grad,
    grouped_product,
    grouped_weight_grad,
)
from dualpipe_lab.ep.moe.gradients import counted_gradients, expert_parameters, sum_gradients
from dualpipe_lab.ep.moe.layer import Experts, SMoE
from dualpipe_lab.ep.moe.routes import Routes, plan_routes
from dualpipe_lab.ep.moe.rows import (
    permute,
    permute_grad,
    regroup,
    ungroup,
    unpermute,
    unpermute_grad,
    weigh,
    weigh_grad,
)

__all__ = [
    "ExpertParallel",
    "Experts",
    "Kept",
    "Late",
    "Routes",
    "SMoE",
    "Weights",
    "check_divides",
    "counted_gradients",
    "expert_parameters",
    "experts_forward",
    "experts_input_grad",
    "experts_weight_grad",
    "grouped_product",
    "grouped_weight_grad",
    "permute",
    "permute_grad",
    "plan_routes",
    "regroup",
    "sum_gradients",
    "ungroup",
    "unpermute",
    "unpermute_grad",
    "weigh",
    "weigh_grad",
]
