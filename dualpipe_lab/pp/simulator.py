"""The simulator: the exact time of every action of a program, in one pass over it.

Chapter: book/pp/gpipe.  In: a `Program` (plain or lowered) and a `Cost`.  Out: a `Timeline`.

The timing model, all of it:
  1. A rank runs its steps in order, one at a time, each as soon as the rank is free and the step's input is there.
  2. F of stage s needs the result of F of stage s-1; B and I of stage s need that of B or I of stage s+1.  Stage 0's F,
     the last stage's backward, and every W need nothing but their turn.
  3. A result is there at the end of the step that made it if its next stage is on the same rank.  Otherwise it is a
     message: it leaves when its directed link (source rank to destination rank) is free, occupies the link for
     `transfer` ticks, and is there `latency` ticks later.  Messages on a link keep the order in which they were made.
  4. An overlapped pair starts when both inputs are there and releases both results at its end, forward first.
  5. Sends cost the sender nothing, receives wait just before the step that needs them: so the sends and receives of a
     lowered program do not change any time, and are not drawn as spans.

Time O(actions), memory O(actions).  A feasible program has exactly one solution of these rules, whatever the order in
which the ranks are looked at.
"""

from typing import TypeAlias

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import MESSAGE_KINDS, Action, F, Overlap, Program, Step, W, actions_of
from dualpipe_lab.pp.validator import validate
from dualpipe_lab.timeline import Message, Span, Time, Timeline
from dualpipe_lab.timeline.model import Unit

Input: TypeAlias = tuple[int, bool, int]  # stage that needs it, is it an activation (or a gradient), microbatch


def simulate(program: Program, cost: Cost = UNIT_COST, unit: Unit = "ticks") -> Timeline:
    """Return the timeline of a program; every time is exact.

    `unit` names what the costs count: ticks, or ns to compare with a run on the virtual clock.
    Raises InvalidProgram for a program that is incomplete or would deadlock (see `validate`).

    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> timeline = simulate(gpipe(2, 3))
    >>> timeline.makespan, timeline.bubble_time(0), timeline.peak_activations(0)
    (12, 3, 3)
    """
    validate(program)
    run = _Run(program, cost)
    run.all_ranks()
    return Timeline(program.name, run.spans, run.messages, source="simulated", unit=unit)


class _Run:
    """What is known while the ranks advance: each rank's spans so far, and since when which input is there."""

    def __init__(self, program: Program, cost: Cost) -> None:
        self.cost = cost
        self.ticks = cost.per_stage(program.num_stages)
        self.last_stage = program.num_stages - 1
        self.placement = program.placement
        self.steps = [_work(steps) if program.is_lowered else steps for steps in program.ranks]
        self.spans: list[list[Span]] = [[] for _ in self.steps]
        self.messages: list[Message] = []
        self.arrivals: dict[Input, Time] = {}
        self.waiting: dict[Input, int] = {}  # the rank that waits for it
        self.link_free: dict[tuple[int, int], Time] = {}
        self.runnable = list(range(len(self.steps)))

    def all_ranks(self) -> None:
        while self.runnable:
            self.advance(self.runnable.pop())

    def advance(self, rank: int) -> None:
        """Run one rank until its end or until an input has not been made yet."""
        steps, spans, arrivals = self.steps[rank], self.spans[rank], self.arrivals
        now: Time = spans[-1].end if spans else 0
        for position in range(len(spans), len(steps)):
            step = steps[position]
            actions = actions_of(step)
            start = now
            for action in actions:
                needed = self.needed(action)
                if needed is not None:
                    if needed not in arrivals:
                        self.waiting[needed] = rank
                        return
                    start = max(start, arrivals[needed])
            now = start + self.duration(step)
            spans.append(_span(rank, start, now, step))
            for action in actions:
                if action.kind != W:
                    self.release(action, rank, now)

    def needed(self, action: Action) -> Input | None:
        stage, kind, microbatch = action
        if kind == W or stage == (0 if kind == F else self.last_stage):
            return None
        return stage, kind == F, microbatch

    def duration(self, step: Step) -> Time:
        return self.cost.of_pair(step, self.ticks) if isinstance(step, Overlap) else self.ticks[step.kind][step.stage]

    def release(self, action: Action, rank: int, made: Time) -> None:
        """Hand a result to the next stage: at once on this rank, as a message otherwise."""
        stage, kind, microbatch = action
        is_forward = kind == F
        next_stage = stage + 1 if is_forward else stage - 1
        dst = self.placement.get((next_stage, microbatch))
        if dst is None:  # beyond the first or the last stage
            return
        target = (next_stage, is_forward, microbatch)
        self.arrivals[target] = made if dst == rank else self.send(rank, dst, made, str(action))
        if target in self.waiting:
            self.runnable.append(self.waiting.pop(target))

    def send(self, src: int, dst: int, made: Time, label: str) -> Time:
        """Pass a message over its link and return when it arrives."""
        leaves = max(made, self.link_free.get((src, dst), 0))
        self.link_free[src, dst] = leaves + self.cost.transfer
        arrived = leaves + self.cost.transfer + self.cost.latency
        self.messages.append(Message(src, dst, made, arrived, label, None, leaves if leaves > made else None))
        return arrived


def _work(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(step for step in steps if isinstance(step, Overlap) or step.kind not in MESSAGE_KINDS)


def _span(rank: int, start: Time, end: Time, step: Step) -> Span:
    if isinstance(step, Overlap):
        return Span(rank, start, end, "F&B", step.forward.stage, step.forward.microbatch, str(step), (*step,))
    stage, kind, microbatch = step
    return Span(rank, start, end, kind, stage, microbatch, f"{stage}{kind}{microbatch}")
