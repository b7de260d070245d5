"""`DDP`: data parallelism whose gradients are summed while the backward still runs; every rank holds everything.

Chapter: book/dp/dp-gradients.  In: a module, a group of N ranks.  Out: the same weights on every rank after each step.
  bytes per parameter    16     (2 + 2 + 12 with bf16 and a master copy; 4 + 4 + 8 in pure fp32)
  bytes sent             2 (N - 1) / N * bytes of the gradients, per rank and step, for any number of microbatches
  exposed time           at least that of the last bucket, which is full only when the backward is over
From the backward to `finish` every `.grad` is a `SealedGrad`: nothing but a backward may use what the sums will change.
Elsewhere: torch `DistributedDataParallel` (C++ Reducer); Megatron `DistributedDataParallel` with overlap_grad_reduce.
Source: Li et al. 2020 (arXiv 2006.15704), section 3.2.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable

import torch
from torch import Tensor, nn

from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.buckets import (
    BUCKET_BYTES,
    all_reduce_async,
    assign_buckets,
    make_buckets,
)
from dualpipe_lab.dp.sealed import SealedGrad, check_sealed, new_grad
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.grad_ready import Synchronizer, register_grad_hook


class DDP(ShardedOptimizer):
    """All-reduce the gradients during the backward and update all weights on every rank."""

    is_sharded = False

    reducer: "GradientReducer"

    def _take(self, module: nn.Module) -> "GradientReducer":
        reducer = reducer_of(self)
        for bucket in reducer.buckets:
            self.updater.add_shard(bucket, bucket.flatten_weights(), 0, bucket.layout.numel)
        return reducer


def reducer_of(
    optimizer: ShardedOptimizer, reduce_async: Callable[[Tensor, Group | None], Pending[Tensor]] = all_reduce_async
) -> "GradientReducer":
    """Return the reducer of an optimizer's module."""
    return GradientReducer(
        optimizer.module.parameters(),
        optimizer.group,
        num_backwards=optimizer.num_backwards,
        bucket_bytes=optimizer.bucket_bytes,
        dtype=optimizer.grad_dtype,
        kind=optimizer.updater.kind,
        reduce_async=reduce_async,
        group_of=optimizer.spec.group_of,
    )


class GradientReducer(Synchronizer):
    """Buckets of gradients, each summed over the ranks as soon as it is complete.

    Args:
        parameters: of one module, in the order of its forward; frozen ones are left out, tied ones count once.
        group: the ranks to sum over.
        num_backwards: backward passes of a step, one for each microbatch; the sums start in the last one.  A call of
            `PipelineRuntime.step` has all its microbatches, so this number counts there only if it is a multiple of
            them: gradients of several calls then accumulate.
        bucket_bytes: the largest size of a bucket.
        dtype: the type in which gradients accumulate and travel (default: that of the parameters).
        kind: parameters of different kinds do not share a bucket.
        reduce_async: launches the sum of one flat buffer over the group (default: an all-reduce; ZeRO-1 passes
            a reduce-scatter).
        group_of: the ranks to sum a parameter over, where that is a part of the group: those with the same experts.
            Parameters of one kind have one such group.

    Raises:
        ValueError: no parameter needs a gradient; `num_backwards` is below 1.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Group | None = None,
        *,
        num_backwards: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        kind: Callable[[nn.Parameter], Hashable] = lambda parameter: parameter.dtype,
        reduce_async: Callable[[Tensor, Group | None], Pending[Tensor]] = all_reduce_async,
        group_of: Callable[[nn.Parameter], Group | None] | None = None,
    ) -> None:
        if num_backwards < 1:
            raise ValueError(f"a step has at least 1 backward, got num_backwards={num_backwards}")
        chosen = assign_buckets(dict.fromkeys(parameters), bucket_bytes, kind)
        self.buckets = make_buckets(chosen, dtype, group_of or (lambda parameter: group))
        if not self.buckets:
            raise ValueError("no parameter needs a gradient; a frozen module needs no reducer")
        self.num_backwards, self.group, self._reduce_async = num_backwards, group, reduce_async
        self.is_sharded = reduce_async is not all_reduce_async
        self.flats = [bucket.allocate() for bucket in self.buckets]
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        for index, (bucket, flat) in enumerate(zip(self.buckets, self.flats, strict=True)):
            self._views |= dict(zip(bucket.parameters, bucket.views(flat), strict=True))
            self._bucket_of |= dict.fromkeys(bucket.parameters, index)
        for parameter, view in self._views.items():
            if view.dtype != parameter.dtype:
                parameter.grad_dtype = view.dtype
        self._sealed = {parameter: view.as_subclass(SealedGrad) for parameter, view in self._views.items()}
        self._hooks = [register_grad_hook(parameter, self._accumulated, self) for parameter in self._views]
        self._summed: set[nn.Parameter] = set()  # gradients that are final: nothing may be added to them
        self._pending: list[Pending[Tensor]] = []
        self._start_step()
        self._attach()

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Take note that a backward has added to a gradient; the last addition makes it ready."""
        if parameter in self._summed:
            if parameter.grad is self._views[parameter] or parameter.grad is self._sealed[parameter]:
                self.check_open()
            self._summed.discard(parameter)  # the user dropped the gradient, which starts anew
            self.is_final = False
        self._count[parameter] += 1
        if self._is_pipelined:
            self.check_addition([parameter])
            if parameter in self._last:
                self.ready([parameter])
            return
        if self._count[parameter] > self.num_backwards:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is in backward number {self._count[parameter]} of the "
                f"step, and num_backwards={self.num_backwards}; set num_backwards to the microbatches of a step, and "
                "begin every step with zero_grad() of the optimizer"
            )
        if self._count[parameter] == self.num_backwards:
            self.ready([parameter])
        else:
            self._seal(parameter)

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Declare the gradients of these parameters complete, and launch the sums of the buckets that are full now.

        A pipeline calls this when a stage's gradients are complete; it is implied after `num_backwards` backwards.
        """
        for parameter in parameters:
            if parameter in self._views and parameter not in self._complete:
                self._seal(parameter)
                if self._is_last_step:
                    self._complete.add(parameter)
                    self._missing[self._bucket_of[parameter]] -= 1
        # All ranks must launch their collectives in one order, so a full bucket waits for those before it.  A parameter
        # that this rank's microbatch did not use is ready only in `finish`, with zeros.
        while (index := len(self._pending)) < len(self.buckets) and not self._missing[index]:
            self._pending.append(self._reduce_async(self.flats[index], self.buckets[index].group))

    def finish(self) -> list[Tensor]:
        """Launch the sums that are missing, wait for all, and return the summed gradient of each bucket.

        It is the flat buffer after an all-reduce, and this rank's shard of it after a reduce-scatter.

        Raises:
            ValueError: a gradient was dropped or replaced since its backward, or not set to zero before it.
        """
        for parameter in self._closed:
            check_sealed(parameter, self._sealed[parameter])
        if self._count and any(parameter.grad is not None for parameter in self._summed):
            self.is_final = True
            self.check_open()
        return self._finish()

    def _finish(self) -> list[Tensor]:
        self._is_last_step = True
        self.ready(self._views)
        gradients = [pending.wait() for pending in self._pending]
        self._summed, self.is_final = set(self._views), True
        self._start_step()
        if not self.is_sharded:
            self._attach()  # the full sums; after a reduce-scatter `.grad` stays sealed
        return gradients

    def zero(self, num_backwards: int | None = None) -> None:
        """Set all gradients to zero, in place: they stay views of the buckets.

        Args:
            num_backwards: of the coming step, if it has another number than the last one.
        """
        if self._count or self._pending:
            self._finish()  # these gradients are not used, but all ranks must complete the sums they have launched
        for flat in self.flats:
            flat.zero_()
        self._attach()
        self._summed.clear()
        self.is_final = False
        self.num_backwards = self.num_backwards if num_backwards is None else num_backwards

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self, stages: Collection[Collection[nn.Parameter]], num_microbatches: int) -> None:
        """Let a pipeline say when gradients are complete: in the call with the last of `num_backwards` microbatches.

        Raises:
            ValueError: the sums of a step have been launched and not finished; `num_backwards` is above
                `num_microbatches`, those of this call, and no multiple of them.
        """
        self.check_addition(self._views)
        if self.num_backwards > num_microbatches and self.num_backwards % num_microbatches:
            raise ValueError(
                f"num_backwards={self.num_backwards} counts the microbatches of a step, and each call of the pipeline "
                f"has {num_microbatches}; use a multiple"
            )
        for parameter in self._closed:
            check_sealed(parameter, self._sealed[parameter])
        self._closed.clear()
        for parameter, sealed in self._sealed.items():
            if parameter.grad is sealed:
                parameter.grad = self._views[parameter]
        self._is_pipelined = True
        self._num_microbatches += num_microbatches
        self._is_last_step = self._num_microbatches >= self.num_backwards

    def begin_backward(self, parameters: Collection[nn.Parameter], is_last: bool) -> None:
        """Launch the sums of a stage's last gradients as soon as they are computed."""
        self._last = set(parameters) if is_last and self._is_last_step else set()

    def end_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Expect no more gradients of the stage."""
        self._last = set()

    def check_addition(self, parameters: Collection[nn.Parameter]) -> None:
        """Raise ValueError if the sum of one of these gradients has been launched and not finished."""
        if not self._complete.isdisjoint(parameters):
            raise ValueError(
                "something is to be added to gradients whose sum over the data ranks has begun; where a step takes "
                "several calls of the pipeline's step, set num_backwards to the microbatches of all, let the pipeline "
                "add mirrors, as it does by default, and call finish() (of an optimizer: finished_gradients()) before "
                "anything else is added"
            )

    def _start_step(self) -> None:
        self._pending = []
        self._count: Counter[nn.Parameter] = Counter()
        self._complete: set[nn.Parameter] = set()
        self._closed: set[nn.Parameter] = set()  # sealed since their backward
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._is_pipelined = False  # then a pipeline says when gradients are complete
        self._num_microbatches, self._is_last_step = 0, True  # of a pipeline; several calls may make up a step
        self._last = set[nn.Parameter]()  # complete as soon as they are computed

    def _seal(self, parameter: nn.Parameter) -> None:
        """Copy a gradient that lies elsewhere into its bucket, and let nothing but a backward use it from here on."""
        view, sealed = self._views[parameter], self._sealed[parameter]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view and parameter.grad is not sealed:
            view.copy_(new_grad(parameter))  # zero_grad(set_to_none=True) or a split backward made a new tensor
        parameter.grad = sealed
        self._closed.add(parameter)

    def _attach(self) -> None:
        self._closed.clear()
        for parameter, view in self._views.items():
            parameter.grad = view
