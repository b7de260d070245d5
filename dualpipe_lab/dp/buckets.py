"""`Bucket`: parameters whose gradients travel together, as views of one flat buffer.

Chapter: book/dp/dp-gradients.  In: parameters.  Out: buckets in the order in which backward fills them.
  latency    one collective per bucket in place of one per parameter
  memory     none beyond the gradients themselves: each `.grad` is a part of the buffer, not a copy of it
Elsewhere: torch DDP `gradient_as_bucket_view=True`; Megatron `_ParamAndGradBucket`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from dualpipe_lab.dp.layout import Layout
from dualpipe_lab.dp.synchronizer import AccumulationHook, Piece, Synchronizer

BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Parameters of one type, laid end to end; the buffer divides among `num_shards` ranks.

    Args:
        parameters: in the order in which they lie in the buffer.
        num_shards: the buffer is padded to a multiple of this.
        dtype: the type of the gradients (default: that of the parameters).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], num_shards: int = 1, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters = list(parameters)
        self.layout = Layout([parameter.numel() for parameter in self.parameters], num_shards)
        self.dtype = dtype or self.parameters[0].dtype
        self.device = self.parameters[0].device

    def allocate(self) -> Tensor:
        """A flat buffer of zeros for this bucket."""
        return torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=self.device)

    def shard(self) -> Tensor:
        """One shard's part of such a buffer."""
        return torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer, each in the shape of its parameter."""
        places = zip(self.layout.offsets, self.parameters, strict=True)
        return [flat[offset : offset + parameter.numel()].view(parameter.shape) for offset, parameter in places]

    def pieces(self, shard: Tensor, rank: int) -> dict[nn.Parameter, Piece]:
        """By parameter, what a rank's shard holds of it; parameters of which it holds nothing are left out."""
        first, _ = self.layout.span(rank)
        found = {}
        for tensor, start, stop in self.layout.parts(rank):
            place = self.layout.offsets[tensor] - first
            found[self.parameters[tensor]] = Piece(start, shard[place + start : place + stop])
        return found


def when_accumulated(
    parameter: nn.Parameter, method: Callable[[nn.Parameter], None], owner: Synchronizer | None = None
) -> Any:
    """Call a method whenever a backward has added to the parameter's gradient; return the handle that removes it.

    The parameter does not keep the method's object alive.  A pipeline finds the owner by this hook, and tells it when
    gradients are complete.
    """
    hook = AccumulationHook(method, ref(owner) if owner is not None else lambda: None)
    return parameter.register_post_accumulate_grad_hook(hook)


def cut(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int = BUCKET_BYTES,
    kind: Callable[[nn.Parameter], Hashable] = lambda parameter: parameter.dtype,
) -> list[list[nn.Parameter]]:
    """Deal out parameters to buckets, last parameter first: backward makes its gradient first.

    Neighbours share a bucket while they are of one kind and the bucket stays within `bucket_bytes`; a larger parameter
    has a bucket of its own.  Parameters that need no gradient are left out.

    Raises:
        ValueError: if `bucket_bytes` is below 1.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket holds at least 1 byte, got bucket_bytes={bucket_bytes}")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    buckets: list[list[nn.Parameter]] = []
    for _, run in groupby(reversed(trained), kind):
        held = bucket_bytes  # full: the first of a kind opens a bucket
        for parameter in run:
            size = parameter.numel() * parameter.element_size()
            if held + size > bucket_bytes:
                buckets.append([])
                held = 0
            buckets[-1].append(parameter)
            held += size
    return buckets
