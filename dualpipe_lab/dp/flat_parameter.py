"""`FlatParameter`: parameters whose full values exist only while they are needed.

Chapter: book/dp/zero-3.  In: parameters, a group of N ranks.  Out: a shard that stays, a full buffer, at times.
  always       1 / N of the weights and of the gradients
  meanwhile    the full weights from `gather` to `free`, the full gradients from the first of them to `scatter_async`
The buffer's storage is freed, not the buffer: tensors that autograd saved for the backward refer to the storage, and
find the weights in it again once they are gathered.  A parameter that is not gathered is an `AbsentWeight`, of NaN.
Elsewhere: FSDP1 `FlatParamHandle`; FSDP2 `FSDPParamGroup`, whose shards are per parameter.
"""

from collections.abc import Callable, Sequence
from math import nan

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.buckets import Bucket, local_shard
from dualpipe_lab.dp.sealed import AbsentWeight, new_grad
from dualpipe_lab.grad_ready import Synchronizer, register_grad_hook


class FlatParameter:
    """Parameters of one kind in one flat buffer, of which this rank keeps one shard.

    Args:
        parameters: all trained, or all frozen.
        group: the ranks that the buffer is sharded over.
        grad_dtype: the type of the gradients (default: that of the parameters).
        on_change: called with True when the buffer's memory is allocated, with False when it is freed.
        owner: the synchronizer that a pipeline tells when gradients are complete.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Group | None,
        grad_dtype: torch.dtype | None = None,
        on_change: Callable[[bool], None] = lambda is_held: None,
        owner: Synchronizer | None = None,
    ) -> None:
        self._group, self._on_change = group, on_change
        self.bucket = Bucket(parameters, comm.get_world_size(group), grad_dtype, group)
        self.is_trained = self.bucket.parameters[0].requires_grad
        dtype, numel = self.bucket.parameters[0].dtype, self.bucket.layout.padded_numel
        self._full = torch.zeros(numel, dtype=dtype, device=self.bucket.device)
        self._views = self.bucket.views(self._full)
        for parameter, view in zip(self.bucket.parameters, self._views, strict=True):
            view.copy_(parameter.detach())
        self.shard = local_shard(self._full, group).clone()
        self.grad = self.bucket.allocate_shard() if self.is_trained else None
        self._kinds = [type(parameter) for parameter in self.bucket.parameters]
        self._absent = torch.full((), nan, dtype=dtype, device=self.bucket.device)
        self._grads: tuple[Tensor, dict[nn.Parameter, Tensor]] | None = None
        self._gathering: Pending[None] | None = None
        for parameter in self.bucket.parameters if self.is_trained else ():
            if grad_dtype is not None:
                parameter.grad_dtype = grad_dtype
            register_grad_hook(parameter, self.take, owner)
        self.is_full, self._num_holds = True, 0
        self.free()

    def start_gather(self) -> None:
        """Allocate the full weights and launch their all-gather, unless they are here or in flight."""
        if not self.is_full and self._gathering is None:
            self._full.untyped_storage().resize_(self._full.numel() * self._full.element_size())
            self._on_change(True)
            work = comm.all_gather_single(self._full, self.shard, self._group, async_op=True)
            self._gathering = Pending([work], self._attach)

    def gather(self) -> None:
        """Gather the full weights and return when they are here."""
        self.start_gather()
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def gather_again(self) -> None:
        """Gather the full weights anew if they are here or in flight: the shards have changed since."""
        if self.is_full or self._gathering is not None:
            self.gather()
            comm.all_gather_single(self._full, self.shard, self._group)

    def hold(self) -> None:
        """Gather the full weights and keep them until `release`, whatever forwards and backwards do."""
        self.gather()
        self._num_holds += 1

    def release(self) -> None:
        """Take what was changed while the weights were held into this rank's shard, and free the full weights."""
        self.shard.copy_(local_shard(self._full, self._group))
        self._num_holds -= 1
        self.free()

    def free(self) -> None:
        """Free the full weights and keep the shard."""
        if self._gathering is not None:
            self.gather()  # a message in flight needs its buffer
        if self.is_full and not self._num_holds:
            for parameter in self.bucket.parameters:
                parameter.data = self._absent.expand(parameter.shape)
                parameter.__class__ = AbsentWeight
            self._full.untyped_storage().resize_(0)
            self.is_full = False
            self._on_change(False)

    @property
    def has_gradients(self) -> bool:
        """Return whether some gradients have not been reduce-scattered yet."""
        return self._grads is not None

    def take(self, parameter: nn.Parameter) -> None:
        """Move the finished gradient of a parameter into the full gradient buffer."""
        if self._grads is None:
            buffer = self.bucket.allocate()
            self._grads = buffer, dict(zip(self.bucket.parameters, self.bucket.views(buffer), strict=True))
        self._grads[1][parameter].add_(new_grad(parameter))
        parameter.grad = None

    def zero_grad(self) -> None:
        """Set the gradient shard to zero, and drop gradients that have not been reduce-scattered."""
        self._grads = None
        if self.grad is not None:
            self.grad.zero_()

    def scatter_async(self) -> Pending[None]:
        """Launch the reduce-scatter of the gradients, whose shard is added to `grad`; unused parameters send zeros."""
        buffer = self._grads[0] if self._grads else self.bucket.allocate()
        shard = local_shard(buffer, self._group)
        self._grads = None
        work = comm.reduce_scatter_single(shard, buffer, group=self._group, async_op=True)
        return Pending([work], lambda: self._add(shard))

    def _add(self, shard: Tensor) -> None:
        assert self.grad is not None
        self.grad.add_(shard)

    def _attach(self) -> None:
        self.is_full = True
        for parameter, kind, view in zip(self.bucket.parameters, self._kinds, self._views, strict=True):
            parameter.__class__ = kind
            parameter.data = view


def is_absent(parameter: Tensor) -> bool:
    """Return whether a parameter is not gathered now."""
    return isinstance(parameter, AbsentWeight)
