"""ZeRO-1: each rank updates, and keeps the optimizer state of, one shard of the weights.

Chapter: book/dp/zero-1.  In: a module, a group of N ranks.  Out: the same weights on every rank after each step.
  bytes per parameter    4 + 12 / N     (bf16 with a master copy)        8 + 8 / N     (pure fp32)
  bytes sent             reduce-scatter + all-gather = 2 (N - 1) / N * bytes of the parameters: those of an all-reduce
The gradients still need their full buffers: each rank makes all of them.
Elsewhere: torch `ZeroRedundancyOptimizer` (deals out whole parameters); Megatron `DistributedOptimizer`.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.1.
"""

from torch import Tensor, nn

from dualpipe_lab import comm
from dualpipe_lab.comm import Work
from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.gathered import GatheredOptimizer
from dualpipe_lab.dp.gradients import GradientReducer
from dualpipe_lab.dp.sharded import Options


class ScatterReducer(GradientReducer):
    """Sums each bucket, of which this rank gets its own shard; the rest of the buffer holds nothing of use then."""

    is_sharded = True

    def _reduce(self, flat: Tensor) -> Work | None:
        own = flat.view(comm.get_world_size(self.group), -1)[comm.get_rank(self.group)]
        return comm.reduce_scatter_single(own, flat, group=self.group, async_op=True)


class Zero1(GatheredOptimizer):
    """Reduce-scatter the gradients, update the own shard, all-gather the weights.

    Raises:
        ValueError: no parameter needs a gradient.
    """

    def __init__(self, module: nn.Module, group: Group | None = None, options: Options | None = None) -> None:
        options = options or Options()
        super().__init__(module, group, options)
        self.reducer = ScatterReducer(
            module.parameters(), group, options.num_backwards, options.bucket_bytes, options.grad_dtype, self.kind
        )
        self._hold_shards(self.reducer.buckets)

    def _zero(self) -> None:
        self.reducer.zero()
        self.reducer.num_backwards = self.num_backwards

    def _gradients(self) -> list[Tensor]:
        self.reducer.finish()
        return [self._own(flat) for flat in self.reducer.flats]
