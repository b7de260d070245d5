"""Two clocks with one interface: real time, and model time that is the same on every machine.

Chapter: book/start/time.  In: work in milliseconds, deadlines.  Out: nanoseconds since all ranks started.
The wall clock sleeps; the virtual clock only counts, so eight ranks on two cores draw the timeline of eight machines.
"""

import time
from typing import Literal, Protocol

from dualpipe_lab.launch import operating_system

ClockName = Literal["wall", "virtual"]


class Clock(Protocol):
    """Interface of both clocks, in nanoseconds."""

    name: ClockName

    def now(self) -> int:
        """Nanoseconds since all ranks started."""

    def wait_until(self, time_ns: int) -> None:
        """Let time pass until `time_ns`; do nothing if it has passed already."""


class WallClock:
    """Real time since an origin that all ranks of a launch share; `perf_counter` is one clock per machine."""

    name: ClockName = "wall"

    def __init__(self, origin_ns: int) -> None:
        self._origin_ns = origin_ns
        operating_system.sharpen_sleep()

    def now(self) -> int:
        """Nanoseconds since all ranks started."""
        return time.perf_counter_ns() - self._origin_ns

    def wait_until(self, time_ns: int) -> None:
        """Sleep until `time_ns`."""
        remaining = time_ns - self.now()
        if remaining > 0:
            time.sleep(remaining / 1e9)


class VirtualClock:
    """Model time: it advances only in `compute` and when a message arrives."""

    name: ClockName = "virtual"

    def __init__(self) -> None:
        self._now_ns = 0

    def now(self) -> int:
        """Model nanoseconds since all ranks started."""
        return self._now_ns

    def wait_until(self, time_ns: int) -> None:
        """Advance the clock to `time_ns`."""
        self._now_ns = max(self._now_ns, time_ns)
