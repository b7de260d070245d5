"""Bytes that each rank sends and receives in a collective, derived from the algorithm.

Chapter: book/start/ranks-and-messages.  In: bytes per chunk, ring position.  Out: `Traffic(sent, received, steps)`.
  all_reduce       ring, 2(N-1)/N * S     reduce_scatter, all_gather   ring, (N-1)/N * S
  all_to_all       direct, what is addressed to others
  broadcast        binomial tree: in each of ceil(log2 N) rounds every rank that has S sends it to one that has not
  reduce           ring reduce-scatter, then every chunk goes to the root: S, from the root (N-1)/N * S
Derived, not read off the wire; GLOO of torch 2.13 sends the same (`launch(..., wire=True)` counts it), except for its
own reduce-scatter, which `comm` does not use.  NCCL has rings for all-reduce, reduce-scatter, all-gather, broadcast and
reduce, and others for some sizes and networks; its broadcast is a chain, S from every rank but the last.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from collections.abc import Sequence
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes sent and received by one rank, and what takes its time: latencies and bytes that follow one another.

    `serial` are those bytes where they are not simply the larger of `sent` and `received`.
    """

    sent: int
    received: int
    steps: int
    serial: int = 0

    @property
    def busiest(self) -> int:
        """Bytes that have to pass one after another until this rank is done."""
        return max(self.sent, self.received, self.serial)


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


def children(size: int, position: int, root: int) -> list[int]:
    """Positions to which a broadcast's tree sends from `position`, one round after the other.

    >>> [children(8, position, 0) for position in range(4)]
    [[1, 2, 4], [3, 5], [6], [7]]
    """
    place = (position - root) % size
    steps = (1 << bit for bit in range(place.bit_length(), size.bit_length()))
    return [(root + place + step) % size for step in steps if place + step < size]


def broadcast(num_bytes: int, size: int, position: int, root: int) -> Traffic:
    """A binomial tree from the root; a rank is done after the round of its last message."""
    place = (position - root) % size
    onwards = children(size, position, root)
    last = (onwards[-1] - root) % size if onwards else place
    rounds = last.bit_length()
    return Traffic(num_bytes * len(onwards), num_bytes * (place > 0), rounds, num_bytes * rounds)


def reduce(chunks: Sequence[int], position: int, root: int) -> Traffic:
    """A ring's reduce-scatter, after which each rank sends its chunk to the root; `chunks` in bytes, one per rank."""
    scattered, own = reduce_scatter(chunks, position), chunks[position]
    others = sum(chunks) - own
    if position == root:
        return Traffic(scattered.sent, scattered.received + others, len(chunks) if len(chunks) > 1 else 0)
    return Traffic(scattered.sent + own, scattered.received, len(chunks))


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
