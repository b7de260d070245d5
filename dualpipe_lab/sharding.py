"""Even shards: which slice of N elements each of P ranks has.

Chapter: book/dp/data-parallel.  In: a number of elements, of ranks, a rank.  Out: a slice; no torch.
  elements per shard    ceil(n / P)          the last shards may be shorter, or empty
Elsewhere: torch.chunk and DTensor's `Shard`, which split the same way.
"""


def shard_slice(num_elements: int, num_ranks: int, rank: int) -> slice:
    """Return the slice of rows, columns or heads that is a rank's shard.

    Every shard has ceil(num_elements / num_ranks) elements, but the last ones may have fewer, or none.

    >>> [shard_slice(5, 2, rank) for rank in range(2)]
    [slice(0, 3, None), slice(3, 5, None)]

    Raises:
        ValueError: if there is no rank.
    """
    if num_ranks < 1:
        raise ValueError(f"a layout has at least 1 shard, got {num_ranks}")
    size = -(-num_elements // num_ranks)
    start = min(rank * size, num_elements)
    return slice(start, min(start + size, num_elements))
