"""`Cluster`: the accelerators of a plan and the links between them; known ones stand in a table with their sources.

In: numbers of data sheets, or names of the table.  Out: checked numbers, in FLOP/s, bytes, bytes/s and seconds.
  peaks        dense, for each type of number; vendors print those of sparse matrices, twice as much
  bandwidth    of a link in one direction and for one rank; vendors add both directions
  memory       what the driver reports where that was read, decimal gigabytes of the data sheet elsewhere
A peak depends on the limit of power, and software reaches only a part of it: an efficiency says which part, and whether
that is measured, quoted from a source, or assumed.
Elsewhere: SimuMax's system files; calculon's `systems/*.json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf
from typing import Literal, TypeAlias

Origin: TypeAlias = Literal["measured", "quoted", "assumed"]
_ORIGINS = ("measured", "quoted", "assumed")
_GB, _MIB, _TFLOPS = 10**9, 2**20, 10**12


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_positive(what: str, value: float, unit: str) -> None:
    if not _is_number(value) or not 0 < value < inf:
        raise ValueError(f"{what} is a number of {unit} above 0, got {value!r}")


@dataclass(frozen=True)
class Efficiency:
    """The part of a peak that software reaches.

    Attributes:
        value: above 0, at most 1.
        origin: whether it was measured, is quoted from a source, or is assumed.

    >>> print(Efficiency(0.65, "quoted"))
    65% (quoted)

    Raises:
        ValueError: a value outside of that, or another origin.
    """

    value: float = 1.0
    origin: Origin = "assumed"

    def __post_init__(self) -> None:
        if not _is_number(self.value) or not 0 < self.value <= 1:
            raise ValueError(f"an efficiency is above 0 and at most 1, got {self.value!r}; 100% is 1.0")
        if self.origin not in _ORIGINS:
            raise ValueError(f"an efficiency is {', '.join(_ORIGINS)}, got {self.origin!r}; use 'assumed'")

    def __str__(self) -> str:
        return f"{self.value:.0%} ({self.origin})"


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
        efficiency: the part of the peaks that large products reach.

    Raises:
        ValueError: no peak, or a number that is not above 0 and finite.
    """

    name: str
    peaks: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    source: str = "given"
    date: str = ""
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        if not self.peaks:
            raise ValueError(
                f'{self.name} needs a peak for a type of number, got none; such as {{"bfloat16": 989.4e12}}'
            )
        for kind, value in self.peaks.items():
            _check_positive(f"{self.name}'s peak for {kind}", value, "FLOP/s")
        _check_positive(f"{self.name}'s memory", self.memory_bytes, "bytes")
        _check_positive(f"{self.name}'s memory bandwidth", self.memory_bandwidth, "bytes/s")


@dataclass(frozen=True)
class LinkClass:
    """The links of one kind: inside of a node, or between nodes.

    Attributes:
        name: of the kind.
        bandwidth: in bytes/s, in one direction, for one rank.
        latency: of a message, in seconds.
        source: of the bandwidth.
        efficiency: the part of the bandwidth that large messages reach.

    Raises:
        ValueError: a bandwidth that is not above 0, or a latency below 0.
    """

    name: str
    bandwidth: float
    latency: float = 0.0
    source: str = "given"
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        _check_positive(f"the bandwidth of {self.name}", self.bandwidth, "bytes/s")
        if not _is_number(self.latency) or not 0 <= self.latency < inf:
            raise ValueError(f"the latency of {self.name} is a number of seconds from 0, got {self.latency!r}")


@dataclass(frozen=True)
class Cluster:
    """Ranks on accelerators of one kind, in nodes of one size.

    Attributes:
        accelerator: of every rank.
        num_ranks: in all.
        ranks_per_node: a node's ranks reach each other by `inside`, all others by `between`.
        inside, between: the links.

    >>> cluster = Cluster.of("h100", num_ranks=64)
    >>> print(*str(cluster).split("; "), sep=chr(10))
    64 ranks, 8 per node, each on H100 SXM (81559 MiB
    bfloat16 989.4, float8 1978.9 TFLOP/s)
    inside 450 GB/s, between 50 GB/s

    Raises:
        ValueError: ranks that do not fill nodes.
    """

    accelerator: Accelerator
    num_ranks: int
    ranks_per_node: int
    inside: LinkClass
    between: LinkClass

    def __post_init__(self) -> None:
        for name, value in (("num_ranks", self.num_ranks), ("ranks_per_node", self.ranks_per_node)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"a cluster needs {name} to be an integer of at least 1, got {value!r}")
        if self.num_ranks > self.ranks_per_node and self.num_ranks % self.ranks_per_node:
            raise ValueError(
                f"a cluster has full nodes, got {self.num_ranks} ranks and {self.ranks_per_node} per node; use "
                f"{-(-self.num_ranks // self.ranks_per_node) * self.ranks_per_node} ranks"
            )

    @classmethod
    def of(cls, name: str, num_ranks: int, ranks_per_node: int | None = None) -> "Cluster":
        """Return a cluster of accelerators that the table knows, with the links that are usual for them.

        Args:
            name: in any case, with or without its hyphens: `CLUSTERS` lists the names.
            num_ranks: in all.
            ranks_per_node: of a node (default: the usual number, or all ranks where there are fewer).

        Raises:
            ValueError: an unknown name, with the nearest known one.

        >>> Cluster.of("h10", 8)
        Traceback (most recent call last):
        ValueError: there is no 'h10' in the table, the nearest is h100; known are a100-40, a100-80, b200, gb200, \
gb300, h100, h200, h800
        """
        known = CLUSTERS.get(_plain(name))
        if known is None:
            raise ValueError(_unknown(name))
        accelerator, usual, inside, between = known
        return cls(accelerator, num_ranks, ranks_per_node or min(usual, num_ranks), inside, between)

    def __str__(self) -> str:
        unit, peaks = self.accelerator, ", ".join(f"{k} {v / _TFLOPS:g}" for k, v in self.accelerator.peaks.items())
        nodes = f"{self.num_ranks} ranks, {self.ranks_per_node} per node, each on {unit.name}"
        links = ", ".join(f"{name} {link.bandwidth / _GB:g} GB/s" for name, link in self._links())
        return f"{nodes} ({unit.memory_bytes // _MIB} MiB; {peaks} TFLOP/s); {links}"

    def _links(self) -> tuple[tuple[str, LinkClass], ...]:
        return ("inside", self.inside), ("between", self.between)


def _plain(name: str) -> str:
    """Return a name as the table has it."""
    text = "".join(letter for letter in name.lower() if letter.isalnum())
    return next((known for known in CLUSTERS if known.replace("-", "") == text), text)


def _unknown(name: str) -> str:
    near = get_close_matches(name.lower(), CLUSTERS, n=1, cutoff=0.0)
    return f"there is no {name!r} in the table, the nearest is {near[0]}; known are {', '.join(sorted(CLUSTERS))}"


def _peaks(bfloat16: float, float8: float | None = None, float4: float | None = None) -> dict[str, float]:
    """Return peaks in FLOP/s, of numbers in TFLOP/s."""
    found = {"bfloat16": bfloat16, "float8": float8, "float4": float4}
    return {name: value * _TFLOPS for name, value in found.items() if value is not None}


_NVLINK3, _NVLINK4, _NVLINK5 = (
    LinkClass(f"NVLink {version}", rate * _GB, source=source)
    for version, rate, source in (
        (3, 300, "NVIDIA A100 data sheet: 600 GB/s, both directions together"),
        (4, 450, "NVIDIA H100 data sheet: 900 GB/s, both directions together"),
        (5, 900, "MLPerf Training v5.0, NVIDIA/systems/tyche: NVLINK Gen5 1800 GB/s, both directions together"),
    )
)
_HDR = LinkClass("InfiniBand HDR", 25 * _GB, source="arXiv 2104.04473: 8 x 200 Gb/s for each node of 8 GPUs")
_NDR = LinkClass("InfiniBand NDR", 50 * _GB, source="MLPerf Training v5.0, NVIDIA/systems: one 400 Gb/s card per GPU")
_H800_NVLINK = LinkClass("NVLink of H800", 160 * _GB, source="arXiv 2412.19437, section 3.2.2, as used")
_H800_NDR = LinkClass("InfiniBand of DeepSeek-V3", 50 * _GB, source="arXiv 2412.19437, section 3.2.2")
_NVIDIA_TABLE = "NVIDIA's HGX and GB200 table, halved: it prints sparse products"

Known: TypeAlias = tuple[Accelerator, int, LinkClass, LinkClass]  # with the usual number of ranks per node

CLUSTERS: dict[str, Known] = {
    "a100-40": (
        Accelerator("A100 SXM 40 GB", _peaks(312), 40 * _GB, 1.555e12, "NVIDIA A100 data sheet", "2020"),
        8, _NVLINK3, _HDR,
    ),
    "a100-80": (
        Accelerator("A100 SXM 80 GB", _peaks(312), 80 * _GB, 2.039e12, "NVIDIA A100 data sheet", "2020"),
        8, _NVLINK3, _HDR,
    ),
    "h100": (
        Accelerator(
            "H100 SXM", _peaks(989.4, 1978.9), 81559 * _MIB, 3.35e12,
            "NVIDIA H100 data sheet; memory: MLPerf Training v5.0, NVIDIA/systems/eos-dfw", "2025-05",
        ),
        8, _NVLINK4, _NDR,
    ),
    "h200": (
        Accelerator(
            "H200 SXM", _peaks(989, 1979), 141 * _GB, 4.8e12, "NVIDIA H200 data sheet; MLPerf system files", "2026-11"
        ),
        8, _NVLINK4, _NDR,
    ),
    "h800": (
        Accelerator(
            "H800 SXM", _peaks(989.4, 1978.9), 84943110144, 3.35e12,
            "deepseek-ai/profile-data train.json: totalGlobalMem; the rest as H100", "2025-03",
        ),
        8, _H800_NVLINK, _H800_NDR,
    ),
    "b200": (
        Accelerator("B200 HGX", _peaks(2250, 4500, 9000), 180 * _GB, 7.7e12, _NVIDIA_TABLE, "2026-11"),
        8, _NVLINK5, _NDR,
    ),
    "gb200": (
        Accelerator(
            "GB200", _peaks(2500, 5000, 10000), 189471 * _MIB, 8e12,
            f"{_NVIDIA_TABLE}; memory: MLPerf Training v5.0, NVIDIA/systems/tyche", "2026-11",
        ),
        72, _NVLINK5, _NDR,
    ),
    "gb300": (
        Accelerator("GB300", _peaks(2500, 5000, 15000), 279 * _GB, 8e12, "verda.com on GB300 NVL72", "2026-11"),
        72, _NVLINK5, _NDR,
    ),
}  # fmt: skip
