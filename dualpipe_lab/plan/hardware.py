"""`Accelerator` and `LinkClass`: what runs a rank and what carries its messages, and the seconds of one piece of work.

In: numbers of data sheets, or what was measured.  Out: checked numbers, in FLOP/s, bytes, bytes/s and seconds.
  a product       overhead + FLOPs / (peak * efficiency at these FLOPs)
  elementwise     overhead + bytes / (memory bandwidth * efficiency at these bytes)
  a message       latency + bytes / (bandwidth * efficiency at these bytes)
Elsewhere: calculon's `systems/*.json`; SimuMax's system files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from dualpipe_lab.plan.efficiency import FULL, Efficiency, is_number

ELEMENTWISE = Efficiency(0.8, "assumed")  # of the memory's bandwidth, where nobody says more


def check_positive(what: str, value: float, unit: str) -> None:
    """Refuse what is not a finite number above 0."""
    if not is_number(value) or not 0 < value < inf:
        raise ValueError(f"{what} is a number of {unit} above 0, got {value!r}")


def check_seconds(what: str, value: float) -> None:
    """Refuse what is not a finite number of seconds from 0."""
    if not is_number(value) or not 0 <= value < inf:
        raise ValueError(f"{what} is a number of seconds from 0, got {value!r}")


@dataclass(frozen=True)
class Accelerator:
    """What runs one rank.

    Attributes:
        name: of the product.
        peaks: FLOP/s of dense products, by type of number.
        memory_bytes: of one accelerator.
        memory_bandwidth: of its memory, in bytes/s.
        source: of the numbers.
        date: of the source, or when it was looked up, as year-month.
        efficiency: the part of the peaks that products reach, by the FLOPs of one product.
        overhead: seconds that every kernel takes on top, a product's and an elementwise one alike, whatever its size.
        memory_efficiency: the part of the memory's bandwidth that elementwise work reaches, by the bytes that one
            kernel reads and writes.
        efficiencies: of products whose type of number has a curve of its own; `efficiency` is that of all others.

    >>> card = Accelerator("card", {"bfloat16": 100e12}, 2**35, 1e12, efficiency=Efficiency(0.5), overhead=1e-6)
    >>> round(card.product_seconds(1e9) * 1e6, 3), round(card.elementwise_seconds(8e6) * 1e6, 3)
    (21.0, 11.0)

    Raises:
        ValueError: no peak, a number that is not above 0 and finite, or an overhead below 0.
    """

    name: str
    peaks: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    source: str = "given"
    date: str = ""
    efficiency: Efficiency = FULL
    overhead: float = 0.0
    memory_efficiency: Efficiency = ELEMENTWISE
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.peaks:
            raise ValueError(
                f'{self.name} needs a peak for a type of number, got none; such as {{"bfloat16": 989.4e12}}'
            )
        for kind, value in self.peaks.items():
            check_positive(f"{self.name}'s peak for {kind}", value, "FLOP/s")
        check_positive(f"{self.name}'s memory", self.memory_bytes, "bytes")
        check_positive(f"{self.name}'s memory bandwidth", self.memory_bandwidth, "bytes/s")
        check_seconds(f"{self.name}'s overhead", self.overhead)
        unknown = [kind for kind in self.efficiencies if kind not in self.peaks]
        if unknown:
            raise ValueError(
                f"{self.name} has an efficiency for {unknown[0]!r} and no peak; known are {', '.join(self.peaks)}"
            )

    def efficiency_of(self, kind: str) -> Efficiency:
        """Return the efficiency of products of one type of number."""
        return self.efficiencies.get(kind, self.efficiency)

    def product_seconds(self, flops: float, kind: str | None = None) -> float:
        """Return the seconds of one matrix product.

        Args:
            flops: of the product, 2 for each multiplication and addition.
            kind: the type of its numbers (default: the first that has a peak).

        Raises:
            ValueError: a type without a peak.
        """
        kind = next(iter(self.peaks)) if kind is None else kind
        if kind not in self.peaks:
            raise ValueError(f"{self.name} has no peak for {kind!r}, only for {', '.join(self.peaks)}; give one")
        return self.overhead + flops / self.product_rate(flops, kind)

    def product_rate(self, flops: float, kind: str) -> float:
        """Return the FLOP/s that products of so many FLOPs reach, of a type of number that has a peak."""
        return self.peaks[kind] * self.efficiency_of(kind).at(flops)

    def elementwise_seconds(self, num_bytes: float) -> float:
        """Return the seconds of one kernel that is bound by memory.

        Args:
            num_bytes: read and written.
        """
        return self.overhead + self.memory_seconds(num_bytes)

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds in which so many bytes are read or written, without the overhead of a kernel."""
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency.at(num_bytes))


@dataclass(frozen=True)
class LinkClass:
    """The links of one kind: inside of a node, or between nodes.

    Attributes:
        name: of the kind.
        bandwidth: in bytes/s, in one direction, for one rank.
        latency: of a message, in seconds.
        source: of the bandwidth.
        efficiency: the part of the bandwidth that messages reach beyond their latency, by the bytes of one message.

    >>> round(LinkClass("rail", 50e9, 20e-6, efficiency=Efficiency(0.9)).seconds(9e6) * 1e6, 3)
    220.0

    Raises:
        ValueError: a bandwidth that is not above 0, or a latency below 0.
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    source: str = "given"
    efficiency: Efficiency = FULL

    def __post_init__(self) -> None:
        check_positive(f"the bandwidth of {self.name}", self.bandwidth, "bytes/s")
        check_seconds(f"the latency of {self.name}", self.latency)

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of one message.

        Args:
            num_bytes: of the message.
        """
        return self.latency + num_bytes / self.rate(num_bytes)

    def rate(self, num_bytes: float) -> float:
        """Return the bytes/s that messages of so many bytes reach, behind their latency."""
        return self.bandwidth * self.efficiency.at(num_bytes)
