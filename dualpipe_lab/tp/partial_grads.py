"""Gradients of replicated weights to which every rank contributed a part, summed in one message.

Chapter: book/tp/rmsnorm.  In: modules that name their `partial` parameters.  Out: the same gradients on every rank.
  bytes sent   2 (t - 1) / t * bytes of these gradients, once per step instead of once per backward
A weight on all ranks, used for other tokens or other heads on each, has a partial gradient there.  Layers sum it in
their backward, which is right whatever follows; with `TensorParallel(coalesce=True)` they leave it, and this is called
after the last backward of a step.
Elsewhere: Megatron `_allreduce_non_tensor_model_parallel_grads` in finalize_model_grads.py.
"""

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group, members


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum what layers with `coalesce` left partial: one message per group of ranks.

    Every rank calls this once per step, after its backwards and before anything reads the gradients.
    """
    by_group: dict[tuple[int, ...], tuple[Group | None, list[Tensor]]] = {}
    for module in model.modules():
        for name, group in getattr(module, "partial", {}).items():
            grad = module.get_parameter(name).grad
            if grad is not None:
                by_group.setdefault(members(group), (group, []))[1].append(grad)
    for group, grads in by_group.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        comm.all_reduce(flat, group=group)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))
