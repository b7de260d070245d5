"""`Region`: which elements of a whole tensor a rank holds, and what two regions have in common; no torch.

Chapter: book/dp/io.  In: a slice along one axis, then a range of the flattened slice.  Out: copies.
Tensor and pipeline parallelism cut a tensor along an axis; ZeRO then cuts what is left as a flat buffer.  Both are runs
of consecutive elements of the whole tensor, so any cut can be read by any other.
  runs of a region   1 along axis 0, otherwise one per place of the axes before; overlaps take one pass over both lists
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class Copy(NamedTuple):
    """Elements `source` to `source + length` of one region are elements `target` to `target + length` of another."""

    source: int
    target: int
    length: int


class Region(NamedTuple):
    """Places `start` to `stop` along `axis` of a tensor of `shape`, and of these, flattened, `first` to `last`."""

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
        """Begin and length of each run in the whole tensor, flattened.

        >>> list(Region((2, 4), axis=1, start=1, stop=3, first=1, last=4).runs())
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


def whole(shape: tuple[int, ...]) -> Region:
    """All elements of a tensor; a number counts as a vector of one.

    >>> whole((2, 3)).numel, whole(()).shape
    (6, (1,))
    """
    shape = shape or (1,)
    return Region(shape, 0, 0, shape[0], 0, prod(shape))


def overlaps(source: Region, target: Region) -> list[Copy]:
    """What of `source` belongs into `target`.

    >>> overlaps(Region((6,), 0, 0, 6, 0, 4), Region((6,), 0, 0, 6, 3, 6))
    [Copy(source=3, target=0, length=1)]
    """
    found: list[Copy] = []
    sources, targets = list(source.runs()), list(target.runs())
    at = to = done_source = done_target = 0
    while at < len(sources) and to < len(targets):
        (source_start, source_length), (target_start, target_length) = sources[at], targets[to]
        start = max(source_start, target_start)
        stop = min(source_start + source_length, target_start + target_length)
        if start < stop:
            copy = Copy(done_source + start - source_start, done_target + start - target_start, stop - start)
            found.append(copy)
        if source_start + source_length <= target_start + target_length:
            at, done_source = at + 1, done_source + source_length
        else:
            to, done_target = to + 1, done_target + target_length
    return found
