"""Local moves: shift one action of the critical path to another position of its rank, and keep programs not slower.

Chapter: book/pp/explorer.  In: a program, costs, a limit of activations, a seed, a number of moves.  Out: a program.
Only actions on the critical path can shorten the step.  A move puts such an action before a few others of its rank, or
a W, also the W of a B, behind them.  If `Cost.overlap` is given, a move may also make a pair of a forward and a
backward near each other, or two actions of a pair.  Equal times are accepted too, so that the search crosses plateaus.
The best program seen is returned; it is never slower than the given program.
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
from dualpipe_lab.pp.validation.rules import ProblemList, index_actions
from dualpipe_lab.timeline import Span, Time, Timeline

_FARTHEST = 6  # the most positions by which an action moves
_SPLIT = 0.5  # how often a B is split and its W delayed
_JOIN = 0.25  # how often an F, a B or an I becomes half of a pair, or a pair its two actions


@dataclass(frozen=True)
class _Timed:
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
    """Return the program after one random move; None if the move breaks an order or the limit of memory."""
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
    """Replace a pair by its backward, then its forward."""
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


def _simulated(program: Program, cost: Cost) -> Timeline | None:
    """Return the timeline; None if ranks wait for each other."""
    run = UntimedRun(program, index_actions(program, ProblemList()))
    if any(run.position(rank) < len(steps) for rank, steps in enumerate(program.ranks)):
        return None
    program.feasible_order = run.order  # a shifted action leaves a complete program complete
    return simulate(program, cost)
