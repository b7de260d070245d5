"""`Ddp`: plain data parallelism with AdamW; every rank holds everything.  The measure of what ZeRO saves.

Chapter: book/dp/dp-gradients.  In: a module, a group of N ranks.  Out: the same weights on every rank after each step.
  bytes per parameter    16     (2 + 2 + 12 with bf16 and a master copy; 4 + 4 + 8 in pure fp32)
  bytes sent             2 (N - 1) / N * bytes of the gradients
Elsewhere: torch `DistributedDataParallel` with torch.optim.AdamW.
"""

from torch import Tensor, nn

from dualpipe_lab.comm.groups import Group
from dualpipe_lab.dp.gradients import GradientReducer
from dualpipe_lab.dp.sharded import Options, ShardedOptimizer, flatten


class Ddp(ShardedOptimizer):
    """All-reduce the gradients, update everything everywhere.

    Raises:
        ValueError: no parameter needs a gradient.
    """

    is_sharded = False

    def __init__(self, module: nn.Module, group: Group | None = None, options: Options | None = None) -> None:
        options = options or Options()
        super().__init__(module, group, options)
        self.reducer = GradientReducer(
            module.parameters(), group, options.num_backwards, options.bucket_bytes, options.grad_dtype, self.kind
        )
        for bucket in self.reducer.buckets:
            self.held.append(self._hold(bucket, flatten(bucket), 0, bucket.layout.numel))

    def publish(self) -> None:
        """Do nothing: every rank made the same update."""

    def _zero(self) -> None:
        self.reducer.zero()
        self.reducer.num_backwards = self.num_backwards

    def _gradients(self) -> list[Tensor]:
        self.reducer.finish()
        return self.reducer.flats
