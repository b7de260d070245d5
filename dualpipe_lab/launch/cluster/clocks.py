"""`Alignment`: the clock of a rank beside that of rank 0, so that the traces of many hosts lie on one axis.

Chapter: book/appendix/gpus.  In: a rank's own clock, messages to and from rank 0.  Out: offset, drift, and their bound.
  ask         send, and take the own time t0; rank 0 answers with its time T; the answer is here at t1
  offset      T - (t0 + t1) / 2      rank 0's clock minus this one's
  bound       (t1 - t0) / 2          T was read between t0 and t1, wherever the messages lost their time
  drift       between two readings, before and after the run, the offset is a straight line: of two clocks whose rates
              stay as they are, the error in between is at most the larger of the two bounds
The shortest of several exchanges counts.  Ranks on one host read one clock, and their offset is 0 within the bound.
Elsewhere: NTP, whose four time stamps also leave out the time that the server takes; Score-P `SCOREP_TIMER` and its
linear interpolation between two readings.
Source: Cristian 1989 (Probabilistic clock synchronization), section 4.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dualpipe_lab.launch.record.trace import RankTrace

NUM_EXCHANGES = 8
HEAD_START_NS = 2_000_000  # between the last message about the origin and time 0, so that all ranks are awake


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


@dataclass(frozen=True)
class Alignment:
    """A clock beside that of rank 0, from a reading before a run and one after it."""

    first: ClockReading
    last: ClockReading

    @property
    def bound_ns(self) -> int:
        """Bound of the error of a time between the readings, if both clocks keep their rates."""
        return max(self.first.bound_ns, self.last.bound_ns)

    def gained(self, time_ns: int) -> int:
        """Nanoseconds that rank 0's clock has gained on this one from the first reading until a time of this one.

        >>> Alignment(ClockReading(0, 500, 10), ClockReading(1_000, 700, 20)).gained(250)
        50
        """
        drift = (self.last.offset_ns - self.first.offset_ns) / max(self.last.time_ns - self.first.time_ns, 1)
        return round((time_ns - self.first.time_ns) * drift)

    def correct(self, trace: RankTrace, origin_ns: int) -> None:
        """Put the times of a trace, which count from the origin on this clock, on rank 0's, and note their bound."""
        trace.move(lambda time: time + self.gained(time + origin_ns))
        trace.error_ns = self.bound_ns


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
    """Return the time on this rank's clock that counts as 0 on all of them; every rank calls this after `read_clocks`.

    It lies a little ahead, and later with more ranks, so that all of them are awake when it comes.
    """
    if rank:
        return int(exchanger.recv(0)) - reading.offset_ns
    origin_ns = now() + HEAD_START_NS + HEAD_START_NS * world_size // 4
    for peer in range(1, world_size):
        exchanger.send(origin_ns, peer)
    return origin_ns


def _ask(exchanger: Any, now: Callable[[], int]) -> tuple[int, int, int]:
    asked = now()
    exchanger.send(0, 0)
    answered = exchanger.recv(0)
    return asked, answered, now()
