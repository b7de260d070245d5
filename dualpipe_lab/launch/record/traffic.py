"""Bytes that each rank sends and receives in a collective, derived from its algorithm.

Chapter: book/start/ranks-and-messages.  In: bytes per chunk, ring position.  Out: `Traffic(sent, received, steps)`.
  all_reduce       ring, 2(N-1)/N * S     reduce_scatter, all_gather   ring, (N-1)/N * S
  all_to_all       direct, the blocks for other ranks
  broadcast        binomial tree: in each of ceil(log2 N) rounds every rank that has S sends it to one rank without it
  reduce           ring reduce-scatter, then every chunk goes to the root: S, from the root (N-1)/N * S
The bytes are derived and not measured; GLOO of torch 2.13 sends the same (`launch(..., wire=True)` counts it), except
in its reduce-scatter, which `comm` does not use.  NCCL has rings for all-reduce, reduce-scatter, all-gather, broadcast
and reduce, and other algorithms for some sizes and networks; its broadcast is a chain, S from every rank but the last.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from collections.abc import Sequence
from typing import NamedTuple


class Traffic(NamedTuple):
    """Traffic of one rank in one operation.

    Attributes:
        sent, received: bytes.
        steps: number of latencies that follow one another.
        serial: bytes that pass one after another, if they are more than `sent` and `received`.
    """

    sent: int
    received: int
    steps: int
    serial: int = 0

    @property
    def busiest(self) -> int:
        """Bytes that pass one after another until this rank is done."""
        return max(self.sent, self.received, self.serial)


def split(size: int, parts: int) -> list[int]:
    """Sizes of `parts` chunks of `size` elements: ceil(size / parts) first, the last chunks shorter or empty.

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
    """Ring: the rank sends every chunk but its local one, and receives every chunk but the first one that it sent."""
    size, total = len(chunks), sum(chunks)
    return Traffic(total - chunks[position], total - chunks[position - 1], size - 1)


def all_gather(chunks: Sequence[int], position: int) -> Traffic:
    """Ring: the rank sends every chunk but the last one to arrive, and receives every chunk but its local one."""
    size, total = len(chunks), sum(chunks)
    return Traffic(total - chunks[(position + 1) % size], total - chunks[position], size - 1)


def all_to_all(sends: Sequence[int], receives: Sequence[int], position: int) -> Traffic:
    """Direct messages: the block for the rank itself does not travel."""
    return Traffic(sum(sends) - sends[position], sum(receives) - receives[position], min(1, len(sends) - 1))


def children(size: int, position: int, root: int) -> list[int]:
    """Positions to which `position` sends in a broadcast's binomial tree, one per round.

    >>> [children(8, position, 0) for position in range(4)]
    [[1, 2, 4], [3, 5], [6], [7]]
    """
    place = (position - root) % size
    steps = (1 << bit for bit in range(place.bit_length(), size.bit_length()))
    return [(root + place + step) % size for step in steps if place + step < size]


def broadcast(num_bytes: int, size: int, position: int, root: int) -> Traffic:
    """Binomial tree from the root; a rank is done after the round of its last message."""
    place = (position - root) % size
    onwards = children(size, position, root)
    last = (onwards[-1] - root) % size if onwards else place
    rounds = last.bit_length()
    return Traffic(num_bytes * len(onwards), num_bytes * (place > 0), rounds, num_bytes * rounds)


def reduce(chunks: Sequence[int], position: int, root: int) -> Traffic:
    """Ring reduce-scatter, then each rank sends its chunk to the root; `chunks` in bytes, one per rank."""
    scattered, local = reduce_scatter(chunks, position), chunks[position]
    others = sum(chunks) - local
    if position == root:
        return Traffic(scattered.sent, scattered.received + others, len(chunks) if len(chunks) > 1 else 0)
    return Traffic(scattered.sent + local, scattered.received, len(chunks))


def gather(num_bytes: int, size: int, position: int, root: int) -> Traffic:
    """Every rank but the root sends one block straight to the root."""
    at_root = position == root
    return Traffic(num_bytes * (not at_root), num_bytes * (size - 1) * at_root, min(1, size - 1))


def scatter(num_bytes: int, size: int, position: int, root: int) -> Traffic:
    """The root sends one block straight to every other rank."""
    back = gather(num_bytes, size, position, root)
    return Traffic(back.received, back.sent, back.steps)


def barrier(size: int) -> Traffic:
    """Dissemination barrier: no bytes, ceil(log2 N) latencies."""
    return Traffic(0, 0, (size - 1).bit_length())
