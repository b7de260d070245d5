"""An emulated link between ranks: the transfer time and latency of a message.

Chapters: book/start/time; book/dp/hybrid-zero for two speeds.  In: bandwidth and latency.  Out: nanoseconds.
  transfer   num_bytes * 8 / gbps                  the bytes leave one after another
  arrival    max(sent, link free) + transfer + latency
Every ordered pair of ranks has one link; its messages leave in the order in which they were sent.
A collective takes the time of the slowest link between two of its ranks; different groups share no links.
Elsewhere: `tc netem` and NS-3 delay real packets; here the receiver waits until they are due.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Bandwidth in Gbit/s and latency in milliseconds of every ordered pair of ranks.

    Use at most 2 Gbit/s on the wall clock: loopback moves about 1 GB/s, so a faster link would show the time of
    loopback.

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
        """Nanoseconds from the departure of the last byte to its arrival."""
        return round(self.latency_ms * 1_000_000)

    def transfer_ns(self, num_bytes: int) -> int:
        """Nanoseconds for which a message of `num_bytes` occupies the link."""
        return round(num_bytes * 8 / self.gbps)

    def across(self, ranks: Sequence[int]) -> "Link":
        """Slowest link between these ranks: all links are equal."""
        return self


@dataclass(frozen=True)
class NodeLink:
    """Two links: one between ranks of the same node, one between ranks of different nodes.

    Args:
        inside: link between ranks of the same node.
        between: link between ranks of different nodes.
        ranks_per_node: number of consecutive ranks on one node.

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
        """Slowest link between these ranks: `inside` if all of them are on one node."""
        return self.inside if len({rank // self.ranks_per_node for rank in ranks}) == 1 else self.between
