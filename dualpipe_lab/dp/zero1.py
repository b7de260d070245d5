"""ZeRO-1: each rank updates one shard of the weights, and keeps the optimizer state of that shard alone.

Chapter: book/dp/zero-1.  In: a module, a group of N ranks.  Out: the same weights on every rank after each step.
  bytes per parameter    4 + 12 / N     (bf16 with a master copy)        8 + 8 / N     (pure fp32)
  bytes sent             reduce-scatter + all-gather = 2 (N - 1) / N * bytes of the parameters: those of an all-reduce
The gradients still need their full buffers: each rank computes all of them.
Elsewhere: torch `ZeroRedundancyOptimizer` (assigns full parameters to ranks); Megatron `DistributedOptimizer`.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.1.
"""

from torch import nn

from dualpipe_lab.dp.buckets import all_gather_async, reduce_scatter_async
from dualpipe_lab.dp.ddp import GradientReducer, reducer_of
from dualpipe_lab.dp.sharded import ShardedOptimizer


class Zero1(ShardedOptimizer):
    """Reduce-scatter the gradients once per step, update the local shard, all-gather the weights."""

    reducer: GradientReducer

    def _take(self, module: nn.Module) -> GradientReducer:
        reducer = reducer_of(self, reduce_scatter_async)
        reducer.name = "Zero1"
        self.flats = [bucket.flatten_weights() for bucket in reducer.buckets]
        self.updater.add_shards(reducer.buckets, self.flats)
        return reducer

    def all_gather_weights(self) -> None:
        """All-gather the updated shards into the flat buffers, of which the parameters are views."""
        all_gather_async(self.reducer.buckets, self.flats).wait()
