"""A list scheduler: whenever a rank is free, it takes the most urgent action that is ready and has room.

Chapter: book/pp/explorer.  In: the placement of a program, costs, rules.  Out: a program, or None if it got stuck.
  urgency   a pair (where pairs gain), then a backward, then a forward, then a W
  room      a forward starts only if the rank holds fewer activations than the rules allow.  One place is kept for each
            later stage of the rank, so that the microbatch that is farthest can always go on
  W         fills gaps; with patience a rank leaves it alone if something more urgent arrives before it would end
Time O(actions * log(actions)) for a bounded number of ready actions.  It follows the timing model of
`dualpipe_lab.pp.simulator`, which gives its programs the same times.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from itertools import count
from typing import NamedTuple

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Action, B, Cell, F, I, Overlap, Program, ProgramStep, W
from dualpipe_lab.timeline import Time

_FREE = "free"


class Rules(NamedTuple):
    """How the ranks choose.

    `room`: the most activations that each rank holds.  `split`: run I and W, not B.  `deep`: of the ready actions take
    that of the latest stage, not of the earliest microbatch.  `patience`: as a share of a W.  `pairs`: overlap F and B.
    """

    room: tuple[int, ...]
    split: bool = True
    deep: bool = True
    patience: Fraction = Fraction(0)
    pairs: bool = False


def greedy(program: Program, cost: Cost, rules: Rules) -> Program | None:
    """Return a program with the stages where they are, in the order in which the ranks choose; None if they get stuck.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b
    >>> print(greedy(one_f_one_b(2, 3), Cost(), Rules(room=(2, 1))))
    # Searched, stages as in 1F1B: 2 ranks, 2 stages, 3 microbatches
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2
    """
    run = _Run(program, cost, rules)
    run.until_nothing_happens()
    if sum(len(desk.steps) for desk in run.desks) < run.num_steps():
        return None
    return searched(program, [desk.steps for desk in run.desks])


def searched(program: Program, ranks: Sequence[Sequence[ProgramStep]]) -> Program:
    """Return another order of a program's stages; its name says that it is one."""
    prefix = "Searched, stages as in "
    name = prefix + program.name.removeprefix(prefix)
    return Program(name, ranks, program.num_stages, program.num_microbatches, program.num_directions)


class _Desk:
    """One rank: what is ready for it, what it knows to be on its way, what it holds and what it did."""

    def __init__(self, rank: int, stages: Sequence[int]) -> None:
        self.rank = rank
        self.later = {stage: sum(other > stage for other in stages) for stage in stages}
        self.forwards: list[Cell] = []
        self.backwards: list[Cell] = []
        self.weights: list[Cell] = []
        self.due: list[tuple[Time, str, Cell]] = []
        self.steps: list[ProgramStep] = []
        self.held = 0
        self.is_free = True

    def ready(self, kind: str) -> list[Cell]:
        """Return the list of what is ready of a kind."""
        return self.forwards if kind == F else self.weights if kind == W else self.backwards


class _Run:
    def __init__(self, program: Program, cost: Cost, rules: Rules) -> None:
        self.program, self.cost, self.rules = program, cost, rules
        self.ticks = cost.per_stage(program.num_stages)
        self.home = program.placement
        stages: list[set[int]] = [set() for _ in program.ranks]
        for (stage, _), rank in self.home.items():
            stages[rank].add(stage)
        self.desks = [_Desk(rank, sorted(own)) for rank, own in enumerate(stages)]
        self.link_free: dict[tuple[int, int], Time] = {}
        self.events: list[tuple[Time, int, str, Cell]] = []
        self.number = count()  # events of one time in the order in which they were made
        self.num_pairs = 0
        for microbatch in range(program.num_microbatches):
            self.expect(0, F, (0, microbatch))

    def num_steps(self) -> int:
        """Return how many steps a complete program has."""
        return len(self.home) * (3 if self.rules.split else 2) - self.num_pairs * (1 if not self.rules.split else 2)

    def expect(self, when: Time, kind: str, cell: Cell) -> None:
        """Announce that the input of an action will be there."""
        heapq.heappush(self.events, (when, next(self.number), kind, cell))
        self.desks[self.home[cell]].due.append((when, kind, cell))

    def until_nothing_happens(self) -> None:
        """Go from event to event: first everything that arrives at a time, then every free rank chooses."""
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, kind, cell = heapq.heappop(self.events)
                if kind == _FREE:
                    self.desks[cell[0]].is_free = True
                    continue
                desk = self.desks[self.home[cell]]
                desk.due.remove((now, kind, cell))
                desk.ready(kind).append(cell)
            for desk in self.desks:
                if desk.is_free:
                    self.choose(desk, now)

    def has_room(self, desk: _Desk, stage: int) -> bool:
        """Whether a forward of a stage may start."""
        return desk.held + desk.later[stage] < self.rules.room[desk.rank]

    def choose(self, desk: _Desk, now: Time) -> None:
        """Let a free rank start the most urgent step, if there is one."""
        roomy = [cell for cell in desk.forwards if self.has_room(desk, cell[0])]
        forward = min(roomy, key=self._forward_key, default=None)
        backward = min(desk.backwards, key=self._backward_key, default=None)
        if forward and backward and self.rules.pairs:
            self.num_pairs += 1
            self.start(desk, now, Overlap(_action(F, forward), _action(B, backward)))
        elif backward:
            self.start(desk, now, _action(I if self.rules.split else B, backward))
        elif forward:
            self.start(desk, now, _action(F, forward))
        elif desk.weights and not self.is_worth_waiting(desk, now):
            self.start(desk, now, _action(W, desk.weights[0]))

    def is_worth_waiting(self, desk: _Desk, now: Time) -> bool:
        """Whether something more urgent than a W arrives within the rank's patience."""
        until = now + self.rules.patience * self.ticks[W][desk.weights[0][0]]
        return any(when < until and (kind != F or self.has_room(desk, cell[0])) for when, kind, cell in desk.due)

    def start(self, desk: _Desk, now: Time, step: ProgramStep) -> None:
        """Start a step: note it, and announce its end and its results."""
        actions = (step,) if isinstance(step, Action) else step
        ticks = self.ticks[step.kind][step.stage] if isinstance(step, Action) else self.cost.of_pair(step, self.ticks)
        desk.steps.append(step)
        desk.is_free = False
        heapq.heappush(self.events, (now + ticks, next(self.number), _FREE, (desk.rank, 0)))
        for stage, kind, microbatch in actions:
            desk.ready(kind).remove((stage, microbatch))
            desk.held += (kind == F) - (kind in (B, W))
            if kind == I:
                desk.weights.append((stage, microbatch))
            self.release(desk.rank, now + ticks, stage, kind, microbatch)

    def release(self, rank: int, made: Time, stage: int, kind: str, microbatch: int) -> None:
        """Announce what an action's result makes ready."""
        if kind == W or (kind != F and stage == 0):
            return
        is_last = kind == F and stage == self.program.num_stages - 1
        target = (stage if is_last else stage + 1 if kind == F else stage - 1), microbatch
        arrived = made
        if self.home[target] != rank:
            link = rank, self.home[target]
            self.link_free[link] = gone = max(self.link_free.get(link, 0), made) + self.cost.transfer
            arrived = gone + self.cost.latency
        self.expect(arrived, F if kind == F and not is_last else B, target)

    def _forward_key(self, cell: Cell) -> tuple[int, int]:
        stage, microbatch = cell
        return (-stage, microbatch) if self.rules.deep else (microbatch, -stage)

    def _backward_key(self, cell: Cell) -> tuple[int, int]:
        stage, microbatch = cell
        return (stage, microbatch) if self.rules.deep else (microbatch, -stage)


def _action(kind: str, cell: Cell) -> Action:
    return Action(cell[0], kind, cell[1])
