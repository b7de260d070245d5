"""ZeRO-2: the gradients are dealt out too; a bucket lives only until its sum has been scattered.

Chapter: book/dp/zero-2.  In: a module, a group of N ranks.  Out: the same weights on every rank after each step.
  bytes per parameter    2 + 14 / N     (bf16 with a master copy)        4 + 12 / N     (pure fp32)
  on top, for a moment   two buckets at most: one that fills, one that travels; on GLOO as much again for what arrives
  bytes sent             (m + 1) (N - 1) / N * bytes of the parameters: m microbatches, each scattered at once
                         (a bucket that two stages of a pipeline share is scattered for each of them)
The plan: a hook moves each finished gradient into its bucket's buffer and drops it.  A full bucket is reduce-scattered
during the backward and added to the shard that this rank keeps.  Buckets travel in one order on all ranks; what the
part of a rank did not use follows, as zeros, at the end of its backward.  A pipeline says when that is; elsewhere each
run of autograd's engine is a backward.
Elsewhere: DeepSpeed stage 2; FSDP2 with `reshard_after_forward=False` is close to it.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.2.
"""

from collections.abc import Collection
from functools import partial

from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab._private import call_after_backward
from dualpipe_lab.comm import Work
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.buckets import Bucket, cut, when_accumulated
from dualpipe_lab.dp.gathered import GatheredOptimizer
from dualpipe_lab.dp.sharded import Options
from dualpipe_lab.dp.synchronizer import Piece, Synchronizer


class Zero2(GatheredOptimizer, Synchronizer):
    """Reduce-scatter each bucket when it is full, free it, update the own shard, all-gather the weights.

    Raises:
        ValueError: no parameter needs a gradient.
    """

    def __init__(self, module: nn.Module, group: Group | None = None, options: Options | None = None) -> None:
        options = options or Options()
        super().__init__(module, group, options)
        chosen = cut(module.parameters(), options.bucket_bytes, self.kind)
        if not chosen:
            raise ValueError("no parameter needs a gradient; a frozen module needs no optimizer")
        self.buckets = [Bucket(parameters, self.group_size, options.grad_dtype) for parameters in chosen]
        self._hold_shards(self.buckets)
        self.shards = [bucket.shard() for bucket in self.buckets]
        self._place: dict[nn.Parameter, tuple[int, int]] = {}  # bucket, position in it
        for index, bucket in enumerate(self.buckets):
            self._place |= {parameter: (index, position) for position, parameter in enumerate(bucket.parameters)}
        for parameter in self._place:
            if options.grad_dtype is not None:
                parameter.grad_dtype = options.grad_dtype
            when_accumulated(parameter, self._accumulated, self)
        self._filling: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by bucket: its buffer, and the views of it
        self._travelling: tuple[Work | None, int, Tensor] | None = None
        self._num_done, self._is_led = 0, False
        self._missing: dict[int, set[nn.Parameter]] = {}  # by bucket of the backward that runs, in their order
        self._is_running = False

    def begin_step(self, stages: Collection[Collection[nn.Parameter]]) -> None:
        """Let a pipeline say when a backward begins and when it is over."""
        self._check_open()
        self._is_led = True

    def begin_backward(self, parameters: Collection[nn.Parameter], is_last: bool) -> None:
        """Await the gradients of one stage and microbatch; its buckets leave as they fill."""
        self._check_open()
        self._is_running = True
        for parameter in parameters:
            self._missing.setdefault(self._place[parameter][0], set()).add(parameter)
        self._missing = dict(sorted(self._missing.items()))

    def end_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Scatter what has not left yet, with zeros for what was not used."""
        for parameter in parameters:
            if parameter.grad is not None:  # not made by autograd
                self._move(parameter)
        while self._missing:
            self._scatter(next(iter(self._missing)))
        self._settle()
        self._num_done += 1
        self._is_running = False

    def before_weight_grad(self, parameter: nn.Parameter, is_made: bool) -> None:
        """Refuse a W that nobody has announced."""
        if not self._is_running:
            raise ValueError(_OUTSIDE)

    def pieces(self) -> dict[nn.Parameter, Piece]:
        """By parameter, what this rank's shards hold of the sums."""
        found: dict[nn.Parameter, Piece] = {}
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            found |= bucket.pieces(shard, self.group_rank)
        return found

    def _zero(self) -> None:
        self._num_done, self._is_led = 0, False
        for shard in self.shards:
            shard.zero_()

    def _gradients(self) -> list[Tensor]:
        while not self._is_led and self._num_done < self.num_backwards:
            self.begin_backward(self._place, False)  # a rank without data has not come here by itself
            self.end_backward(self._place)
        if self._filling:
            raise ValueError(_OUTSIDE)
        return self.shards

    def _accumulated(self, parameter: nn.Parameter) -> None:
        self._check_open()
        if not self._is_running and not self._is_led:
            self._begin_by_itself()
        self._move(parameter)
        self._missing.get(self._place[parameter][0], set()).discard(parameter)
        while self._missing and not self._missing[first := next(iter(self._missing))]:
            self._scatter(first)

    def _begin_by_itself(self) -> None:
        """Begin a backward with the first gradient that the engine makes; it ends with the engine."""
        if self._num_done >= self.num_backwards:
            raise ValueError(
                f"this is backward number {self._num_done + 1} of the step, and "
                f"num_backwards={self.num_backwards}; set it to the microbatches of a step"
            )
        try:
            call_after_backward(partial(self.end_backward, self._place))
        except RuntimeError as error:
            raise ValueError(_OUTSIDE) from error
        self.begin_backward(self._place, False)

    def _move(self, parameter: nn.Parameter) -> None:
        """Take a gradient out of its parameter and into its bucket's buffer."""
        index, position = self._place[parameter]
        if index not in self._filling:
            buffer = self.buckets[index].allocate()
            self._filling[index] = buffer, self.buckets[index].views(buffer)
        self._filling[index][1][position].add_(parameter.grad.detach())
        parameter.grad = None

    def _scatter(self, index: int) -> None:
        self._settle()
        buffer = self._filling.pop(index)[0] if index in self._filling else self.buckets[index].allocate()
        own = self._own(buffer)
        self._travelling = comm.reduce_scatter_single(own, buffer, group=self.group, async_op=True), index, own
        del self._missing[index]

    def _settle(self) -> None:
        """Add the bucket that travels to this rank's shard, and free it."""
        if self._travelling is not None:
            work, index, own = self._travelling
            assert work is not None
            work.wait()
            self.shards[index].add_(own)
            self._travelling = None


_OUTSIDE = (
    "ZeRO-2 has got gradients that belong to no backward, as W makes them outside of autograd's engine; run the stages "
    "with a PipelineRuntime, and nothing else in the same step"
)
