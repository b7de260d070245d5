"""`ShardRegion`: the elements of a full tensor that lie in a shard, and the intersection of two shards; no torch.

Chapter: book/dp/io.  In: a slice along one axis, then a range of the flattened slice.  Out: ranges to copy.
Tensor parallelism shards a tensor along an axis; ZeRO then shards the slice as a flat buffer.  Both are runs of
consecutive elements of the full tensor, so shards of any layout can be read from shards of any other.
  runs of a region   1 along axis 0, otherwise one per index of the axes before
  intersection       one pass over the runs of both
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class CopyRange(NamedTuple):
    """Elements `source` to `source + length` of one region are elements `target` to `target + length` of another."""

    source: int
    target: int
    length: int


class ShardRegion(NamedTuple):
    """Elements `first` to `last` of a flattened slice: `start` to `stop` along `axis` of a tensor of `shape`."""

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int
    first: int
    last: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.last - self.first

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the begin and length of each run of consecutive elements in the flattened full tensor.

        >>> list(ShardRegion((2, 4), axis=1, start=1, stop=3, first=1, last=4).runs())
        [(2, 1), (5, 2)]
        """
        inner = prod(self.shape[self.axis + 1 :])
        block = (self.stop - self.start) * inner  # elements of the slice that lie together
        position = self.first
        while position < self.last:
            outer, offset = divmod(position, block)
            length = min(block - offset, self.last - position)
            yield (outer * self.shape[self.axis] + self.start) * inner + offset, length
            position += length


def full_region(shape: tuple[int, ...]) -> ShardRegion:
    """Return the region of all elements of a tensor; a scalar counts as a vector of length 1.

    >>> full_region((2, 3)).numel, full_region(()).shape
    (6, (1,))
    """
    shape = shape or (1,)
    return ShardRegion(shape, 0, 0, shape[0], 0, prod(shape))


def copies_between(source: ShardRegion, target: ShardRegion) -> list[CopyRange]:
    """Return the ranges of elements that two regions share.

    >>> copies_between(ShardRegion((6,), 0, 0, 6, 0, 4), ShardRegion((6,), 0, 0, 6, 3, 6))
    [CopyRange(source=3, target=0, length=1)]
    """
    found: list[CopyRange] = []
    sources, targets = list(source.runs()), list(target.runs())
    at = to = done_source = done_target = 0
    while at < len(sources) and to < len(targets):
        (source_start, source_length), (target_start, target_length) = sources[at], targets[to]
        start = max(source_start, target_start)
        stop = min(source_start + source_length, target_start + target_length)
        if start < stop:
            copy = CopyRange(done_source + start - source_start, done_target + start - target_start, stop - start)
            found.append(copy)
        if source_start + source_length <= target_start + target_length:
            at, done_source = at + 1, done_source + source_length
        else:
            to, done_target = to + 1, done_target + target_length
    return found
