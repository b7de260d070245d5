"""Reduction of gradients where experts are sharded: different groups for the sum, one divisor for the mean.

Chapter: book/ep/smoe.  In: a model after the backward of a summed loss.  Out: `.grad` of the mean loss.
  parameter          replicated on      sum over     divided by
  router, shared     every data rank    dp = edp e   the tokens of all ranks
  experts            edp ranks          edp          the tokens of all ranks
An expert's gradient contains the tokens of all e ranks of its ep group before any reduction.  So it is summed over
fewer ranks, and divided by the same number.  A mean over the edp ranks would be e times too large.
Elsewhere: Megatron `finalize_model_grads` and its `expert_data_parallel` buffers, scaled by 1 / dp.
"""

from collections.abc import Sequence

import torch
from torch import nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.moe.config import ExpertParallel
from dualpipe_lab.ep.moe.layer import Experts


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are sharded over the ep group: those of all `Experts` in the model."""
    return [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]


def reduce_gradients(model: nn.Module, ep: ExpertParallel, num_tokens: int, data: Group | None = None) -> None:
    """All-reduce every gradient to that of the mean loss over all tokens; a missing gradient counts as zeros.

    Args:
        model: after the backward of the loss summed over this rank's tokens.
        ep: the groups of its experts.
        num_tokens: tokens of all ranks together, the same number on each.
        data: all ranks with different data: edp times e of them (default: the world).

    Raises:
        ValueError: no tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"a mean needs tokens, got {num_tokens} on all ranks together; skip the step")
    sharded = {id(parameter) for parameter in expert_parameters(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _reduce([p for p in trained if id(p) not in sharded], data, num_tokens)
    experts = [p for p in trained if id(p) in sharded]
    _reduce(experts, ep.edp_group, num_tokens, is_alone=ep.edp_group is None)


def _reduce(parameters: Sequence[nn.Parameter], group: Group | None, num_tokens: int, is_alone: bool = False) -> None:
    """Sum the gradients in one message per type of element, then divide."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        grads = [p.grad for p in parameters if p.grad is not None and p.dtype == dtype]
        flat = torch.cat([grad.flatten() for grad in grads])
        if not is_alone:
            comm.all_reduce(flat, group=group)
        flat /= num_tokens
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
