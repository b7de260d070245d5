"""ZeRO-1: each rank updates one shard of the weights, and keeps the optimizer state of that shard alone.

Chapter: book/dp/zero-1.  In: a module, a group of N ranks.  Out: the same weights on every rank after each step.
  bytes per parameter    4 + 12 / N     (bf16 with a master copy)        8 + 8 / N     (pure fp32)
  bytes sent             reduce-scatter + all-gather = 2 (N - 1) / N * bytes of the parameters: those of an all-reduce
The gradients still need their full buffers: each rank computes all of them.
Elsewhere: torch `ZeroRedundancyOptimizer` (assigns full parameters to ranks); Megatron `DistributedOptimizer`.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.1.
"""

from torch import nn

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.buckets import start_all_gather, start_reduce_scatter
from dualpipe_lab.dp.ddp import GradientReducer
from dualpipe_lab.dp.mixed_precision import LossScaler
from dualpipe_lab.dp.sharded import ShardedOptimizer, StepReport, ZeroOptions
from dualpipe_lab.launch.mesh import Mesh
from dualpipe_lab.pp.program import Program


class Zero1(ShardedOptimizer):
    """Reduce-scatter the gradients once per step, update the local shard, all-gather the weights.

    Raises:
        ValueError: no parameter needs a gradient.
    """

    reducer: GradientReducer

    def __init__(
        self,
        module: nn.Module,
        group: Group | Mesh | None = None,
        options: ZeroOptions | None = None,
        program: Program | None = None,
    ) -> None:
        super().__init__(module, group, options, program)
        self.reducer = GradientReducer(
            module.parameters(),
            self.group,
            self.options.num_backwards,
            self.options.bucket_bytes,
            self.options.grad_dtype,
            self.adam.kind,
            start_reduce_scatter,
            self.declaration.group_of,
        )
        self.reducer.name = "Zero1"
        self.reducer.sums_tied, self.reducer.sums_partial = self.sums_tied, self.sums_partial
        self.flats = [bucket.flatten_weights() for bucket in self.reducer.buckets]
        self.adam.add_shards(self.reducer.buckets, self.flats)

    def step(
        self,
        lr_factor: float = 1.0,
        max_norm: float | None = None,
        scaler: LossScaler | None = None,
        norm_type: float = 2.0,
        norm: float | None = None,
    ) -> StepReport:
        """Take one step of ZeRO-1; the arguments are those of `ShardedAdam.update`."""
        # 1. reduce-scatter: launched by hooks as buckets filled up in the last backward, completed here
        gradients = self.finished_gradients()
        # 2. norm and clip, 3. AdamW on the local shard
        report = self.adam.update(gradients, lr_factor, max_norm, scaler, norm_type, norm)
        # 4. all-gather
        if report.stepped:
            self.all_gather_weights()
        return report

    def all_gather_weights(self) -> None:
        """All-gather the updated shards into the flat buffers, of which the parameters are views."""
        start_all_gather(self.reducer.buckets, self.flats).wait()
