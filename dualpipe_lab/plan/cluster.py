"""`Cluster`: the accelerators of a plan and the links between them, from a table of known ones or from a file.

In: numbers of data sheets, names of the table, or what `train.calibrate` measured.  Out: checked numbers, in FLOP/s,
bytes, bytes/s and seconds.
A peak depends on the limit of power, and software reaches only a part of it: an efficiency says which part, at which
size of the work, and whether that is measured, quoted from a source, or assumed.
Elsewhere: SimuMax's system files; calculon's `systems/*.json`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dualpipe_lab.plan.accelerators import CLUSTERS, plain_name, unknown_name
from dualpipe_lab.plan.hardware import Accelerator, LinkClass

if TYPE_CHECKING:
    from pathlib import Path

_GB, _MIB, _TFLOPS = 10**9, 2**20, 10**12


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
        known = CLUSTERS.get(plain_name(name))
        if known is None:
            raise ValueError(unknown_name(name))
        accelerator, usual, inside, between = known
        if ranks_per_node is None:
            ranks_per_node = min(usual, num_ranks) if isinstance(num_ranks, int) else usual
        return cls(accelerator, num_ranks, ranks_per_node, inside, between)

    @classmethod
    def from_file(cls, path: "str | Path") -> "Cluster":
        """Return the cluster of a file, which `to_file`, `train.calibrate` or a person has written.

        Args:
            path: of the file, JSON with the fields of `Cluster`, `Accelerator`, `LinkClass` and `Efficiency`; one that
                has a default may be missing.

        Raises:
            ValueError: not JSON, an unknown field, with the nearest known one, or a number that no hardware has, with
                what it probably meant.
            OSError: no such file.
        """
        from dualpipe_lab.plan.cluster_file import read_cluster  # with json: only where there is a file

        return cls(**read_cluster(path))

    def to_file(self, path: "str | Path") -> None:
        """Write this cluster to a file; `from_file` returns an equal one.

        Args:
            path: of the file, which is replaced.

        Raises:
            OSError: the folder is missing, or cannot be written.
        """
        from dualpipe_lab.plan.cluster_file import write_cluster

        write_cluster(path, self)

    def __str__(self) -> str:
        unit, peaks = self.accelerator, ", ".join(f"{k} {v / _TFLOPS:.5g}" for k, v in self.accelerator.peaks.items())
        nodes = (
            f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}, {self.ranks_per_node} per node, each on {unit.name}"
        )
        links = ", ".join(f"{name} {link.bandwidth / _GB:.4g} GB/s" for name, link in self._links())
        return f"{nodes} ({unit.memory_bytes // _MIB} MiB; {peaks} TFLOP/s); {links}"

    def _links(self) -> tuple[tuple[str, LinkClass], ...]:
        return ("inside", self.inside), ("between", self.between)
