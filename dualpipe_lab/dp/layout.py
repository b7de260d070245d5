"""`Layout`: tensors one after the other in one flat buffer, padded, and split into equal shards.

Chapter: book/dp/distributed-adam.  In: element counts, a number of shards.  Out: offsets and ranges; no torch.
  elements per shard    ceil(n / N)          the last shards may hold only padding
  padding               N * ceil(n / N) - n  at most N - 1 elements, always zero
Elsewhere: FSDP1 `FlatParameter`; Megatron `ParamAndGradBuffer`.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class TensorRange(NamedTuple):
    """Elements `start` to `stop` of tensor number `tensor`: the part that lies in a shard."""

    tensor: int
    start: int
    stop: int


class ShardRange(NamedTuple):
    """Elements `start` to `stop` of the full tensor: those that shard number `source` holds."""

    source: int
    start: int
    stop: int


class Layout:
    """The offset of each tensor in a flat buffer, and the range of the buffer that is each shard.

    Raises:
        ValueError: if there is no shard.

    >>> layout = Layout([5, 2], num_shards=3)
    >>> layout.shard_numel, layout.padded_numel, [layout.span(shard) for shard in range(3)]
    (3, 9, [(0, 3), (3, 6), (6, 7)])
    >>> layout.tensors_in(1)
    [TensorRange(tensor=0, start=3, stop=5), TensorRange(tensor=1, start=0, stop=1)]
    """

    def __init__(self, numels: Sequence[int], num_shards: int = 1) -> None:
        if num_shards < 1:
            raise ValueError(f"a layout has at least 1 shard, got {num_shards}")
        self.numels, self.num_shards = tuple(numels), num_shards
        self.offsets = tuple(accumulate(self.numels, initial=0))[:-1]
        self.numel = sum(self.numels)
        self.shard_numel = -(-self.numel // num_shards)
        self.padded_numel = self.shard_numel * num_shards

    def span(self, shard: int) -> tuple[int, int]:
        """Return where a shard begins and ends in the buffer, without padding; it may be empty."""
        start = min(shard * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def tensors_in(self, shard: int) -> list[TensorRange]:
        """Return the elements of each tensor that lie in a shard, in order; a tensor without any is left out."""
        return self.tensors_between(*self.span(shard))

    def tensors_between(self, begin: int, end: int) -> list[TensorRange]:
        """Return the elements of each tensor that lie between two offsets of the buffer."""
        found = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            start, stop = max(begin - offset, 0), min(end - offset, numel)
            if start < stop:
                found.append(TensorRange(index, start, stop))
        return found


def reshard(numel: int, num_sources: int, num_targets: int) -> list[list[ShardRange]]:
    """Return, for each new shard, the ranges that it reads from the old shards.

    >>> reshard(7, 2, 3)[1]
    [ShardRange(source=0, start=3, stop=4), ShardRange(source=1, start=4, stop=6)]
    """
    old, new = Layout([numel], num_sources), Layout([numel], num_targets)
    spans = [new.span(target) for target in range(num_targets)]
    pairs = [[(source, *old.span(source)) for source in range(num_sources)] for _ in spans]
    return [
        [
            ShardRange(source, max(start, first), min(stop, last))
            for source, start, stop in sources
            if max(start, first) < min(stop, last)
        ]
        for (first, last), sources in zip(spans, pairs, strict=True)
    ]
