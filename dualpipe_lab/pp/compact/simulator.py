"""`compact_simulate`: makespan, busy times, ends of stages and peaks of a compact program, without all steps' spans.

Chapter: book/pp/gpipe.  In: a `CompactProgram` and a `Cost`.  Out: a `CompactResult`.
The timing model is that of `dualpipe_lab.pp.simulator`, and so are the numbers, to the last digit: each time is made by
the same additions in the same order.
  small or narrow    plain Python, one step at a time
  large and wide     numpy, one wave of independent steps at a time
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from dualpipe_lab.pp.compact.arrays import Ints, Numbers
from dualpipe_lab.pp.compact.costs import Ticks, Work, classify, price
from dualpipe_lab.pp.compact.order import Wave, find_execution
from dualpipe_lab.pp.compact.program import CompactProgram
from dualpipe_lab.pp.compact.slots import Slots
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.timeline import Time

_LARGEST = {int: 2**62, float: 2**53, object: -1}  # integers up to here are exact in numpy

Interval: TypeAlias = tuple[Time, Time]  # start and end


class _Outcome(NamedTuple):
    """When each rank is free, how long it was busy; start and end of the steps of which they are told."""

    free: list[Any]
    busy: list[Any]
    told: list[tuple[Any, Any]]


@dataclass(frozen=True)
class CompactResult:
    """The numbers of a simulation, as those of its `Timeline`.

    Attributes:
        makespan: the end of the last step.
        busy: the busy time of each rank.
        ends: the end of each rank's last step.
        passes: for each rank, by stage, its first forward and its last backward (B, I or W): the start and the end of
            these steps; the stages in the order of their first forwards.
        peak_activations: the largest number of activations that are live on each rank at one time.
        peak_positions: the position of the step that first reaches this number, on each rank.
    """

    makespan: Time
    busy: tuple[Time, ...]
    ends: tuple[Time, ...]
    passes: tuple[dict[int, tuple[Interval, Interval]], ...]
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


def compact_simulate(compact: CompactProgram, cost: Cost = UNIT_COST, *, by_stages: bool = False) -> CompactResult:
    """Return the makespan, busy times, ends of stages and peaks of a compact program; every time is exact.

    If a cost is a fraction that is not whole, all times are fractions.  `by_stages`: a function `cost.overlap` looks at
    the stages and kinds of a pair alone; then it is called once for all pairs of the same ones.
    Raises InvalidProgram for a program that is incomplete or would deadlock, and ValueError for costs that do not fit
    its stages.

    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> result = compact_simulate(CompactProgram.of(gpipe(2, 3)))
    >>> result.makespan, result.idle, result.peak_activations, result.peak_positions
    (12, (3, 3), (3, 3), (2, 2))
    >>> result.ends, result.passes[1]
    ((12, 10), {1: ((1, 2), (8, 10))})
    """
    slots, waves = compact.slots, compact.execution.waves
    work = classify(compact, each_pair=True) if callable(cost.overlap) and not by_stages else compact.work
    ticks = price(compact, cost, work)
    if waves and not _fits(compact, work, ticks):
        slots, waves = compact.slots_of(find_execution(compact, compact.wiring.source, wide=False)), None
    found = _in_waves(compact, slots, waves, work, ticks) if waves else _in_turn(compact, slots, work, ticks)
    ends, busy = (tuple(map(ticks.restore, times)) for times in (found.free, found.busy))
    return CompactResult(max(ends), busy, ends, _passes(compact, slots, ticks, found), *compact.peaks)


def _passes(
    compact: CompactProgram, slots: Slots, ticks: Ticks, found: _Outcome
) -> tuple[dict[int, tuple[Interval, Interval]], ...]:
    """Return start and end of the first forward and the last backward, by rank and stage."""
    of_slot = {
        slot: (ticks.restore(start), ticks.restore(end))
        for slot, (start, end) in zip(slots.told.tolist(), found.told, strict=True)
    }
    by_rank: list[dict[int, tuple[Interval, Interval]]] = [{} for _ in range(compact.num_ranks)]
    for rank, stage, first, last in zip(*(column.tolist() for column in slots.passes), strict=True):
        by_rank[rank][stage] = of_slot[first], of_slot[last]
    return tuple(by_rank)


def _in_turn(compact: CompactProgram, slots: Slots, work: Work, ticks: Ticks) -> _Outcome:
    """Run one step at a time, each after those that it waits for; as `_Run` of the full simulator.

    The last step whose times are told is the last of all, but for the second of a pair, which takes no time.
    """
    latency, transfer = ticks.latency, ticks.transfer
    found = _Outcome([0] * compact.num_ranks, [0] * compact.num_ranks, [])
    now, busy, told = found
    free: list[Any] = [0] * (slots.num_links + 1)
    there: list[Any] = [0]  # when the result in each slot is where it is needed
    deliver = there.append
    durations = map(ticks.of_work.__getitem__, slots.classes(work))
    steps = zip(*slots.rows, durations, strict=True)
    for length in slots.stretches:
        for rank, source, other, link, duration in islice(steps, length):
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
        told.append((start, done))
    return found


def _fits(compact: CompactProgram, work: Work, ticks: Ticks) -> bool:
    """Whether no time can exceed the integers that numpy holds exactly."""
    largest = max(ticks.of_work) + 2 * (ticks.latency + ticks.transfer)
    return bool(largest * compact.num_actions <= _LARGEST[ticks.number])


def _in_waves(compact: CompactProgram, slots: Slots, waves: list[Wave], work: Work, ticks: Ticks) -> _Outcome:
    """Run all steps of one wave at a time."""
    import numpy as np

    table: Any = np.array(ticks.of_work, ticks.number)
    classes = work.of_action[slots.actions]
    links = _Links(np.zeros(slots.num_links + 1, ticks.number), ticks)
    there: Any = np.zeros(compact.num_actions + 1, ticks.number)
    now: Any = np.zeros(compact.num_ranks, ticks.number)
    busy = now.copy()
    told = list[tuple[Any, Any]]()
    stops = np.searchsorted(slots.told, [wave.end for wave in waves]).tolist()
    for (start, middle, end), stop in zip(waves, stops, strict=True):
        rank, num_pairs = slots.rank[start:middle], end - middle
        begin = np.maximum(now[rank], there[slots.source[start:middle]])
        if num_pairs:
            begin[-num_pairs:] = np.maximum(begin[-num_pairs:], there[slots.source[middle:end]])
        now[rank] = done = begin + table[classes[start:middle]]
        busy[rank] += done - begin
        there[start + 1 : middle + 1] = links.arrivals(done, slots.link[start:middle])
        if num_pairs:
            there[middle + 1 : end + 1] = links.arrivals(done[-num_pairs:], slots.link[middle:end])
        if stop > len(told):
            here = slots.told[len(told) : stop] - start
            told += zip(begin[here].tolist(), done[here].tolist(), strict=True)
    return _Outcome(now.tolist(), busy.tolist(), told)


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
