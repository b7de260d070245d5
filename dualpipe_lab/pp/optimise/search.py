"""The search: the best fixed schedule, then other orders of its stages, under one limit of memory.

Chapter: book/pp/explorer.  In: sizes or a program, costs, a limit of memory, a seed.  Out: an `Optimum`.
  1. every fixed schedule that keeps to the limit
  2. a list scheduler with many rules (`greedy`) on every placement of stages that a fixed schedule has
  3. local moves on the best of both: an action of the critical path (no other can shorten the step) moves a few places
     forward on its rank, or a W, also the W of a B, back.  If `Cost.overlap` is given, a forward and a backward near
     each other may become a pair, or a pair two actions.  Equal times are accepted, so that the search crosses plateaus
A placement whose lower bound is no better than the best known makespan is skipped.  The result is never slower than the
best fixed schedule under the same limit, and equal for equal arguments.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from random import Random
from typing import TypeAlias

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.lowering import strip
from dualpipe_lab.pp.optimise.bounds import Bound, lower_bound
from dualpipe_lab.pp.optimise.greedy import Rules, greedy, searched
from dualpipe_lab.pp.program import WORK_KINDS, Action, B, F, I, Overlap, Program, ProgramStep, W, actions_of
from dualpipe_lab.pp.ranking import score, share, stage_cost
from dualpipe_lab.pp.schedules.variants import variant
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.deadlock import UntimedRun
from dualpipe_lab.pp.validation.rules import InvalidProgram, ProblemList, Route, index_actions, routes
from dualpipe_lab.pp.validation.validator import validate
from dualpipe_lab.timeline import Span, Time, Timeline
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
        return min(((simulate(one, self.cost).makespan, one) for one in programs), key=itemgetter(0), default=None)

    def search(self, seed: int, num_moves: int) -> Timed | None:
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


# Local moves

_FARTHEST = 6  # the most positions by which an action moves
_SPLIT = 0.5  # how often a B is split and its W delayed
_JOIN = 0.25  # how often an F, a B or an I becomes half of a pair, or a pair its two actions


@dataclass(frozen=True)
class _Timed:
    program: Program
    timeline: Timeline

    @cached_property
    def path(self) -> list[Span]:
        return self.timeline.critical_path()

    @property
    def length(self) -> tuple[Time, Time]:
        """The makespan, and the sum of all ranks' ends, which tells equal makespans apart."""
        ends = [self.timeline.window(rank)[1] for rank in range(self.timeline.num_ranks)]
        return self.timeline.makespan, sum(ends)


def improve(program: Program, cost: Cost, in_flight: Sequence[int], seed: int, num_moves: int) -> Program:
    """Return the best program found in `num_moves` random moves; the same seed gives the same program.

    The given program is valid and holds at most `in_flight` activations per rank; so does the returned program.
    """
    random = Random(seed)  # noqa: S311 - a search, no secret
    current = best = _Timed(program, simulate(program, cost))
    for _ in range(num_moves):
        moved = _moved(current, random, in_flight, has_pairs=cost.overlap is not None)
        timeline = None if moved is None else _simulated(moved, cost)
        if moved is None or timeline is None:
            continue
        found = _Timed(moved, timeline)
        if found.timeline.makespan <= current.timeline.makespan:
            current = found
        if found.length < best.length:
            best = found
    return best.program


def _moved(current: _Timed, random: Random, in_flight: Sequence[int], has_pairs: bool) -> Program | None:
    span = current.path[int(random.random() * len(current.path))]
    position = _position(current.timeline.spans_by_rank[span.rank], span)
    distance = 1 + int(random.random() * _FARTHEST)
    steps = list(current.program.ranks[span.rank])
    if has_pairs and random.random() < _JOIN:
        changed = _pair_split(steps, position) if span.pair else _pair_made(steps, position, distance)
    else:
        changed = _shifted(steps, position, distance, split=span.kind == B and random.random() < _SPLIT)
    if changed is None or not _keeps_order(changed) or _most_held(changed) > in_flight[span.rank]:
        return None
    ranks = [*current.program.ranks]
    ranks[span.rank] = tuple(changed)
    return searched(current.program, ranks)


def _shifted(steps: list[ProgramStep], position: int, distance: int, split: bool) -> list[ProgramStep] | None:
    """Move a step to an earlier position, or a W, also the W that `split` makes of a B, to a later one."""
    if split:
        stage, _, microbatch = actions_of(steps[position])[0]
        steps[position : position + 1] = [Action(stage, I, microbatch), Action(stage, W, microbatch)]
        position += 1
    target = position + distance if actions_of(steps[position])[0].kind == W else position - distance
    if not 0 <= target < len(steps):
        return None
    steps.insert(target, steps.pop(position))
    return steps


def _pair_split(steps: list[ProgramStep], position: int) -> list[ProgramStep]:
    steps[position : position + 1] = actions_of(steps[position])[::-1]
    return steps


def _pair_made(steps: list[ProgramStep], position: int, distance: int) -> list[ProgramStep] | None:
    """Make a pair of a step and the nearest partner within a distance on either side; the W of an I is dropped."""
    one = steps[position]
    near = range(max(0, position - distance), min(len(steps), position + distance + 1))
    for other in (steps[at] for at in sorted(near, key=lambda at: abs(at - position))):
        if isinstance(one, Overlap) or isinstance(other, Overlap):
            continue
        forward, backward = (one, other) if one.kind == F else (other, one)
        cell = backward.stage, backward.microbatch
        if forward.kind == F and backward.kind in (B, I) and cell != (forward.stage, forward.microbatch):
            pair = Overlap(forward, Action(cell[0], B, cell[1]))
            gone = {forward, backward, Action(cell[0], W, cell[1])}
            return [pair if step is one else step for step in steps if step is one or step not in gone]
    return None


def _position(spans: Sequence[Span], wanted: Span) -> int:
    return next(position for position, span in enumerate(spans) if span is wanted)


def _keeps_order(steps: Sequence[ProgramStep]) -> bool:
    last: dict[tuple[int, int], int] = {}
    for step in steps:
        for stage, kind, microbatch in actions_of(step):
            order = WORK_KINDS.index(kind)
            if last.get((stage, microbatch), -1) > order:
                return False
            last[stage, microbatch] = order
    return True


def _most_held(steps: Sequence[ProgramStep]) -> int:
    held = most = 0
    for step in steps:
        kinds = [action.kind for action in actions_of(step)]
        held += kinds.count(F)
        most = max(most, held)
        held -= kinds.count(B) + kinds.count(W)
    return most


def _simulated(program: Program, cost: Cost) -> Timeline | None:
    run = UntimedRun(program, index_actions(program, ProblemList()))
    if any(run.position(rank) < len(steps) for rank, steps in enumerate(program.ranks)):
        return None
    program.feasible_order = run.order  # a shifted action leaves a complete program complete
    return simulate(program, cost)
