"""Layouts of a sequence on a ring: the positions of each rank, the pairs that a mask shows, and the time they take.

Chapter: book/cp/ring-layouts.  In: a length s, c ranks.  Out: positions per rank; visible pairs per rank and step.
A causal mask shows a received block in full, not at all, as a triangle, or by half.  Each layout has one rule for it.
Elsewhere: ring-flash-attention `zigzag`, `stripe`; torch `_HeadTailLoadBalancer`; Megatron `get_batch_on_this_cp_rank`.
Source: Brandon et al. 2023 (arXiv 2311.09431), section 3, for stripes; Grattafiori et al. 2024 (arXiv 2407.21783),
section 3.3.2, for 2c chunks; Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), section 3, "arithmetic intensity", for
the time.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from dualpipe_lab.sharding import shard_slice

LayoutName: TypeAlias = Literal["contiguous", "zigzag", "striped"]
Ns = Sequence[Sequence[int]]  # by rank and step


class BlockMask(NamedTuple):
    """The visible part of queries x keys of one block: every pair of two slices, or their lower triangle.

    Attributes:
        queries, keys: slices of this rank's queries and of the block's keys; outside of them no pair is visible.
        is_triangle: query i of the slice sees its keys up to i, else all of them.
    """

    queries: slice
    keys: slice
    is_triangle: bool

    @property
    def offset(self) -> int | None:
        """The argument `offset` of a `Kernel`."""
        return 0 if self.is_triangle else None

    @property
    def num_pairs(self) -> int:
        """Number of visible pairs of a query and a key."""
        rows: int = self.queries.stop - self.queries.start
        columns: int = self.keys.stop - self.keys.start
        if not self.is_triangle:
            return rows * columns
        full = min(rows, columns)
        return full * (full + 1) // 2 + (rows - full) * columns


class SequenceLayout(ABC):
    """How the positions of a sequence are sharded over the ranks of a ring.

    Args:
        length: positions of the full sequence.
        num_ranks: ranks of the ring, in its order.

    Raises:
        ValueError: no rank, a negative length, or a length that the layout cannot shard.
    """

    name: LayoutName

    def __init__(self, length: int, num_ranks: int) -> None:
        if num_ranks < 1 or length < 0:
            raise ValueError(f"a layout needs at least 1 rank and 0 positions, got {num_ranks} and {length}")
        self.length, self.num_ranks = length, num_ranks

    @abstractmethod
    def runs(self, rank: int) -> tuple[range, ...]:
        """Return the positions that a rank holds as ranges, ascending."""

    def positions(self, rank: int) -> list[int]:
        """Return the positions that a rank holds, ascending; its RoPE, labels and loss mask are taken at them."""
        return [position for run in self.runs(rank) for position in run]

    def size(self, rank: int) -> int:
        """Return the number of positions that a rank holds."""
        return sum(map(len, self.runs(rank)))

    def mask(self, rank: int, source: int, causal: bool) -> BlockMask | None:
        """Return the mask of the queries of `rank` on the keys of `source`; None if no pair is visible."""
        queries, keys = self.size(rank), self.size(source)
        if not (queries and keys):
            return None
        return self._causal_mask(rank, source) if causal else BlockMask(slice(0, queries), slice(0, keys), False)

    @abstractmethod
    def _causal_mask(self, rank: int, source: int) -> BlockMask | None:
        """Return the mask that causal attention leaves; both ranks hold positions."""

    def __repr__(self) -> str:
        return f"<{self.name} layout of {self.length} positions on {self.num_ranks} ranks>"


class Contiguous(SequenceLayout):
    """One run of consecutive positions per rank; the last ranks may have fewer, or none.

    Of the pairs of a causal mask the first rank has few, and the last rank all.
    """

    name: LayoutName = "contiguous"

    def runs(self, rank: int) -> tuple[range, ...]:
        """Return one range of consecutive positions."""
        return (range(self.length)[shard_slice(self.length, self.num_ranks, rank)],)

    def _causal_mask(self, rank: int, source: int) -> BlockMask | None:
        queries, keys = slice(0, self.size(rank)), slice(0, self.size(source))
        return BlockMask(queries, keys, rank == source) if source <= rank else None


class Striped(SequenceLayout):
    """Every c-th position, from position r on rank r; the first ranks may have one more.

    The causal pairs of the ranks differ by at most s / c in a step.
    """

    name: LayoutName = "striped"

    def runs(self, rank: int) -> tuple[range, ...]:
        """Return every c-th position."""
        return (range(rank, self.length, self.num_ranks),)

    def _causal_mask(self, rank: int, source: int) -> BlockMask | None:
        queries, keys = self.size(rank), self.size(source)
        if source <= rank:
            return BlockMask(slice(0, queries), slice(0, keys), True)
        if queries == 1:
            return None
        # key j of a later rank precedes query j + 1: without the first query, a triangle again
        return BlockMask(slice(1, queries), slice(0, min(keys, queries - 1)), True)


class Zigzag(SequenceLayout):
    """Chunks r and 2c - 1 - r of 2c equal chunks: an early one with few visible keys and a late one with many.

    Every rank has s (s + 1) / 2c causal pairs.
    """

    name: LayoutName = "zigzag"

    def __init__(self, length: int, num_ranks: int) -> None:
        super().__init__(length, num_ranks)
        if length % (2 * num_ranks):
            more = -length % (2 * num_ranks)
            raise ValueError(
                f"zigzag shards a sequence into 2 x {num_ranks} equal chunks, and {length} positions do not divide; "
                f"pad the sequence with {more} and mask their loss, or use striped or contiguous"
            )
        self.chunk = length // (2 * num_ranks)

    def runs(self, rank: int) -> tuple[range, ...]:
        """Return two chunks."""
        chunks = rank, 2 * self.num_ranks - 1 - rank
        return tuple(range(chunk * self.chunk, (chunk + 1) * self.chunk) for chunk in chunks)

    def _causal_mask(self, rank: int, source: int) -> BlockMask | None:
        full, early, late = slice(0, 2 * self.chunk), slice(0, self.chunk), slice(self.chunk, 2 * self.chunk)
        if source == rank:
            return BlockMask(full, full, True)
        return BlockMask(full, early, False) if source < rank else BlockMask(late, full, False)


_LAYOUTS: dict[str, type[SequenceLayout]] = {kind.name: kind for kind in (Contiguous, Zigzag, Striped)}
LAYOUTS: tuple[str, ...] = tuple(_LAYOUTS)


def make_layout(name: str, length: int, num_ranks: int) -> SequenceLayout:
    """Return the layout with this name.

    >>> make_layout("zigzag", 16, 4).positions(1)
    [2, 3, 12, 13]

    Raises:
        ValueError: an unknown name, or a length that the layout cannot shard.
    """
    if name not in _LAYOUTS:
        raise ValueError(f"a layout is one of {', '.join(LAYOUTS)}, got {name!r}")
    return _LAYOUTS[name](length, num_ranks)


def visible_pairs(layout: SequenceLayout, causal: bool = True) -> list[list[int]]:
    """Return the number of visible pairs by rank and step; at step i rank r holds the block of rank r - i.

    >>> visible_pairs(make_layout("contiguous", 16, 4))
    [[10, 0, 0, 0], [10, 16, 0, 0], [10, 16, 16, 0], [10, 16, 16, 16]]
    """
    steps = range(layout.num_ranks)
    masks = [[layout.mask(rank, (rank - step) % layout.num_ranks, causal) for step in steps] for rank in steps]
    return [[mask.num_pairs if mask else 0 for mask in row] for row in masks]


def critical_path(pairs: Sequence[Sequence[int]]) -> int:
    """Return the sum over the steps of the largest number of pairs of any rank: a step waits for its busiest rank.

    >>> [critical_path(visible_pairs(make_layout(name, 16, 4))) for name in LAYOUTS]
    [58, 34, 40]
    """
    return sum(max(step) for step in zip(*pairs, strict=True))


class MessageTimes(NamedTuple):
    """Times of messages in ns: `transfer` on the link, by rank and step; `latency` until the last byte arrives."""

    transfer: Ns
    latency: int


def ring_forward_ns(work: Ns, kv: MessageTimes) -> list[int]:
    """Return when each rank has finished the forward of a ring.

    Where all ranks are equal it takes work + (c - 1) max(work, message), with the work of one step: a shorter message
    is hidden, and the last step sends none.

    >>> ring_forward_ns([[10, 10], [10, 10]], MessageTimes([[4], [4]], latency=1))
    [20, 20]
    >>> ring_forward_ns([[10, 10], [10, 10]], MessageTimes([[14], [14]], latency=1))
    [25, 25]
    """
    return _ring_ns(work, kv, None)


def ring_backward_ns(work: Ns, kv: MessageTimes, dkv: MessageTimes) -> list[int]:
    """Return when each rank has finished the backward: gradients travel behind the blocks, and one hop further.

    The gradients of a block are sent after the work on it, so the last hop is never hidden.

    >>> ring_backward_ns([[10, 10], [10, 10]], MessageTimes([[4], [4]], 1), MessageTimes([[4, 4], [4, 4]], 1))
    [25, 25]
    """
    return _ring_ns(work, kv, dkv)


def _ring_ns(work: Ns, kv: MessageTimes, dkv: MessageTimes | None) -> list[int]:
    num_ranks = len(work)
    now, free = [0] * num_ranks, [0] * num_ranks  # of the ranks; of the links from each rank to the next one

    def send(transfer: Ns, step: int) -> list[int]:
        for rank, time in enumerate(now):
            free[rank] = max(time, free[rank]) + transfer[rank][step]
        return list(free)

    def wait(left: list[int] | None) -> None:
        """Wait until the message of the previous rank has arrived and this rank's message has left."""
        if left is not None:
            now[:] = [max(time, left[rank - 1] + kv.latency, left[rank]) for rank, time in enumerate(now)]

    dkv_left = None
    for step in range(num_ranks):
        kv_left = send(kv.transfer, step) if step + 1 < num_ranks else None
        now[:] = [time + spent[step] for time, spent in zip(now, work, strict=True)]
        wait(dkv_left)
        if dkv is not None and num_ranks > 1:
            dkv_left = send(dkv.transfer, step)
        wait(kv_left)
    wait(dkv_left)
    return now
