"""What ZeRO-1 and ZeRO-2 share: weights that are whole on every rank, in flat buffers gathered after each update.

Chapter: book/dp/zero-1.  In: buckets of parameters.  Out: their flat buffers, of which each rank updates one shard.
  bytes sent by `publish`   (N - 1) / N * bytes of the parameters
"""

from collections.abc import Sequence

from torch import Tensor

from dualpipe_lab import comm
from dualpipe_lab.dp.buckets import Bucket
from dualpipe_lab.dp.sharded import ShardedOptimizer, flatten


class GatheredOptimizer(ShardedOptimizer):
    """Updates this rank's shard of every flat buffer and gathers the others'."""

    flats: list[Tensor]

    def publish(self) -> None:
        """Gather all shards into the flat buffers, of which the parameters are views."""
        works = [comm.all_gather_single(flat, self._own(flat), self.group, async_op=True) for flat in self.flats]
        for work in works:
            assert work is not None
            work.wait()

    def _hold_shards(self, buckets: Sequence[Bucket]) -> None:
        """Move the parameters into flat buffers and make the optimizer state of this rank's shards."""
        self.flats = [flatten(bucket) for bucket in buckets]
        for bucket, flat in zip(buckets, self.flats, strict=True):
            self.held.append(self._hold(bucket, self._own(flat), *bucket.layout.span(self.group_rank)))

    def _own(self, flat: Tensor) -> Tensor:
        return flat.view(self.group_size, -1)[self.group_rank]
