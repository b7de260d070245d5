"""The limits of one exercise of a submission, and what is raised beyond one."""

from dataclasses import asdict, dataclass


class Stopped(Exception):  # noqa: N818
    """A submission exceeded a limit; the message addresses the learner."""


@dataclass(frozen=True)
class Limits:
    """Limits of one exercise.

    Attributes:
        seconds: time from its first line to its verdict; a launch of ranks has its own limit of 20 s.
        output_bytes: output of the answer cell and of all ranks, summed.
        memory_mib: memory of all its processes; shared pages count once.
        processes: processes at one time, besides the three that evaluate it.
    """

    seconds: float = 60
    output_bytes: int = 1_000_000
    memory_mib: int = 4096
    processes: int = 64

    def to_dict(self) -> dict[str, float]:
        """Return the limits as plain JSON values."""
        return asdict(self)
