"""`compact_simulate`: the makespan, busy times and peaks of a compact program, without a record of every step.

Chapter: book/pp/gpipe.  In: a `CompactProgram` and a `Cost`.  Out: a `CompactResult`.
The timing model is that of `dualpipe_lab.pp.simulator`, and so are the numbers, to the last digit: each time is made by
the same additions in the same order.
  small or narrow    plain Python, one step at a time
  large and wide     numpy, one wave of independent steps at a time
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

from dualpipe_lab.pp.compact.arrays import Ints, Numbers
from dualpipe_lab.pp.compact.costs import Ticks, Work, classify, price
from dualpipe_lab.pp.compact.order import Wave, find_execution
from dualpipe_lab.pp.compact.program import CompactProgram
from dualpipe_lab.pp.compact.slots import Slots, number_slots
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.timeline import Time

_LARGEST = {int: 2**62, float: 2**53, object: -1}  # integers up to here are exact in numpy

Ends: TypeAlias = tuple[list[Any], list[Any]]  # of each rank: when it is free, how long it was busy


@dataclass(frozen=True)
class CompactResult:
    """The numbers of a simulation, as those of its `Timeline`.

    Attributes:
        makespan: the end of the last step.
        busy: the busy time of each rank.
        peak_activations: the largest number of activations that are live on each rank at one time.
        peak_positions: the position of the step that first reaches this number, on each rank.
    """

    makespan: Time
    busy: tuple[Time, ...]
    peak_activations: tuple[int, ...]
    peak_positions: tuple[int, ...]

    @property
    def idle(self) -> tuple[Time, ...]:
        """The idle time of each rank between time 0 and the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time, 0 to 1: idle / (num_ranks * makespan)."""
        total = len(self.busy) * self.makespan
        return float(Fraction(total - sum(self.busy)) / total) if total else 0.0


def compact_simulate(compact: CompactProgram, cost: Cost = UNIT_COST) -> CompactResult:
    """Return the makespan, busy times and peaks of a compact program; every time is exact.

    If a cost is a fraction that is not whole, all times are fractions.
    Raises InvalidProgram for a program that is incomplete or would deadlock, and ValueError for costs that do not fit
    its stages.

    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> result = compact_simulate(CompactProgram.of(gpipe(2, 3)))
    >>> result.makespan, result.idle, result.peak_activations, result.peak_positions
    (12, (3, 3), (3, 3), (2, 2))
    """
    slots, waves = compact.slots, compact.execution.waves
    work = classify(compact, each_pair=True) if callable(cost.overlap) else compact.work
    ticks = price(compact, cost, work)
    if waves and not _fits(compact, work, ticks):
        narrow = find_execution(compact, compact.wiring.source, wide=False)
        slots, waves = number_slots(compact, narrow, compact.wiring), None
    ends, busy = _in_waves(compact, slots, waves, work, ticks) if waves else _in_turn(compact, slots, work, ticks)
    makespan, all_busy = ticks.restore(max(ends)), tuple(map(ticks.restore, busy))
    return CompactResult(makespan, all_busy, *compact.peaks)


def _in_turn(compact: CompactProgram, slots: Slots, work: Work, ticks: Ticks) -> Ends:
    """Run one step at a time, each after those that it waits for; as `_Run` of the full simulator."""
    latency, transfer = ticks.latency, ticks.transfer
    now: list[Any] = [0] * compact.num_ranks
    busy: list[Any] = [0] * compact.num_ranks
    free: list[Any] = [0] * (slots.num_links + 1)
    there: list[Any] = [0]  # when the result in each slot is where it is needed
    deliver = there.append
    durations = map(ticks.of_work.__getitem__, slots.classes(work))
    for rank, source, other, link, duration in zip(*slots.rows, durations, strict=True):
        start = now[rank]
        if there[source] > start:
            start = there[source]
        if other and there[other] > start:  # the second input of a pair
            start = there[other]
        now[rank] = done = start + duration
        busy[rank] += done - start
        if link:
            leaves = free[link]
            free[link] = gone = (leaves if leaves > done else done) + transfer
            deliver(gone + latency)
        else:
            deliver(done)
    return now, busy


def _fits(compact: CompactProgram, work: Work, ticks: Ticks) -> bool:
    """Whether no time can exceed the integers that numpy holds exactly."""
    largest = max(ticks.of_work) + 2 * (ticks.latency + ticks.transfer)
    return bool(largest * compact.num_actions <= _LARGEST[ticks.number])


def _in_waves(compact: CompactProgram, slots: Slots, waves: list[Wave], work: Work, ticks: Ticks) -> Ends:
    """Run all steps of one wave at a time."""
    import numpy as np

    table: Any = np.array(ticks.of_work, ticks.number)
    classes = work.of_action[slots.actions]
    links = _Links(np.zeros(slots.num_links + 1, ticks.number), ticks)
    there: Any = np.zeros(compact.num_actions + 1, ticks.number)
    now: Any = np.zeros(compact.num_ranks, ticks.number)
    busy = now.copy()
    for start, middle, end in waves:
        rank, num_pairs = slots.rank[start:middle], end - middle
        begin = np.maximum(now[rank], there[slots.source[start:middle]])
        if num_pairs:
            begin[-num_pairs:] = np.maximum(begin[-num_pairs:], there[slots.source[middle:end]])
        now[rank] = done = begin + table[classes[start:middle]]
        busy[rank] += done - begin
        there[start + 1 : middle + 1] = links.arrivals(done, slots.link[start:middle])
        if num_pairs:
            there[middle + 1 : end + 1] = links.arrivals(done[-num_pairs:], slots.link[middle:end])
    return now.tolist(), busy.tolist()


class _Links:
    """When each link is free; number 0 stands for no link."""

    def __init__(self, free: Numbers, ticks: Ticks) -> None:
        self.free, self.latency, self.transfer = free, ticks.latency, ticks.transfer

    def arrivals(self, made: Numbers, link: Ints) -> Numbers:
        """Return when results arrive; no link carries two of them."""
        import numpy as np

        if not self.latency and not self.transfer:
            return made
        gone = np.maximum(self.free[link], made) + self.transfer
        self.free[link] = gone
        return np.where(link > 0, gone + self.latency, made)
