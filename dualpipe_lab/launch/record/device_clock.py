"""The clock of a rank whose work is queued on a device: times are taken by events in the device's stream.

Chapter: book/appendix/gpus.  In: the device and a common origin.  Out: nanoseconds since all ranks started.
A call that launches a kernel returns before the kernel runs, so the time of the call says nothing about it.  Each
reading therefore records an event behind the work that is queued; the reading itself is provisional, the time of the
call, and `resolve` replaces it in a trace by the time of the event, measured from an event at a known time.
Elsewhere: `torch.cuda.Event.elapsed_time`; the GPU track of torch's profiler.
"""

from time import perf_counter_ns
from typing import Any

from dualpipe_lab.launch import accelerator
from dualpipe_lab.launch.accelerator import Event
from dualpipe_lab.launch.emulate.clock import WallClock
from dualpipe_lab.launch.record.trace import RankTrace

MAX_EVENTS = 200_000  # as many as a trace has spans


class DeviceClock(WallClock):
    """Wall clock whose readings are replaced by the times of events, once the device has reached them."""

    def __init__(self, origin_ns: int) -> None:
        super().__init__(origin_ns)
        self._accelerator = accelerator.current()
        self._accelerator.synchronize()
        self._first = self._event()
        self._first_ns = self._last_ns = super().now()
        self._events: dict[int, Event] = {}  # by the provisional reading, which is therefore unique

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

    def resolve(self, trace: RankTrace) -> None:
        """Replace the provisional readings in a trace by the times of their events."""
        self._accelerator.synchronize()
        times = {given: self._time_of(event) for given, event in self._events.items()}
        self._events.clear()
        for spans in (trace.spans, trace.collectives):
            spans[:] = [
                span._replace(start=times.get(int(span.start), span.start), end=times.get(int(span.end), span.end))
                for span in spans
            ]
        trace.sent[:] = [sent._replace(time_ns=times.get(sent.time_ns, sent.time_ns)) for sent in trace.sent]
        trace.received[:] = [one._replace(time_ns=times.get(one.time_ns, one.time_ns)) for one in trace.received]

    def _time_of(self, event: Event) -> int:
        return self._first_ns + round(self._first.elapsed_time(event) * 1e6)

    def _event(self) -> Event:
        event = self._accelerator.event()
        event.record()
        return event


def clock_of(device: Any, origin_ns: int = 0) -> WallClock:
    """The wall clock of a rank on `device`; `origin_ns` is the common origin, in the time of `perf_counter_ns`."""
    origin_ns = origin_ns or perf_counter_ns()
    return WallClock(origin_ns) if device.type == "cpu" else DeviceClock(origin_ns)
