"""What one exercise of a submission may use."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one exercise.

    Attributes:
        seconds: from its first line to its verdict; a launch of ranks has a limit of its own, 20 s.
        output_bytes: printed by the answer cell and all ranks together.
        memory_mib: of all its processes; what they share with one another counts once.
        processes: at one time, besides the three that judge it.
    """

    seconds: float = 60
    output_bytes: int = 1_000_000
    memory_mib: int = 4096
    processes: int = 64

    def to_dict(self) -> dict[str, float]:
        """As plain JSON values."""
        return asdict(self)
