"""`Bucket`: parameters of one kind as one flat buffer, and the collectives on such buffers that ZeRO is made of.

Chapter: book/dp/dp-gradients.  In: parameters.  Out: buckets in the order in which backward fills them.
  latency            one collective per bucket instead of one per parameter
  memory             none beyond the gradients themselves: each `.grad` is a view of the buffer, not a copy
  reduce-scatter     (N - 1) / N * bytes of the buffer sent per rank         all-gather: the same
Elsewhere: torch DDP `gradient_as_bucket_view=True`; Megatron `_ParamAndGradBucket`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.layout import Layout
from dualpipe_lab.grad_ready import GradShard

BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Parameters of one type whose elements lie one after the other in a flat buffer.

    Args:
        parameters: in the order in which they lie in the buffer.
        num_shards: the buffer is padded to a multiple of this.
        dtype: the type of the gradients (default: that of the parameters).
        group: the ranks that its gradients are summed over.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        num_shards: int = 1,
        dtype: torch.dtype | None = None,
        group: Group | None = None,
    ) -> None:
        self.parameters, self.group = list(parameters), group
        self.layout = Layout([parameter.numel() for parameter in self.parameters], num_shards)
        self.dtype = dtype or self.parameters[0].dtype
        self.device = self.parameters[0].device

    def allocate(self) -> Tensor:
        """Allocate a full flat buffer of zeros."""
        return torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=self.device)

    def allocate_shard(self) -> Tensor:
        """Allocate one shard of the flat buffer, filled with zeros."""
        return torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a view of the flat buffer for each parameter, in the parameter's shape."""
        offsets = zip(self.layout.offsets, self.parameters, strict=True)
        return [flat[offset : offset + parameter.numel()].view(parameter.shape) for offset, parameter in offsets]

    def flatten_weights(self) -> Tensor:
        """Move the weights into one flat buffer, of which every parameter is a view from here on."""
        flat = torch.zeros(self.layout.padded_numel, dtype=self.parameters[0].dtype, device=self.device)
        for parameter, view in zip(self.parameters, self.views(flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        return flat

    def grad_shards(self, shard: Tensor, rank: int) -> dict[nn.Parameter, GradShard]:
        """Return, by parameter, the elements that lie in a rank's shard; a parameter without any is left out."""
        first, _ = self.layout.span(rank)
        found = {}
        for tensor, start, stop in self.layout.tensors_in(rank):
            offset = self.layout.offsets[tensor] - first
            found[self.parameters[tensor]] = GradShard(start, shard[offset + start : offset + stop])
        return found


def local_shard(flat: Tensor, group: Group | None) -> Tensor:
    """Return this rank's shard of a padded flat buffer, as a view."""
    return flat.view(comm.get_world_size(group), -1)[comm.get_rank(group)]


def all_reduce_async(flat: Tensor, group: Group | None) -> Pending[Tensor]:
    """Launch the sum of a flat buffer over the group; every rank gets the full sum, in place."""
    return Pending([comm.all_reduce(flat, group=group, async_op=True)], lambda: flat)


def reduce_scatter_async(flat: Tensor, group: Group | None) -> Pending[Tensor]:
    """Launch the sum of a flat buffer over the group; each rank gets its shard of the sum, in place.

    The rest of the buffer holds nothing of use afterwards.
    """
    shard = local_shard(flat, group)
    return Pending([comm.reduce_scatter_single(shard, flat, group=group, async_op=True)], lambda: shard)


def all_gather_async(buckets: Sequence[Bucket], flats: Sequence[Tensor]) -> Pending[None]:
    """Launch the all-gather of every rank's shard into the buckets' flat buffers, in place."""
    works = [
        comm.all_gather_single(flat, local_shard(flat, bucket.group), bucket.group, async_op=True)
        for bucket, flat in zip(buckets, flats, strict=True)
    ]
    return Pending(works, lambda: None)


def assign_buckets(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int = BUCKET_BYTES,
    kind: Callable[[nn.Parameter], Hashable] = lambda parameter: parameter.dtype,
) -> list[list[nn.Parameter]]:
    """Assign parameters to buckets, the last parameter first, because backward computes its gradient first.

    Neighbours share a bucket while they are of one kind and the bucket stays within `bucket_bytes`.  A larger parameter
    gets a bucket of its own.  Parameters that need no gradient are left out.

    Raises:
        ValueError: if `bucket_bytes` is below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket holds at least 1 byte, got bucket_bytes={bucket_bytes}")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    buckets: list[list[nn.Parameter]] = []
    for _, run in groupby(reversed(trained), kind):
        buckets.append([])  # the first parameter of a kind opens a bucket, also one without elements
        num_bytes = 0
        for parameter in run:
            size = parameter.numel() * parameter.element_size()
            if buckets[-1] and num_bytes + size > bucket_bytes:
                buckets.append([])
                num_bytes = 0
            buckets[-1].append(parameter)
            num_bytes += size
    return buckets


def make_buckets(
    chosen: Iterable[Sequence[nn.Parameter]],
    dtype: torch.dtype | None,
    group_of: Callable[[nn.Parameter], Group | None],
) -> list[Bucket]:
    """Make a bucket of each list of parameters, padded for the ranks that its gradients are summed over."""
    groups = ((parameters, group_of(parameters[0])) for parameters in chosen)
    return [Bucket(parameters, comm.get_world_size(group), dtype, group) for parameters, group in groups]
