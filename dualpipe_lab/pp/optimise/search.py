"""The search: the best fixed schedule, then other orders of its stages, under one limit of memory.

Chapter: book/pp/explorer.  In: sizes or a program, costs, a limit of memory, a seed.  Out: an `Optimum`.
  1. every fixed schedule that keeps to the limit
  2. a list scheduler with many rules (`greedy`) on every placement of stages that a fixed schedule has
  3. local moves on the best of both (`moves`)
A placement whose lower bound is no better than the best known makespan is skipped.  The result is never slower than the
best fixed schedule under the same limit, and equal for equal arguments.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter
from typing import TypeAlias

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.lowering import strip
from dualpipe_lab.pp.optimise.bounds import Bound, lower_bound
from dualpipe_lab.pp.optimise.greedy import Rules, greedy
from dualpipe_lab.pp.optimise.moves import improve
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.ranking import score, share, stage_cost
from dualpipe_lab.pp.schedules.variants import variant
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.rules import InvalidProgram, Route, routes
from dualpipe_lab.pp.validation.validator import validate
from dualpipe_lab.timeline import Time
from dualpipe_lab.timeline.units import number

Timed: TypeAlias = tuple[Time, Program]  # a makespan, and its program

NUM_MOVES = 300
_MOST_LIMITS = 8
_SLOPES = (Fraction(0), Fraction(1, 2), Fraction(1))
_PATIENCE = (Fraction(0), Fraction(1))


@dataclass(frozen=True)
class Optimum:
    """The best order found, and a lower bound on the makespan of any order.

    Attributes:
        program: the order.
        makespan: its ticks.
        bound: a lower bound for any order with the same placement of stages; in `search`, with any placement tried.
        fixed: ticks and program of the best fixed schedule within the limit; None if there is none.
    """

    program: Program
    makespan: Time
    bound: Bound
    fixed: Timed | None

    @property
    def gap(self) -> float:
        """The makespan beyond the bound, as a share of the bound: 0 if no order is faster."""
        return float(Fraction(self.makespan) / self.bound.ticks - 1) if self.bound.ticks else 0.0

    def __str__(self) -> str:
        fixed = (
            "none keeps to the limit" if self.fixed is None else f"{self.fixed[1].name}: {number(self.fixed[0])} ticks"
        )
        found = f"{self.program.name}: {number(self.makespan)} ticks"
        bound = f"no order takes less than {number(self.bound.ticks)} ({self.bound.reason} of rank {self.bound.rank})"
        return "\n".join([f"best fixed  {fixed}", f"found       {found}", f"bound       {bound}, gap {self.gap:.1%}"])


def optimise(
    program: Program,
    cost: Cost = UNIT_COST,
    in_flight: int | Sequence[int] | None = None,
    seed: int = 0,
    num_moves: int = NUM_MOVES,
) -> Optimum:
    """Search for a faster order of a program's actions, with the same placement of stages; `cost` is per stage.

    `in_flight`: the most activations that a rank may hold, one number or one per rank (default: no limit).
    Raises ValueError if no order was found that keeps to the limit.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b
    >>> print(optimise(one_f_one_b(3, 4), num_moves=0))
    best fixed  1F1B: 18 ticks
    found       Searched, stages as in 1F1B: 14 ticks
    bound       no order takes less than 14 (work of rank 2), gap 0.0%
    """
    plain = strip(program)
    return _search([_Placement([plain], cost, _limits(plain, in_flight))], seed, num_moves)


def search(
    num_ranks: int,
    num_microbatches: int,
    cost: Cost = UNIT_COST,
    memory: Time | None = None,
    weights: Time | None = None,
    names: Iterable[str] | None = None,
    seed: int = 0,
    num_moves: int = NUM_MOVES,
) -> Optimum:
    """Search over all placements of the fixed schedules; all costs and limits are in units of 1/p of the model.

    `memory`, `weights`: the most activations and weights that a rank may hold (default: no limit).
    `names`: the schedules to start from (default: all that have this size).
    Raises ValueError if none has this size, or if no order was found that keeps to the limits.
    """
    programs = [
        program
        for program in _fixed(names, num_ranks, num_microbatches)
        if weights is None or score(program).weights <= weights
    ]
    if not programs:
        room = "" if weights is None else f" and room for {weights} weights"
        raise ValueError(
            f"no schedule has {num_ranks} ranks, {num_microbatches} microbatches{room}; choose another size"
        )
    placements = []
    for placed in _by_placement(programs):
        per_stage = stage_cost(placed[0], cost)
        limits = _limits(placed[0], None if memory is None else int(memory / share(placed[0])))
        placements.append(_Placement(placed, per_stage, limits))
    return _search(placements, seed, num_moves)


class _Placement:
    """The orders of one placement of stages: the fixed schedules within the limits, and orders found by a search."""

    def __init__(self, programs: Sequence[Program], cost: Cost, limits: Sequence[int]) -> None:
        self.stages, self.cost, self.limits = programs[0], cost, limits
        self.bound = lower_bound(self.stages, cost, limits)
        self.fixed = self.best(one for one in programs if _fits(one, limits))

    def best(self, programs: Iterable[Program]) -> Timed | None:
        """Return the fastest program and its ticks."""
        return min(((simulate(one, self.cost).makespan, one) for one in programs), key=itemgetter(0), default=None)

    def search(self, seed: int, num_moves: int) -> Timed | None:
        """Return the fastest order found; None if the list scheduler gets stuck with all rules."""
        rules = _rules(self.limits, has_b_cost=self.cost.B is not None, has_pairs=self.cost.overlap is not None)
        made = (greedy(self.stages, self.cost, one) for one in rules)
        known = [one for one in (self.fixed, self.best(one for one in made if one is not None)) if one is not None]
        if not known:
            return None
        ticks, program = min(known, key=itemgetter(0))
        if ticks == self.bound.ticks:
            return ticks, program
        return self.best([improve(program, self.cost, self.limits, seed, num_moves)])


def _search(placements: Sequence[_Placement], seed: int, num_moves: int) -> Optimum:
    fixed = min((one.fixed for one in placements if one.fixed), key=itemgetter(0), default=None)
    best = fixed
    for placement in sorted(placements, key=lambda one: one.bound.ticks):
        if best is None or placement.bound.ticks < best[0]:
            found = placement.search(seed, num_moves)
            best = min((one for one in (best, found) if one), key=itemgetter(0), default=None)
    if best is None:
        limits = sorted({limit for placement in placements for limit in placement.limits})
        raise ValueError(f"no order was found with room for {limits[-1]} activations on a rank; allow more")
    return Optimum(best[1], best[0], min((one.bound for one in placements), key=itemgetter(0)), fixed)


def _rules(limits: Sequence[int], has_b_cost: bool, has_pairs: bool) -> Iterator[Rules]:
    in_flights = {
        tuple(max(1, min(limit, int(most - slope * rank))) for rank, limit in enumerate(limits))
        for most in _spread(max(limits))
        for slope in _SLOPES
    }
    for in_flight in sorted(in_flights):
        for deep in (True, False):
            for pairs in (False, True) if has_pairs else (False,):
                if has_b_cost:  # otherwise I followed by W takes the time of B
                    yield Rules(in_flight, split=False, deep=deep, pairs=pairs)
                yield from (Rules(in_flight, True, deep, patience, pairs) for patience in _PATIENCE)


def _spread(most: int) -> list[int]:
    """Return at most `_MOST_LIMITS` numbers up to `most`, evenly spaced.

    >>> _spread(3), _spread(20)
    ([1, 2, 3], [2, 5, 7, 10, 12, 15, 17, 20])
    """
    return sorted({most * k // _MOST_LIMITS for k in range(1, _MOST_LIMITS + 1)} - {0})


def _limits(program: Program, in_flight: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the limit of every rank: as given, but not more than the rank can use."""
    given = [in_flight] * program.num_ranks if in_flight is None or isinstance(in_flight, int) else list(in_flight)
    if len(given) != program.num_ranks or any(limit is not None and limit < 1 for limit in given):
        raise ValueError(f"every one of {program.num_ranks} ranks needs room for 1 activation or more, got {in_flight}")
    usable = Counter(program.placement.values())
    return tuple(usable[rank] if limit is None else min(limit, usable[rank]) for rank, limit in enumerate(given))


def _fits(program: Program, limits: Sequence[int]) -> bool:
    try:
        validate(program, in_flight=limits)
    except InvalidProgram:
        return False
    return True


def _by_placement(programs: Iterable[Program]) -> list[list[Program]]:
    groups: defaultdict[tuple[Route, ...], list[Program]] = defaultdict(list)
    for program in programs:
        groups[tuple(routes(program))].append(program)
    return list(groups.values())


def _fixed(names: Iterable[str] | None, num_ranks: int, num_microbatches: int) -> Iterator[Program]:
    for name in schedules.names(synchronous=True) if names is None else names:
        try:
            yield variant(name).build(num_ranks, num_microbatches)
        except ValueError:
            if names is not None:
                raise
