"""The clocks of a rank: real time, real time of a GPU's queue, and model time that is the same on every machine.

Chapters: book/start/time; book/appendix/gpus.  In: deadlines.  Out: nanoseconds since all ranks started.
The wall clock sleeps; the virtual clock only counts, so eight ranks on two cores draw the timeline of eight machines.
A call that launches a kernel returns before the kernel runs, so the time of the call says nothing about it.  Each
reading of the device's clock therefore records an event behind the work that is queued; the reading itself is
provisional, the time of the call, and `event_times` tells the time of the event, measured from one at a known time.
Elsewhere: `torch.cuda.Event.elapsed_time`; the GPU track of torch's profiler.
"""

import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from dualpipe_lab.launch import accelerator, operating_system

MAX_EVENTS = 200_000  # of a device's clock: as many as a trace has spans
ClockName = Literal["wall", "virtual"]
_HEAD_START_NS = 2_000_000  # so that all ranks know the origin, and are awake, when it comes


class WallClock:
    """Real time since an origin that all ranks of a launch share; `perf_counter` is one clock per machine."""

    def __init__(self, origin_ns: int) -> None:
        self._origin_ns = origin_ns
        operating_system.sharpen_sleep()

    def now(self) -> int:
        """Nanoseconds since all ranks started."""
        return time.perf_counter_ns() - self._origin_ns

    def wait_until(self, time_ns: int) -> None:
        """Sleep until `time_ns`; return at once if it has passed."""
        remaining = time_ns - self.now()
        if remaining > 0:
            time.sleep(remaining / 1e9)


class VirtualClock:
    """Model time: it advances only in `compute` and when a message arrives."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now(self) -> int:
        """Model nanoseconds since all ranks started."""
        return self._now_ns

    def wait_until(self, time_ns: int) -> None:
        """Advance the clock to `time_ns`."""
        self._now_ns = max(self._now_ns, time_ns)


class DeviceClock(WallClock):
    """Wall clock whose readings are replaced by the times of events, once the device has reached them."""

    def __init__(self, origin_ns: int) -> None:
        super().__init__(origin_ns)
        self._accelerator = accelerator.current()
        self._accelerator.synchronize()
        self._first = self._event()
        self._first_ns = self._last_ns = super().now()
        self._events: dict[int, Any] = {}  # by the provisional reading, which is therefore unique

    def now(self) -> int:
        """Provisional nanoseconds since all ranks started: the time of this call."""
        self._last_ns = max(super().now(), self._last_ns + 1)
        if len(self._events) < MAX_EVENTS:
            self._events[self._last_ns] = self._event()
        return self._last_ns

    def after_device(self) -> int:
        """Nanoseconds since all ranks started, read after the device has done what is queued."""
        self._accelerator.synchronize()
        return super().now()

    def event_times(self) -> Callable[[int], int]:
        """Return what turns the provisional readings until now into the times of their events."""
        self._accelerator.synchronize()
        times = {given: self._time_of(event) for given, event in self._events.items()}
        self._events.clear()
        return lambda reading: times.get(reading, reading)

    def _time_of(self, event: Any) -> int:
        return self._first_ns + round(float(self._first.elapsed_time(event)) * 1e6)

    def _event(self) -> Any:
        event = self._accelerator.event()
        event.record()
        return event


Clock: TypeAlias = WallClock | VirtualClock


def origin_after(now_ns: int, world_size: int) -> int:
    """Return the time that counts as 0 on all ranks: a little after now, and later with more ranks."""
    return now_ns + _HEAD_START_NS + _HEAD_START_NS * world_size // 4


def clock_of(device: Any, origin_ns: int = 0) -> WallClock:
    """The wall clock of a rank on `device`; `origin_ns` is the common origin, in the time of `perf_counter_ns`."""
    origin_ns = origin_ns or time.perf_counter_ns()
    return WallClock(origin_ns) if device.type == "cpu" else DeviceClock(origin_ns)
