"""The configuration of a launch: threads, link, clock, check, backend and wire.

In: the arguments of `launch`.  Out: one checked object that travels to every rank.
"""

from dataclasses import dataclass

from dualpipe_lab.launch import backends
from dualpipe_lab.launch.emulate.clock import ClockName
from dualpipe_lab.launch.emulate.link import Link, NodeLink
from dualpipe_lab.launch.record import wire


@dataclass(frozen=True)
class LaunchConfig:
    """Arguments of `launch` that apply on every rank; `launch` documents them."""

    threads: int
    link: Link | NodeLink | None
    clock: ClockName
    check: bool
    backend: str
    wire: bool

    @property
    def is_emulated(self) -> bool:
        """Whether messages carry timestamps."""
        return self.link is not None or self.clock == "virtual"

    @property
    def reads_wire(self) -> bool:
        """Whether this launch counts the bytes on the wire."""
        return self.wire and not wire.obstacle(self.backend)

    def validate(self, world_size: int) -> None:
        """Raise ValueError for a value that no rank could use."""
        if not isinstance(self.threads, int) or isinstance(self.threads, bool) or self.threads < 1:
            raise ValueError(f"launch needs threads to be a whole number from 1, got {self.threads!r}")
        if self.link is not None and not isinstance(self.link, (Link, NodeLink)):
            raise ValueError(
                f"launch needs link to be a Link, such as lab.Link(gbps=1, latency_ms=1), got {self.link!r}"
            )
        if self.clock not in ("wall", "virtual"):
            raise ValueError(f"launch knows clock=wall, virtual, got {self.clock!r}")
        if self.backend not in backends.BACKENDS:
            raise ValueError(f"launch knows backend={', '.join(backends.BACKENDS)}, got {self.backend!r}")
        if self.backend == "nccl" and self.is_emulated:
            asked = f"link={self.link!r}" if self.link is not None else f"clock={self.clock!r}"
            raise ValueError(
                f"NCCL's messages take the time that its links take, and {asked} emulates another; "
                "leave it out, or use backend='gloo'"
            )
        if self.backend == "nccl" and (obstacle := backends.nccl_obstacle(world_size)):
            raise ValueError(
                f"{obstacle}; use backend='gloo', or guard the cell with `if lab.nccl_ready({world_size}):`"
            )
