"""Local moves: shift one action of the critical path to another place of its rank, and keep what is not worse.

Chapter: book/pp/explorer.  In: a program, costs, room for activations, a seed, a number of moves.  Out: a program.
Only actions on the critical path can shorten the step: one of them goes before a few others of its rank, or a W that
stands in the way, also that of a B, goes behind them.  Where pairs have a cost of their own, a forward and a backward
near each other become a pair, and a pair becomes its two actions.  Equal times are accepted too, so that the search
walks over plateaus; the best program seen is returned, and it is never worse than the one given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.optimise.greedy import searched
from dualpipe_lab.pp.program import WORK_KINDS, Action, B, F, I, Overlap, Program, ProgramStep, W, actions_of
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.deadlock import UntimedRun
from dualpipe_lab.pp.validation.errors import ProblemList
from dualpipe_lab.pp.validation.index import index_actions
from dualpipe_lab.timeline import Span, Time, Timeline

_FARTHEST = 6  # places that an action moves at once
_SPLIT = 0.5  # how often a B is split and its W put off
_JOIN = 0.25  # how often an F, a B or an I becomes half of a pair, or a pair its two actions


@dataclass(frozen=True)
class _Found:
    program: Program
    timeline: Timeline

    @cached_property
    def path(self) -> list[Span]:
        """The critical path."""
        return self.timeline.critical_path()

    @property
    def length(self) -> tuple[Time, Time]:
        """The makespan, and the sum of all ranks' ends, which tells equal makespans apart."""
        ends = [self.timeline.window(rank)[1] for rank in range(self.timeline.num_ranks)]
        return self.timeline.makespan, sum(ends)


def improve(program: Program, cost: Cost, in_flight: Sequence[int], seed: int, num_moves: int) -> Program:
    """Return the best program found in `num_moves` random moves; the same seed gives the same program.

    The program given is valid and holds no more than `in_flight` activations per rank; so does the one returned.
    """
    random = Random(seed)  # noqa: S311 - a search, no secret
    here = best = _Found(program, simulate(program, cost))
    for _ in range(num_moves):
        moved = _moved(here, random, in_flight, has_pairs=cost.overlap is not None)
        timeline = None if moved is None else _timed(moved, cost)
        if moved is None or timeline is None:
            continue
        found = _Found(moved, timeline)
        if found.timeline.makespan <= here.timeline.makespan:
            here = found
        if found.length < best.length:
            best = found
    return best.program


def _moved(here: _Found, random: Random, in_flight: Sequence[int], has_pairs: bool) -> Program | None:
    """Return the program after one random move; None if the move breaks an order or the limit of memory."""
    span = here.path[int(random.random() * len(here.path))]
    place = _place(here.timeline.spans_by_rank[span.rank], span)
    distance = 1 + int(random.random() * _FARTHEST)
    steps = list(here.program.ranks[span.rank])
    if has_pairs and random.random() < _JOIN:
        changed = _apart(steps, place) if span.pair else _joined(steps, place, distance)
    else:
        changed = _shifted(steps, place, distance, split=span.kind == B and random.random() < _SPLIT)
    if changed is None or not _keeps_order(changed) or _most_held(changed) > in_flight[span.rank]:
        return None
    ranks = [*here.program.ranks]
    ranks[span.rank] = tuple(changed)
    return searched(here.program, ranks)


def _shifted(steps: list[ProgramStep], place: int, distance: int, split: bool) -> list[ProgramStep] | None:
    """Move a step forward in time, or a W, also the one that `split` makes of a B, back."""
    if split:
        stage, _, microbatch = actions_of(steps[place])[0]
        steps[place : place + 1] = [Action(stage, I, microbatch), Action(stage, W, microbatch)]
        place += 1
    target = place + distance if actions_of(steps[place])[0].kind == W else place - distance
    if not 0 <= target < len(steps):
        return None
    steps.insert(target, steps.pop(place))
    return steps


def _apart(steps: list[ProgramStep], place: int) -> list[ProgramStep]:
    """Run a pair's backward, then its forward."""
    steps[place : place + 1] = actions_of(steps[place])[::-1]
    return steps


def _joined(steps: list[ProgramStep], place: int, distance: int) -> list[ProgramStep] | None:
    """Make a pair of a step and the nearest partner within a distance on either side; an I takes its W along."""
    one = steps[place]
    near = range(max(0, place - distance), min(len(steps), place + distance + 1))
    for other in (steps[at] for at in sorted(near, key=lambda at: abs(at - place))):
        if isinstance(one, Overlap) or isinstance(other, Overlap):
            continue
        forward, backward = (one, other) if one.kind == F else (other, one)
        cell = backward.stage, backward.microbatch
        if forward.kind == F and backward.kind in (B, I) and cell != (forward.stage, forward.microbatch):
            pair = Overlap(forward, Action(cell[0], B, cell[1]))
            gone = {forward, backward, Action(cell[0], W, cell[1])}
            return [pair if step is one else step for step in steps if step is one or step not in gone]
    return None


def _place(spans: Sequence[Span], wanted: Span) -> int:
    return next(place for place, span in enumerate(spans) if span is wanted)


def _keeps_order(steps: Sequence[ProgramStep]) -> bool:
    """Whether the actions of each stage and microbatch still stand in the order F, B or F, I, W."""
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


def _timed(program: Program, cost: Cost) -> Timeline | None:
    """Return the timeline; None if ranks wait for each other."""
    run = UntimedRun(program, index_actions(program, ProblemList()))
    if any(run.position(rank) < len(steps) for rank, steps in enumerate(program.ranks)):
        return None
    program.feasible_order = run.order  # a shifted action leaves a complete program complete
    return simulate(program, cost)
