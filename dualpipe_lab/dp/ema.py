"""`ShardedEMA`: a moving average of the weights, sharded like the optimizer state.

Chapter: book/dp/hybrid-zero.  In: a sharded optimizer.  Out: averaged weights, to evaluate with and to save.
  average      e <- d e + (1 - d) w after every step; e starts as w
  bytes        4 / N per parameter (fp32 averages); the only messages gather the averages for an evaluation
Elsewhere: torch.optim.swa_utils.AveragedModel, which keeps a full copy on every rank.
Source: Polyak and Juditsky 1992; Tarvainen and Valpola 2017 (arXiv 1703.01780).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dualpipe_lab.dp.sharded import ShardedOptimizer


class ShardedEMA:
    """An exponential moving average of an optimizer's weights; checkpoints of the optimizer include it.

    Raises:
        ValueError: if `decay` is not between 0 and 1.
    """

    def __init__(self, optimizer: ShardedOptimizer, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"a moving average needs decay from 0 to below 1, got {decay}")
        self._optimizer, self.decay = optimizer, decay
        for shard in optimizer.local_shards:
            weight = shard.optimizer.weight
            shard.optimizer.extra["ema"] = weight.float() if weight.element_size() == 2 else weight.clone()

    def update(self) -> None:
        """Update the average with the current weights; call it after every step."""
        for shard in self._optimizer.local_shards:
            average = shard.optimizer.extra["ema"]
            average.mul_(self.decay).add_(shard.optimizer.weight.to(average.dtype), alpha=1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averages into the model inside of the `with` block; all ranks must enter and leave it together."""
        kept = [shard.optimizer.working.clone() for shard in self._optimizer.local_shards]
        self._use([shard.optimizer.extra["ema"] for shard in self._optimizer.local_shards])
        try:
            yield
        finally:
            self._use(kept)

    def _use(self, weights: list[torch.Tensor]) -> None:
        for shard, values in zip(self._optimizer.local_shards, weights, strict=True):
            shard.optimizer.working.copy_(values)
        self._optimizer.all_gather_weights()
