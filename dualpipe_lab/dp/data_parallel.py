"""Data parallelism by hand: equal weights, a shard of the batch on each rank, one sum of gradients.

Chapter: book/dp/data-parallel.  In: a module, a group of N ranks.  Out: the gradient of the full batch, on every rank.
  loss          sum of the tokens' losses / number of valid tokens of all ranks, divided once, before the backward
  bytes sent    2 (N - 1) / N * bytes of the gradients, per rank and step, for any number of microbatches
A mean of the ranks' means gives a token of a small shard more weight than a token of a large one; sums do not.
Elsewhere: torch `DistributedDataParallel` (averages gradients: right only for equal shards); torchtitan, as here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.param_specs import CopyGroups, broadcast_over, check_mesh
from dualpipe_lab.launch.context import device
from dualpipe_lab.launch.mesh import GroupMesh

IGNORE_INDEX = -100  # the target of a token that has no loss, as in torch.nn.functional.cross_entropy


def broadcast_module(module: nn.Module, group: Group | None = None) -> None:
    """Broadcast the parameters and buffers of the group's first rank to every rank.

    Where ranks hold other shards or experts, `ModelSpec(module, mesh).broadcast()` does it among copies alone.

    Raises:
        ValueError: ranks of the group hold other experts, or other shards of a layer.
    """
    check_mesh(module, GroupMesh(group))
    for tensor in [*module.parameters(), *module.buffers()]:
        broadcast_over(tensor, CopyGroups(group))


def num_valid_tokens(
    targets: Tensor | Iterable[Tensor], group: Group | None = None, ignored: int = IGNORE_INDEX
) -> int:
    """Return the number of targets with a loss, over all ranks and all microbatches of a step.

    Args:
        targets: this rank's targets: one tensor, or one per microbatch.
        group: the ranks that share the batch.
        ignored: the target of tokens that have no loss.
    """
    own = [targets] if isinstance(targets, Tensor) else list(targets)
    total = torch.zeros(1, dtype=torch.int64, device=own[0].device if own else device())
    for part in own:
        total += (part != ignored).sum()
    comm.all_reduce(total, group=group)
    return int(total)  # the host waits for this number once per step, before the first backward


def token_loss(logits: Tensor, targets: Tensor, num_tokens: int, ignored: int = IGNORE_INDEX) -> Tensor:
    """Return this rank's term of the batch's loss: the sum of its tokens' losses / number of tokens of all ranks.

    Args:
        logits: `logits_..V`; V: vocabulary.
        targets: `targets_..`; for a rank whose targets are all ignored the term is 0.
        num_tokens: `num_valid_tokens` of the step.
        ignored: the target of tokens that have no loss.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    total = nn.functional.cross_entropy(flat, targets.reshape(-1), ignore_index=ignored, reduction="sum")
    return total / max(num_tokens, 1)  # a step without any token has no gradient, and is not NaN


def all_reduce_gradients(parameters: Iterable[nn.Parameter], group: Group | None = None) -> None:
    """All-reduce every gradient over the ranks, one message per parameter, after the backward.

    A parameter without a gradient sends zeros: another rank may have used it, and an all-reduce that one rank does not
    launch hangs the others.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            grad = (
                torch.zeros_like(parameter.detach()) if parameter.grad is None else parameter.grad.detach().contiguous()
            )
            comm.all_reduce(grad, group=group)
            parameter.grad = grad
