"""`Layout`: tensors laid end to end in one flat buffer, padded, and cut into equal shards.

Chapter: book/dp/distributed-adam.  In: element counts, a number of shards.  Out: offsets, spans, overlaps; no torch.
  elements per shard    ceil(n / N)          the last shards may hold padding alone
  padding               N * ceil(n / N) - n  at most N - 1 elements, always zero
Elsewhere: FSDP1 `FlatParameter`; Megatron `ParamAndGradBuffer`.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Part(NamedTuple):
    """The part of one tensor that lies in a shard: elements `start` to `stop` of tensor number `tensor`."""

    tensor: int
    start: int
    stop: int


class Overlap(NamedTuple):
    """Elements `start` to `stop`, of the whole, that shard number `source` holds."""

    source: int
    start: int
    stop: int


class Layout:
    """Where each tensor lies in the flat buffer, and which part of the buffer each shard is.

    Raises:
        ValueError: if there is no shard.

    >>> layout = Layout([5, 2], num_shards=3)
    >>> layout.shard_numel, layout.padded_numel, [layout.span(shard) for shard in range(3)]
    (3, 9, [(0, 3), (3, 6), (6, 7)])
    >>> layout.parts(1)
    [Part(tensor=0, start=3, stop=5), Part(tensor=1, start=0, stop=1)]
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
        """Where a shard's elements begin and end in the buffer, padding left out: it may be empty."""
        start = min(shard * self.shard_numel, self.numel)
        return start, min(start + self.shard_numel, self.numel)

    def parts(self, shard: int) -> list[Part]:
        """What a shard holds of each tensor, in order; tensors it holds nothing of are left out."""
        return self.between(*self.span(shard))

    def between(self, first: int, last: int) -> list[Part]:
        """What elements `first` to `last` of the buffer hold of each tensor."""
        found = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            start, stop = max(first - offset, 0), min(last - offset, numel)
            if start < stop:
                found.append(Part(index, start, stop))
        return found


def reshard(numel: int, num_sources: int, num_targets: int) -> list[list[Overlap]]:
    """For each shard of a new cut, what it takes from each shard of the old one.

    >>> reshard(7, 2, 3)[1]
    [Overlap(source=0, start=3, stop=4), Overlap(source=1, start=4, stop=6)]
    """
    old, new = Layout([numel], num_sources), Layout([numel], num_targets)
    spans = [new.span(target) for target in range(num_targets)]
    pairs = [[(source, *old.span(source)) for source in range(num_sources)] for _ in spans]
    return [
        [
            Overlap(source, max(start, first), min(stop, last))
            for source, start, stop in sources
            if max(start, first) < min(stop, last)
        ]
        for (first, last), sources in zip(spans, pairs, strict=True)
    ]


def share(num_rows: int, num_ranks: int, rank: int) -> slice:
    """The rows of a batch that a rank of the data group works on; the last ranks may have fewer, or none.

    >>> [share(5, 2, rank) for rank in range(2)]
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return slice(*Layout([num_rows], num_ranks).span(rank))
