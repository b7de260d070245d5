"""Bytes that each rank sends and receives in a collective, by the algorithm that needs the fewest.

Chapter: book/start/ranks-and-messages.  In: bytes per chunk, ring position.  Out: `Traffic(sent, received, steps)`.
  all_reduce       ring, 2(N-1)/N * S     reduce_scatter, all_gather   ring, (N-1)/N * S
  all_to_all       direct, what is addressed to others
  broadcast        chain, S from every rank but the last              reduce: the same chain backwards
Derived, not read off the wire: GLOO may send more (its broadcast is a tree), never less.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from collections.abc import Sequence
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes sent and received by one rank, and the number of message latencies that follow one another."""

    sent: int
    received: int
    steps: int


def split(size: int, parts: int) -> list[int]:
    """Sizes of `parts` chunks of `size` elements: the ceiling first, the last ones shorter or empty.

    >>> split(7, 3)
    [3, 3, 1]
    """
    chunk = -(-size // parts)
    return [max(0, min(chunk, size - part * chunk)) for part in range(parts)]


def all_reduce(chunks: Sequence[int], position: int) -> Traffic:
    """Ring reduce-scatter followed by ring all-gather; `chunks` in bytes, one per rank."""
    size, total = len(chunks), sum(chunks)
    sent = 2 * total - chunks[(position + 1) % size] - chunks[(position + 2) % size]
    received = 2 * total - chunks[position] - chunks[(position + 1) % size]
    return Traffic(sent, received, 2 * (size - 1)) if size > 1 else Traffic(0, 0, 0)


def reduce_scatter(chunks: Sequence[int], position: int) -> Traffic:
    """Ring: every chunk but one's own leaves; every chunk but the first one sent arrives."""
    size, total = len(chunks), sum(chunks)
    return Traffic(total - chunks[position], total - chunks[position - 1], size - 1)


def all_gather(chunks: Sequence[int], position: int) -> Traffic:
    """Ring: every chunk is passed on but the last one to arrive; every chunk but one's own arrives."""
    size, total = len(chunks), sum(chunks)
    return Traffic(total - chunks[(position + 1) % size], total - chunks[position], size - 1)


def all_to_all(sends: Sequence[int], receives: Sequence[int], position: int) -> Traffic:
    """Direct messages: what is addressed to oneself does not travel."""
    return Traffic(sum(sends) - sends[position], sum(receives) - receives[position], min(1, len(sends) - 1))


def broadcast(num_bytes: int, size: int, position: int, root: int) -> Traffic:
    """A chain from the root: everybody passes it on, the last one keeps it."""
    hop = (position - root) % size
    return Traffic(num_bytes * (hop < size - 1), num_bytes * (hop > 0), size - 1)


def reduce(num_bytes: int, size: int, position: int, root: int) -> Traffic:
    """The chain of `broadcast` run backwards."""
    onwards = broadcast(num_bytes, size, position, root)
    return Traffic(onwards.received, onwards.sent, onwards.steps)


def gather(num_bytes: int, size: int, position: int, root: int) -> Traffic:
    """Everybody sends one block straight to the root."""
    at_root = position == root
    return Traffic(num_bytes * (not at_root), num_bytes * (size - 1) * at_root, min(1, size - 1))


def scatter(num_bytes: int, size: int, position: int, root: int) -> Traffic:
    """The root sends one block straight to each of the others."""
    back = gather(num_bytes, size, position, root)
    return Traffic(back.received, back.sent, back.steps)


def barrier(size: int) -> Traffic:
    """No bytes; the latencies of a dissemination barrier."""
    return Traffic(0, 0, (size - 1).bit_length())
