"""Whole weights and gradients of a model that the ranks share out: to compare with, not to train with.

Chapter: book/dp/zero-1.  In: an optimizer of any stage, on every rank of its group.  Out: tensors by parameter name.
  bytes sent    (N - 1) / N * bytes of the gradients; ZeRO-3 sends those of the weights too
Elsewhere: torch FSDP2 `DTensor.full_tensor`; DeepSpeed `safe_get_full_grad`.
"""

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.dp.zero3 import Zero3


def whole_weights(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Copies of all weights; every rank of the group must call this."""
    if isinstance(optimizer, Zero3):
        with optimizer.gathered():
            return _copies(optimizer)
    return _copies(optimizer)


def whole_gradients(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Copies of the summed gradients of all trained parameters; every rank of the group must call this.

    It finishes the sums, as a step does: call it after the last backward of a step.
    """
    found: dict[str, Tensor] = {}
    for held, grad in zip(optimizer.held, optimizer.finished_gradients(), strict=True):
        whole = grad.clone()
        if optimizer.is_sharded:
            whole = torch.zeros(held.bucket.layout.padded_numel, dtype=grad.dtype, device=grad.device)
            comm.all_gather_single(whole, grad.contiguous(), optimizer.group)
        names = [optimizer.names[parameter] for parameter in held.bucket.parameters]
        found |= dict(zip(names, held.bucket.views(whole), strict=True))
    return found


def _copies(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in optimizer.module.named_parameters()}
