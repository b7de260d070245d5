"""A list scheduler: a free rank starts the most urgent action that is ready and keeps to the memory limit.

Chapter: book/pp/explorer.  In: the placement of a program, costs, rules.  Out: a program, or None if it got stuck.
  urgency   a pair (where pairs gain), then a backward, then a forward, then a W
  memory    a forward starts only if the rank holds fewer activations than `in_flight`.  One activation is reserved for
            each later stage of the rank, so that the foremost microbatch can always advance
  W         fills gaps; with patience a rank delays W if a more urgent action becomes ready before W would end
Time O(actions * log(actions)) for a bounded number of ready actions.  The timing model is that of
`dualpipe_lab.pp.simulator`, which gives the programs the same times.
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
    """The rules by which a free rank chooses its next action.

    `in_flight`: the most activations that each rank holds.  `split`: run I and W, not B.  `deep`: of the ready actions
    start that of the latest stage, not of the earliest microbatch.  `patience`: the longest delay of a W, as a share of
    its time.  `pairs`: overlap F and B.
    """

    in_flight: tuple[int, ...]
    split: bool = True
    deep: bool = True
    patience: Fraction = Fraction(0)
    pairs: bool = False


def greedy(program: Program, cost: Cost, rules: Rules) -> Program | None:
    """Return a program with the same placement of stages, in the order of the rules; None if the ranks get stuck.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b
    >>> print(greedy(one_f_one_b(2, 3), Cost(), Rules(in_flight=(2, 1))))
    # Searched, stages as in 1F1B: 2 ranks, 2 stages, 3 microbatches
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2
    """
    run = _ListScheduling(program, cost, rules)
    run.run_events()
    if sum(len(state.steps) for state in run.ranks) < run.num_steps():
        return None
    return searched(program, [state.steps for state in run.ranks])


def searched(program: Program, ranks: Sequence[Sequence[ProgramStep]]) -> Program:
    """Return a program with another order of the same stages, named "Searched, stages as in ..."."""
    prefix = "Searched, stages as in "
    name = prefix + program.name.removeprefix(prefix)
    return Program(name, ranks, program.num_stages, program.num_microbatches, program.num_directions)


class _RankState:
    """One rank: its ready actions, the announced ones, the number of held activations, and the steps so far."""

    def __init__(self, rank: int, stages: Sequence[int]) -> None:
        self.rank = rank
        self.later = {stage: sum(other > stage for other in stages) for stage in stages}
        backwards: list[Cell] = []
        self.ready: dict[str, list[Cell]] = {F: [], B: backwards, I: backwards, W: []}
        self.announced: list[tuple[Time, str, Cell]] = []
        self.steps: list[ProgramStep] = []
        self.held = 0
        self.is_free = True


class _ListScheduling:
    def __init__(self, program: Program, cost: Cost, rules: Rules) -> None:
        self.program, self.cost, self.rules = program, cost, rules
        self.ticks = cost.per_stage(program.num_stages)
        self.home = program.placement
        stages: list[set[int]] = [set() for _ in program.ranks]
        for (stage, _), rank in self.home.items():
            stages[rank].add(stage)
        self.ranks = [_RankState(rank, sorted(placed)) for rank, placed in enumerate(stages)]
        self.link_free: dict[tuple[int, int], Time] = {}
        self.events: list[tuple[Time, int, str, Cell]] = []
        self.number = count()  # events of one time in the order in which they were made
        self.num_pairs = 0
        for microbatch in range(program.num_microbatches):
            self.announce(0, F, (0, microbatch))

    def num_steps(self) -> int:
        return len(self.home) * (3 if self.rules.split else 2) - self.num_pairs * (1 if not self.rules.split else 2)

    def announce(self, when: Time, kind: str, cell: Cell) -> None:
        """Add the event that the input of an action arrives."""
        heapq.heappush(self.events, (when, next(self.number), kind, cell))
        self.ranks[self.home[cell]].announced.append((when, kind, cell))

    def run_events(self) -> None:
        """Process all events in order of time: all arrivals of one time first, then every free rank chooses."""
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, kind, cell = heapq.heappop(self.events)
                if kind == _FREE:
                    self.ranks[cell[0]].is_free = True
                    continue
                state = self.ranks[self.home[cell]]
                state.announced.remove((now, kind, cell))
                state.ready[kind].append(cell)
            for state in self.ranks:
                if state.is_free:
                    self.choose(state, now)

    def may_start_forward(self, state: _RankState, stage: int) -> bool:
        return state.held + state.later[stage] < self.rules.in_flight[state.rank]

    def choose(self, state: _RankState, now: Time) -> None:
        allowed = [cell for cell in state.ready[F] if self.may_start_forward(state, cell[0])]
        forward = min(allowed, key=self._forward_key, default=None)
        backward = min(state.ready[B], key=self._backward_key, default=None)
        if forward and backward and self.rules.pairs:
            self.num_pairs += 1
            self.start(state, now, Overlap(_action(F, forward), _action(B, backward)))
        elif backward:
            self.start(state, now, _action(I if self.rules.split else B, backward))
        elif forward:
            self.start(state, now, _action(F, forward))
        elif state.ready[W] and not self.is_worth_waiting(state, now):
            self.start(state, now, _action(W, state.ready[W][0]))

    def is_worth_waiting(self, state: _RankState, now: Time) -> bool:
        """Whether a more urgent action than W becomes ready within the rank's patience."""
        until = now + self.rules.patience * self.ticks[W][state.ready[W][0][0]]
        return any(
            when < until and (kind != F or self.may_start_forward(state, cell[0]))
            for when, kind, cell in state.announced
        )

    def start(self, state: _RankState, now: Time, step: ProgramStep) -> None:
        """Start a step: append it to the rank's list, and add the events of its end and its results."""
        actions = (step,) if isinstance(step, Action) else step
        ticks = self.ticks[step.kind][step.stage] if isinstance(step, Action) else self.cost.of_pair(step, self.ticks)
        state.steps.append(step)
        state.is_free = False
        heapq.heappush(self.events, (now + ticks, next(self.number), _FREE, (state.rank, 0)))
        for stage, kind, microbatch in actions:
            state.ready[kind].remove((stage, microbatch))
            state.held += (kind == F) - (kind in (B, W))
            if kind == I:
                state.ready[W].append((stage, microbatch))
            self.release(state.rank, now + ticks, stage, kind, microbatch)

    def release(self, rank: int, made: Time, stage: int, kind: str, microbatch: int) -> None:
        if kind == W or (kind != F and stage == 0):
            return
        is_last = kind == F and stage == self.program.num_stages - 1
        target = (stage if is_last else stage + 1 if kind == F else stage - 1), microbatch
        arrived = made
        if self.home[target] != rank:
            link = rank, self.home[target]
            self.link_free[link] = gone = max(self.link_free.get(link, 0), made) + self.cost.transfer
            arrived = gone + self.cost.latency
        self.announce(arrived, F if kind == F and not is_last else B, target)

    def _forward_key(self, cell: Cell) -> tuple[int, int]:
        stage, microbatch = cell
        return (-stage, microbatch) if self.rules.deep else (microbatch, -stage)

    def _backward_key(self, cell: Cell) -> tuple[int, int]:
        stage, microbatch = cell
        return (stage, microbatch) if self.rules.deep else (microbatch, -stage)


def _action(kind: str, cell: Cell) -> Action:
    return Action(cell[0], kind, cell[1])
