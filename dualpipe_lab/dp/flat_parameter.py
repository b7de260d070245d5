"""`FlatParameter`: parameters that exist whole only while they are needed.

Chapter: book/dp/zero-3.  In: parameters, a group of N ranks.  Out: a shard that stays, a buffer that comes and goes.
  held         1 / N of the weights and of the gradients
  in between   the whole weights from `gather` to `free`, the whole gradients from the first of them to `scatter`
The buffer's storage is freed, not the buffer: what autograd saved for the backward refers to the storage, and finds the
weights there again once they are gathered.  A parameter that is not there reads as NaN.
Elsewhere: FSDP1 `FlatParamHandle`; FSDP2 `FSDPParamGroup`, whose shards are per parameter.
"""

from collections.abc import Callable, Sequence
from math import nan

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm import Work
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.buckets import Bucket, when_accumulated
from dualpipe_lab.dp.synchronizer import Synchronizer


class FlatParameter:
    """Parameters of one kind in one buffer, of which this rank keeps one shard.

    Args:
        parameters: all trained, or all frozen.
        group: the ranks that share out the buffer.
        grad_dtype: the type of the gradients (default: that of the parameters).
        on_change: called with True when the buffer's memory is taken, with False when it is given back.
        owner: whom a pipeline tells when gradients are complete.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group | None,
        grad_dtype: torch.dtype | None = None,
        on_change: Callable[[bool], None] = lambda is_held: None,
        owner: Synchronizer | None = None,
    ) -> None:
        self._group, self._size, self._rank = group, comm.get_world_size(group), comm.get_rank(group)
        self.bucket, self._on_change = Bucket(parameters, self._size, grad_dtype), on_change
        self.is_trained = self.bucket.parameters[0].requires_grad
        dtype, numel = self.bucket.parameters[0].dtype, self.bucket.layout.padded_numel
        self._full = torch.zeros(numel, dtype=dtype, device=self.bucket.device)
        self._views = self.bucket.views(self._full)
        for parameter, view in zip(self.bucket.parameters, self._views, strict=True):
            view.copy_(parameter.detach())
        self.shard = self._own(self._full).clone()
        self.grad = self.bucket.shard() if self.is_trained else None
        self._absent = torch.full((), nan, dtype=dtype, device=self.bucket.device)
        self._grads: tuple[Tensor, dict[nn.Parameter, Tensor]] | None = None
        self._gathering: Work | None = None
        self._scattering: tuple[Work | None, Tensor] | None = None
        for parameter in self.bucket.parameters if self.is_trained else ():
            if grad_dtype is not None:
                parameter.grad_dtype = grad_dtype
            when_accumulated(parameter, self.take, owner)
        self.is_whole = True
        self.free()

    def start_gather(self) -> None:
        """Ask for the whole weights, unless they are here or on their way."""
        if not self.is_whole and self._gathering is None:
            self._full.untyped_storage().resize_(self._full.numel() * self._full.element_size())
            self._on_change(True)
            self._gathering = comm.all_gather_single(self._full, self.shard, self._group, async_op=True)

    def gather(self) -> None:
        """Have the whole weights."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            self.is_whole = True
            for parameter, view in zip(self.bucket.parameters, self._views, strict=True):
                parameter.data = view

    def free(self) -> None:
        """Keep the shard alone."""
        if self._gathering is not None:
            self.gather()  # a message under way needs its buffer
        if self.is_whole:
            for parameter in self.bucket.parameters:
                parameter.data = self._absent.expand(parameter.shape)
            self._full.untyped_storage().resize_(0)
            self.is_whole = False
            self._on_change(False)

    @property
    def has_gradients(self) -> bool:
        """Whether finished gradients wait to be scattered."""
        return self._grads is not None

    def take(self, parameter: nn.Parameter) -> None:
        """Move the finished gradient of a parameter into the buffer that will be scattered."""
        if self._grads is None:
            buffer = self.bucket.allocate()
            self._grads = buffer, dict(zip(self.bucket.parameters, self.bucket.views(buffer), strict=True))
        self._grads[1][parameter].add_(parameter.grad.detach())
        parameter.grad = None

    def start_scatter(self) -> None:
        """Sum the gradients over the ranks, each of which gets its shard; what was not used counts as zeros."""
        buffer = self._grads[0] if self._grads else self.bucket.allocate()
        own = self._own(buffer)
        self._scattering = comm.reduce_scatter_single(own, buffer, group=self._group, async_op=True), own
        self._grads = None

    def settle(self) -> None:
        """Add what was scattered to this rank's gradient, and free the buffer."""
        if self._scattering is not None:
            work, own = self._scattering
            assert work is not None
            assert self.grad is not None
            work.wait()
            self.grad.add_(own)
            self._scattering = None

    def _own(self, flat: Tensor) -> Tensor:
        return flat.view(self._size, -1)[self._rank]
