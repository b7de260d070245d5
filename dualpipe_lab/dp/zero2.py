"""ZeRO-2: the gradients are sharded too; a bucket lives only until its sum has been reduce-scattered.

Chapter: book/dp/zero-2.  In: a module, a group of N ranks.  Out: the same weights on every rank after each step.
  bytes per parameter    2 + 14 / N     (bf16 with a master copy)        4 + 12 / N     (pure fp32)
  peak on top of that    two buckets: one is filled, one is in flight; on GLOO as much again for what is received
  bytes sent             (m + 1) (N - 1) / N * bytes of the parameters: m microbatches, one reduce-scatter for each
                         (a bucket that two stages of a pipeline share is reduce-scattered for each of them)
Elsewhere: DeepSpeed stage 2; FSDP2 with `reshard_after_forward=False` is close to it.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.2.
"""

from collections.abc import Collection, Iterable
from functools import partial

from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab._private import call_after_backward
from dualpipe_lab.comm import Pending
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.buckets import (
    Bucket,
    all_gather_async,
    assign_buckets,
    make_buckets,
    reduce_scatter_async,
)
from dualpipe_lab.dp.sealed import SealedGrads, new_grad
from dualpipe_lab.dp.sharded import ShardedOptimizer
from dualpipe_lab.grad_ready import GradShard, Synchronizer, register_grad_hook


class Zero2(ShardedOptimizer):
    """Reduce-scatter each bucket when it is full and free it, update the local shard, all-gather the weights."""

    reducer: "BucketReducer"

    def _take(self, module: nn.Module) -> "BucketReducer":
        chosen = assign_buckets(module.parameters(), self.bucket_bytes, self.updater.kind)
        self.buckets = make_buckets(chosen, self.grad_dtype, self.spec.group_of)
        self.flats = [bucket.flatten_weights() for bucket in self.buckets]
        self.updater.add_shards(self.buckets, self.flats)
        return BucketReducer(self.buckets, self.group, self.num_backwards)

    def all_gather_weights(self) -> None:
        """All-gather the updated shards into the flat buffers, of which the parameters are views."""
        all_gather_async(self.buckets, self.flats).wait()


class BucketReducer(Synchronizer):
    """Reduce-scatters each bucket in every backward, as soon as it is full, and keeps this rank's gradient shards.

    All ranks launch the buckets in one order.  A pipeline says when a backward ends; without one, each run of
    autograd's engine is a backward.
    """

    name, is_sharded = "Zero2", True

    def __init__(self, buckets: list[Bucket], group: Group | None, num_backwards: int) -> None:
        self.buckets, self.group, self.num_backwards = buckets, group, num_backwards
        self.shards = [bucket.allocate_shard() for bucket in buckets]
        self._position: dict[nn.Parameter, tuple[int, int]] = {}  # bucket, position in it
        for index, bucket in enumerate(buckets):
            self._position |= {parameter: (index, position) for position, parameter in enumerate(bucket.parameters)}
            for parameter in bucket.parameters:
                if bucket.dtype != parameter.dtype:
                    parameter.grad_dtype = bucket.dtype
                register_grad_hook(parameter, self._accumulated, self)
        self._filling: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by bucket: its buffer, and the views of it
        self._in_flight: tuple[int, Pending[Tensor]] | None = None
        self._seals = SealedGrads({parameter: self.shards[index] for parameter, (index, _) in self._position.items()})
        self._num_done, self._is_pipelined, self.is_final = 0, False, False
        self._missing: dict[int, set[nn.Parameter]] = {}  # by bucket of the current backward, in launch order
        self._is_running = False

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Move a gradient into its bucket, and launch the buckets that are full now."""
        self.check_open()
        if not self._is_running and not self._is_pipelined:
            self._begin_by_itself()
        self._move(parameter)
        self._missing.get(self._position[parameter][0], set()).discard(parameter)
        while self._missing and not self._missing[first := next(iter(self._missing))]:
            self._launch(first)

    def _move(self, parameter: nn.Parameter) -> None:
        index, position = self._position[parameter]
        if index not in self._filling:
            buffer = self.buckets[index].allocate()
            self._filling[index] = buffer, self.buckets[index].views(buffer)
        self._filling[index][1][position].add_(new_grad(parameter))
        parameter.grad = None

    def _launch(self, index: int) -> None:
        """Launch the reduce-scatter of a bucket; the one before is completed first, so that two are in memory."""
        self._complete()
        buffer = self._filling.pop(index)[0] if index in self._filling else self.buckets[index].allocate()
        self._in_flight = index, reduce_scatter_async(buffer, self.buckets[index].group)
        del self._missing[index]

    def _complete(self) -> None:
        """Wait for the bucket in flight, add it to this rank's gradient shard, and free it."""
        if self._in_flight is not None:
            index, pending = self._in_flight
            self.shards[index].add_(pending.wait())
            self._in_flight = None

    def finish(self) -> list[Tensor]:
        """Complete the sums and return the gradient shards; a rank that ran fewer backwards sends zeros.

        Raises:
            ValueError: a gradient was touched since its backward, or belongs to no backward.
        """
        self._seals.check()
        self._complete_backwards()  # a rank without data ran none
        if self._filling:
            raise ValueError(self.outside_of_backwards())
        self.is_final = True
        self._seals.close()
        return self.shards

    def zero(self, num_backwards: int | None = None) -> None:
        """Set the gradient shards to zero and start a step of so many backwards."""
        if self._is_running:  # a backward raised; ranks that stopped elsewhere have launched other buckets
            self.end_backward(())
        if self._num_done:
            self._complete_backwards()
        self._filling.clear()
        self._num_done, self._is_pipelined, self.is_final = 0, False, False
        self.num_backwards = self.num_backwards if num_backwards is None else num_backwards
        self._seals.clear()
        for shard in self.shards:
            shard.zero_()

    def _complete_backwards(self) -> None:
        """Send zeros for the backwards of this step that this rank has not run."""
        while not self._is_pipelined and self._num_done < self.num_backwards:
            self.begin_backward(self._position, False)
            self.end_backward(self._position)

    def begin_step(self, stages: Collection[Collection[nn.Parameter]], num_microbatches: int) -> None:
        """Let a pipeline say when a backward begins and ends."""
        self.check_open()
        self._seals.open()
        self._is_pipelined = True

    def ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let nothing but the next step of a pipeline use these gradients."""
        self._seals.close(parameters)

    def begin_backward(self, parameters: Collection[nn.Parameter], is_last: bool) -> None:
        """Expect the gradients of one stage and microbatch; a bucket is launched when it is full."""
        self.check_open()
        self._is_running = True
        self._seals.open(parameters)
        for parameter in parameters:
            self._missing.setdefault(self._position[parameter][0], set()).add(parameter)
        self._missing = dict(sorted(self._missing.items()))

    def end_backward(self, parameters: Collection[nn.Parameter]) -> None:
        """Launch the remaining buckets, with zeros for parameters that were not used."""
        for parameter in parameters:
            if parameter.grad is not None:  # not made by autograd
                self._move(parameter)
        while self._missing:
            self._launch(next(iter(self._missing)))
        self._complete()
        self._num_done += 1
        self._is_running = False
        if not self._is_pipelined:
            self._seals.close()

    def before_weight_grad(self, parameter: nn.Parameter, is_made: bool) -> None:
        """Raise ValueError for a W outside of a backward that a pipeline has announced."""
        if not self._is_running:
            raise ValueError(self.outside_of_backwards())

    def grad_shards(self) -> dict[nn.Parameter, GradShard]:
        """Return, by parameter, the elements of the sums that this rank keeps."""
        found: dict[nn.Parameter, GradShard] = {}
        for bucket, shard in zip(self.buckets, self.shards, strict=True):
            found |= bucket.grad_shards(shard, comm.get_rank(bucket.group))
        return found

    def _begin_by_itself(self) -> None:
        """Begin a backward with the first gradient that autograd's engine computes; it ends with the engine."""
        if self._num_done >= self.num_backwards:
            raise ValueError(
                f"this is backward number {self._num_done + 1} of the step, and "
                f"num_backwards={self.num_backwards}; set it to the microbatches of a step; {_RUNS}"
            )
        try:
            call_after_backward(partial(self.end_backward, self._position))
        except RuntimeError as error:
            raise ValueError(self.outside_of_backwards()) from error
        self.begin_backward(self._position, False)


_RUNS = (
    "each run of autograd's engine counts as one, so a microbatch must not take several: where W is apart from I, run "
    "the stages with a PipelineRuntime, and recompute with pp.recompute, or with torch's and use_reentrant=False"
)
