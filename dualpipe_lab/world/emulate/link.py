"""An emulated link between ranks: how long a message of so many bytes takes.

Chapters: book/start/time; book/dp/hybrid-zero for two speeds.  In: bandwidth and latency.  Out: nanoseconds.
  transfer   num_bytes * 8 / gbps                  the bytes leave one after another
  arrival    max(sent, link free) + transfer + latency
Every ordered pair of ranks has a link of its own; messages on it leave in the order in which they were sent.
A collective is as slow as the slowest link between two of its ranks; every group has links of its own.
Elsewhere: `tc netem` and NS-3 delay real packets; here the bytes move at once
and the receiver waits until they are due.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Bandwidth in Gbit/s and latency in milliseconds of every ordered pair of ranks.

    Under the wall clock stay at 2 Gbit/s or below: loopback itself moves about 1 GB/s, and a faster link would show
    loopback's time instead of its own.

    >>> Link(gbps=1, latency_ms=0.5).transfer_ns(1_000_000)
    8000000

    Raises:
        ValueError: unless `gbps > 0` and `latency_ms >= 0`.
    """

    gbps: float
    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        if not (self.gbps > 0 and self.latency_ms >= 0):
            raise ValueError(
                f"a link needs gbps > 0 and latency_ms >= 0, got gbps={self.gbps}, latency_ms={self.latency_ms}"
            )

    @property
    def latency_ns(self) -> int:
        """Nanoseconds between the last byte's leaving and its arrival."""
        return round(self.latency_ms * 1_000_000)

    def transfer_ns(self, num_bytes: int) -> int:
        """Nanoseconds for which a message of `num_bytes` occupies the link."""
        return round(num_bytes * 8 / self.gbps)

    def across(self, ranks: Sequence[int]) -> "Link":
        """The slowest link between these ranks: they are all alike."""
        return self


@dataclass(frozen=True)
class NodeLink:
    """Two speeds: one link between ranks of a node, another between ranks of different nodes.

    Args:
        inside: between ranks of one node.
        between: between ranks of two nodes.
        ranks_per_node: ranks that share a node; they are consecutive.

    >>> link = NodeLink(Link(gbps=8), Link(gbps=1), ranks_per_node=4)
    >>> [link.across(ranks).gbps for ranks in [(0, 3), (3, 4), (0, 1, 4, 5)]]
    [8, 1, 1]

    Raises:
        ValueError: unless `ranks_per_node` is a whole number from 1.
    """

    inside: Link
    between: Link
    ranks_per_node: int

    def __post_init__(self) -> None:
        if not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise ValueError(f"a node holds a whole number of ranks from 1, got ranks_per_node={self.ranks_per_node!r}")

    def across(self, ranks: Sequence[int]) -> Link:
        """The slowest link between these ranks: `inside` if they are all on one node."""
        return self.inside if len({rank // self.ranks_per_node for rank in ranks}) == 1 else self.between
