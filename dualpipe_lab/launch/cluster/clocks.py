"""The clock of a rank beside that of rank 0, so that the traces of many hosts lie on one axis.

Chapter: book/appendix/gpus.  In: a rank's own clock, messages to and from rank 0.  Out: offset, drift, and their bound.
  ask         send, and take the own time t0; rank 0 answers with its time T; the answer is here at t1
  offset      T - (t0 + t1) / 2      rank 0's clock minus this one's
  bound       (t1 - t0) / 2          T was read between t0 and t1, wherever the messages lost their time
  drift       between two readings the offset is a straight line: of two clocks whose rates stay as they are, the error
              in between is at most the larger of the two bounds
The shortest of several exchanges counts.  Ranks on one host read one clock, and their offset is 0 within the bound.
Elsewhere: NTP, whose four time stamps also leave out the time that the server takes; Score-P `SCOREP_TIMER` and its
linear interpolation between two readings.
Source: Cristian 1989 (Probabilistic clock synchronization), section 4.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from dualpipe_lab.launch.clock import origin_after
from dualpipe_lab.launch.record.trace import RankTrace

NUM_EXCHANGES = 8


class ClockReading(NamedTuple):
    """The offset of a clock at one time: rank 0's clock minus this one's, with the bound of its error."""

    time_ns: int
    offset_ns: int
    bound_ns: int


def reading_of(exchanges: Iterable[tuple[int, int, int]]) -> ClockReading:
    """Return the offset that the shortest exchange tells: asked and heard on this clock, answered on rank 0's between.

    >>> reading_of([(100, 5_120, 140), (200, 5_290, 380)])
    ClockReading(time_ns=120, offset_ns=5000, bound_ns=20)
    """
    asked, answered, heard = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    middle = (asked + heard) // 2
    return ClockReading(middle, answered - middle, (heard - asked + 1) // 2)


def offset_at(readings: Sequence[ClockReading], time_ns: int) -> int:
    """Return the offset at a time: a straight line between each two readings, constant before and behind them.

    >>> readings = [ClockReading(0, 0, 5), ClockReading(1_000, 100, 5), ClockReading(2_000, 100, 5)]
    >>> [offset_at(readings, time) for time in (-10, 500, 1_500, 3_000)]
    [0, 50, 100, 100]
    """
    place = bisect_left(readings, time_ns, key=lambda reading: reading.time_ns)
    if place in (0, len(readings)):
        return readings[min(place, len(readings) - 1)].offset_ns
    before, after = readings[place - 1 : place + 1]
    part = (after.offset_ns - before.offset_ns) * (time_ns - before.time_ns)
    return before.offset_ns + round(part / (after.time_ns - before.time_ns))


def correct(trace: RankTrace, readings: Sequence[ClockReading]) -> None:
    """Put the times of a trace on the clock of rank 0, and note their bound; without readings it is on it already."""
    if readings:
        trace.move(lambda time: time + offset_at(readings, time))
        trace.error_ns = max(reading.bound_ns for reading in readings)


def read_clocks(rank: int, world_size: int, exchanger: Any, now: Callable[[], int]) -> ClockReading:
    """Return the offset of this rank's clock; every rank calls this, and rank 0 answers one rank after the other.

    `exchanger` has `send(value, peer)` and `recv(peer)` for whole numbers.
    """
    if rank:
        return reading_of([_ask(exchanger, now) for _ in range(NUM_EXCHANGES)])
    for peer in range(1, world_size):
        for _ in range(NUM_EXCHANGES):
            exchanger.recv(peer)
            exchanger.send(now(), peer)
    return ClockReading(now(), 0, 0)


def agree_on_origin(rank: int, world_size: int, exchanger: Any, now: Callable[[], int], reading: ClockReading) -> int:
    """Return the time on this clock that counts as 0 on all ranks; every rank calls this after `read_clocks`."""
    if rank:
        return int(exchanger.recv(0)) - reading.offset_ns
    origin_ns = origin_after(now(), world_size)
    for peer in range(1, world_size):
        exchanger.send(origin_ns, peer)
    return origin_ns


def _ask(exchanger: Any, now: Callable[[], int]) -> tuple[int, int, int]:
    asked = now()
    exchanger.send(0, 0)
    answered = exchanger.recv(0)
    return asked, answered, now()
