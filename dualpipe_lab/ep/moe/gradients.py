"""Summing gradients where experts are spread: each over the ranks that hold a copy, all divided by the same number.

Chapter: book/ep/smoe.  In: a model whose ranks have done their backward of a summed loss.  Out: `.grad` of the mean.
  parameter          copies on          sum over     divided by
  router, shared     every data rank    dp = edp e   the tokens of all ranks
  experts            edp ranks          edp          the tokens of all ranks
An expert's gradient holds the tokens of all e ranks of its group already: fewer ranks are summed, and still the divisor
is the same.  An average over the edp ranks would be e times too large.
Elsewhere: Megatron `finalize_model_grads` and its `expert_data_parallel` buffers, scaled by 1 / dp.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.ep.moe.config import ExpertParallel
from dualpipe_lab.ep.moe.layer import Experts


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of which every rank has other ones: those of all `Experts` in the model."""
    return [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]


def sum_gradients(model: nn.Module, ep: ExpertParallel, num_tokens: int, data: Group | None = None) -> None:
    """Make each gradient that of the mean loss over all tokens; a missing one counts as zeros.

    Args:
        model: after the backward of the loss summed over this rank's tokens.
        ep: its expert parallelism.
        num_tokens: tokens of all ranks together, the same number on each.
        data: all ranks that see other data: edp times e of them (default: the world).

    Raises:
        ValueError: no tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"a mean needs tokens, got {num_tokens} on all ranks together; skip the step")
    own = {id(parameter) for parameter in expert_parameters(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _sum([p for p in trained if id(p) not in own], data, num_tokens)
    experts = [p for p in trained if id(p) in own]
    _sum(experts, ep.copies, num_tokens, is_alone=ep.copies is None)


def counted_gradients(model: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    """This rank's gradients as `dualpipe_lab.dp.grad_norm.global_norm` takes them: experts are spread over "ep"."""
    own = {id(parameter) for parameter in expert_parameters(model)}
    return [(p.grad, ("ep",) if id(p) in own else ()) for p in model.parameters() if p.grad is not None]


def _sum(parameters: Sequence[nn.Parameter], group: Group | None, num_tokens: int, is_alone: bool = False) -> None:
    """One message per type of element."""
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
