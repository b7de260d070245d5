"""`GradientReducer`: sums gradients over the ranks while the backward still runs.

Chapter: book/dp/dp-gradients.  In: parameters, a group of N ranks.  Out: every `.grad` is the sum over the ranks.
  bytes sent     2 (N - 1) / N * bytes of the gradients, per rank and step, for any number of microbatches
  exposed time   that of the last bucket at least: it is full only when the backward is over
The plan: a hook on each parameter runs when its gradient has been accumulated.  The hook that completes a bucket
starts the bucket's all-reduce, which travels while the backward goes on.  Ranks must start their collectives in the
same order, so a bucket that is complete waits for those before it; a parameter that this rank's part did not use
completes only in `finish`, with zeros.
Elsewhere: torch `DistributedDataParallel` (C++ Reducer); Megatron `DistributedDataParallel` with overlap_grad_reduce.
Source: Li et al. 2020 (arXiv 2006.15704), section 3.2.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable

import torch
from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm import Work
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.buckets import BUCKET_BYTES, Bucket, cut, when_accumulated
from dualpipe_lab.dp.synchronizer import Synchronizer


class GradientReducer(Synchronizer):
    """Buckets of gradients, each summed over the ranks as soon as it is complete.

    Args:
        parameters: of one module, in the order of its forward; frozen ones are left out, tied ones count once.
        group: the ranks to sum over.
        num_backwards: backward passes of a step, one for each microbatch; the sums start in the last one.  A
            `PipelineRuntime` says itself when gradients are complete, and this number plays no part.
        bucket_bytes: how much travels together.
        dtype: the type in which gradients accumulate and travel (default: that of the parameters).
        kind: parameters of different kinds do not share a bucket.

    Raises:
        ValueError: no parameter needs a gradient; `num_backwards` is below 1.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Group | None = None,
        num_backwards: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        kind: Callable[[nn.Parameter], Hashable] = lambda parameter: parameter.dtype,
    ) -> None:
        if num_backwards < 1:
            raise ValueError(f"a step has at least 1 backward, got num_backwards={num_backwards}")
        size = comm.get_world_size(group)
        self.buckets = [Bucket(chosen, size, dtype) for chosen in cut(dict.fromkeys(parameters), bucket_bytes, kind)]
        if not self.buckets:
            raise ValueError("no parameter needs a gradient; a frozen module needs no reducer")
        self.num_backwards, self.group = num_backwards, group
        self.flats = [bucket.allocate() for bucket in self.buckets]
        self._views: dict[nn.Parameter, Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        for index, (bucket, flat) in enumerate(zip(self.buckets, self.flats, strict=True)):
            self._views |= dict(zip(bucket.parameters, bucket.views(flat), strict=True))
            self._bucket_of |= dict.fromkeys(bucket.parameters, index)
        self._hooks = [when_accumulated(parameter, self._accumulated, self) for parameter in self._views]
        self._summed: set[nn.Parameter] = set()  # gradients that are final: nothing may be added to them
        self._works: list[Work | None] = []
        self._attach()
        self._start_step()

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Say that the gradients of these parameters are complete, however they were made.

        A pipeline calls this when a stage's gradients are complete; it is implied after `num_backwards` backwards.
        """
        for parameter in parameters:
            if parameter in self._views and parameter not in self._complete:
                self._complete.add(parameter)
                self._missing[self._bucket_of[parameter]] -= 1
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._launch(len(self._works))

    def finish(self) -> None:
        """Sum what has not been summed yet, and return when every gradient is final."""
        self.ready(self._views)
        for work in self._works:
            if work is not None:
                work.wait()
        self._summed = set(self._views)
        self._start_step()

    def zero(self) -> None:
        """Set all gradients to zero, in place: they stay parts of the buckets."""
        if self._count or self._works:
            self.finish()  # nobody wants these gradients, but sums under way must end alike on all ranks
        for flat in self.flats:
            flat.zero_()
        self._attach()
        self._summed.clear()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self, stages: Collection[Collection[nn.Parameter]]) -> None:
        """Let a pipeline say when gradients are complete.

        Raises:
            ValueError: the sums of a step have begun, and nobody has finished them.
        """
        self.check_addition(self._views)
        self._is_led = True

    def begin_backward(self, parameters: Collection[nn.Parameter], is_last: bool) -> None:
        """Sum the last gradients of a stage as soon as they are made."""
        self._last = set(parameters) if is_last else set()

    def end_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Await nothing more."""
        self._last = set()

    def check_addition(self, parameters: Collection[nn.Parameter]) -> None:
        """Raise ValueError if the sum of one of these gradients has begun, and nobody has finished it."""
        if not self._complete.isdisjoint(parameters):
            raise ValueError(
                "something is to be added to gradients whose sum over the data ranks has begun; give a step of a "
                "pipeline all microbatches, let it add mirrors (sum_mirrors=True), and call finish() (of an "
                "optimizer: finished_gradients()) before anything else is added"
            )

    def _reduce(self, flat: Tensor) -> Work | None:
        """Start to sum one bucket; ZeRO does something else here."""
        return comm.all_reduce(flat, group=self.group, async_op=True)

    def _start_step(self) -> None:
        self._works = []
        self._count: Counter[nn.Parameter] = Counter()
        self._complete: set[nn.Parameter] = set()
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._is_led = False  # by a pipeline, which says when gradients are complete
        self._last = set[nn.Parameter]()  # complete as soon as they are made

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if parameter in self._summed:
            if parameter.grad is self._views[parameter]:
                raise ValueError("a backward adds to gradients that are summed already; call zero() before it")
            self._summed.discard(parameter)  # the optimizer dropped the gradient, which starts anew
        self._count[parameter] += 1
        if self._is_led:
            self.check_addition([parameter])
            if parameter in self._last:
                self.ready([parameter])
            return
        if self._count[parameter] > self.num_backwards:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} is in backward number {self._count[parameter]} of the "
                f"step, and num_backwards={self.num_backwards}; set num_backwards to the microbatches of a step"
            )
        if self._count[parameter] == self.num_backwards:
            self.ready([parameter])

    def _launch(self, index: int) -> None:
        """Bring stray gradients into the bucket and start its sum."""
        for parameter in self.buckets[index].parameters:
            view = self._views[parameter]
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:  # zero_grad(set_to_none=True) or a split backward made a new tensor
                view.copy_(parameter.grad.detach())
            parameter.grad = view
        self._works.append(self._reduce(self.flats[index]))

    def _attach(self) -> None:
        for parameter, view in self._views.items():
            if view.dtype != parameter.dtype:
                parameter.grad_dtype = view.dtype
            parameter.grad = view
