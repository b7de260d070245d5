"""Sums of a few gradients together: what the rooms that sum gradients besides data parallelism have in common.

Chapter: book/whole/sums.  In: gradients, ranks.  Out: the sum on each of these ranks, in place, bit for bit the same.
Pipelines sum mirrors and tied stages in this way, tensor parallelism partial gradients, experts all of theirs; which
sums there are is data (`dualpipe_lab.dp.sums`).
Elsewhere: Megatron `finalize_model_grads`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import Group, group_of


def dense_grad(parameter: Tensor) -> Tensor:
    """Return a gradient, after making it dense, or zeros where no backward of this rank has used the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def all_reduce_together_async(tensors: Sequence[Tensor], group: Group | None) -> Pending[None]:
    """Launch the sum of tensors over the group: one message for all of a type.  Each gets its sum, in place."""
    by_type = [[tensor for tensor in tensors if tensor.dtype == one] for one in dict.fromkeys(t.dtype for t in tensors)]
    flats = [
        those[0] if len(those) == 1 and those[0].is_contiguous() else torch.cat([tensor.flatten() for tensor in those])
        for those in by_type
    ]

    def copy_back() -> None:
        for those, flat in zip(by_type, flats, strict=True):
            if flat is not those[0]:
                for tensor, total in zip(those, flat.split([tensor.numel() for tensor in those]), strict=True):
                    tensor.copy_(total.view_as(tensor))

    return Pending([comm.all_reduce(flat, group=group, async_op=True) for flat in flats], copy_back)


def sum_stages(copies: Sequence[Tensor], counted: Sequence[Tensor], ranks: Sequence[int]) -> None:
    """Give this rank's copies of a weight, or of its gradient, the sum of those that count, over the ranks.

    A sum over data ranks and one over stages may change places, so ZeRO's shards are added in place of full gradients.
    Elsewhere: Megatron `_allreduce_word_embedding_grads`.
    """
    if len(copies) < 2 and (not copies or len(ranks) == 1):
        return  # the weight is frozen, or nobody else has it
    total = sum(counted, torch.zeros_like(copies[0]))
    if len(ranks) > 1:
        comm.all_reduce(total, group=group_of(ranks))
    for copy in copies:
        copy.copy_(total)
