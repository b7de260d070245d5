"""An emulated link between ranks: how long a message of so many bytes takes.

Chapter: book/start/time.  In: bandwidth and latency.  Out: nanoseconds.
  transfer   num_bytes * 8 / gbps                  the bytes leave one after another
  arrival    max(sent, link free) + transfer + latency
Every ordered pair of ranks has a link of its own; messages on it leave in the order in which they were sent.
Elsewhere: `tc netem` and NS-3 delay real packets; here the bytes move at once
and the receiver waits until they are due.
"""

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
