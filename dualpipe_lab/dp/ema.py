"""`ShardedEma`: a moving average of the weights, of which each rank keeps its shard.

Chapter: book/dp/hybrid-zero.  In: a sharded optimizer.  Out: averaged weights, to evaluate with and to save.
  average      e <- d e + (1 - d) w after every step; e starts as w
  bytes        4 / N per parameter (fp32 averages); no messages but those that gather weights to evaluate with
Elsewhere: torch.optim.swa_utils.AveragedModel, a whole copy on every rank.
Source: Polyak and Juditsky 1992; Tarvainen and Valpola 2017 (arXiv 1703.01780).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dualpipe_lab.dp.sharded import ShardedOptimizer


class ShardedEma:
    """The moving average of what an optimizer holds; checkpoints of the optimizer hold it too.

    Raises:
        ValueError: if `decay` is not between 0 and 1.
    """

    def __init__(self, optimizer: ShardedOptimizer, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"a moving average needs decay from 0 to below 1, got {decay}")
        self._optimizer, self.decay = optimizer, decay
        for held in optimizer.held:
            weight = held.adam.weight
            held.adam.extra["ema"] = weight.float() if weight.element_size() == 2 else weight.clone()

    def update(self) -> None:
        """Take in the weights of the step that was just made."""
        for held in self._optimizer.held:
            average = held.adam.extra["ema"]
            average.mul_(self.decay).add_(held.adam.weight.to(average.dtype), alpha=1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model compute with the averages inside of the `with` block; all ranks enter and leave together."""
        kept = [held.adam.working.clone() for held in self._optimizer.held]
        self._use([held.adam.extra["ema"] for held in self._optimizer.held])
        try:
            yield
        finally:
            self._use(kept)

    def _use(self, weights: list[torch.Tensor]) -> None:
        for held, values in zip(self._optimizer.held, weights, strict=True):
            held.adam.working.copy_(values)
        self._optimizer.publish()
