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

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import MESSAGE_KINDS, Action, F, Overlap, Program, Step, W
from dualpipe_lab.pp.validator import validate
from dualpipe_lab.timeline import Message, Span, Time, Timeline
from dualpipe_lab.timeline.model import Unit

_NEW = tuple.__new__  # makes a named tuple in half the time; there are hundreds of thousands


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
    for rank, end in program.feasible_order or ():
        run.advance(rank, end)
    return Timeline(program.name, run.spans, run.messages, source="simulated", unit=unit)


class _Run:
    """What is known while the ranks advance: each rank's spans so far, and when which input is there."""

    def __init__(self, program: Program, cost: Cost) -> None:
        self.cost = cost
        self.ticks = cost.per_stage(program.num_stages)
        self.ranks = program.ranks
        self.spans: list[list[Span]] = [[] for _ in program.ranks]
        self.messages: list[Message] = []
        self.position = [0] * program.num_ranks
        self.link_free: dict[tuple[int, int], Time] = {}
        # For each stage, by microbatch: the rank, when the activation is there, and when the gradient is.
        self.home: list[dict[int, int]] = [{} for _ in range(program.num_stages)]
        self.activation: list[dict[int, Time]] = [{} for _ in range(program.num_stages)]
        self.gradient: list[dict[int, Time]] = [{} for _ in range(program.num_stages)]
        for (stage, microbatch), rank in program.placement.items():
            self.home[stage][microbatch] = rank

    def advance(self, rank: int, end: int) -> None:
        """Run one rank up to a position at which its inputs are known."""
        spans = self.spans[rank]
        now: Time = spans[-1].end if spans else 0
        for step in self.ranks[rank][self.position[rank] : end]:
            actions = (step,) if isinstance(step, Action) else step
            if actions[0].kind in MESSAGE_KINDS:
                continue
            start = now
            for action in actions:
                ready = self.input_time(action)
                if ready > start:
                    start = ready
            now = start + self.duration(step)
            span = _span(rank, start, now, step)
            spans.append(span)
            for action in actions:
                if action.kind != W:
                    self.release(action, rank, now, span.label if action is step else str(action))
        self.position[rank] = end

    def input_time(self, action: Action) -> Time:
        stage, kind, microbatch = action
        if kind == W:
            return 0
        return (self.activation if kind == F else self.gradient)[stage].get(microbatch, 0)

    def duration(self, step: Step) -> Time:
        return self.cost.of_pair(step, self.ticks) if isinstance(step, Overlap) else self.ticks[step.kind][step.stage]

    def release(self, action: Action, rank: int, made: Time, label: str) -> None:
        """Hand a result to the next stage: at once on this rank, as a message otherwise."""
        stage, kind, microbatch = action
        target, inputs = (stage + 1, self.activation) if kind == F else (stage - 1, self.gradient)
        if 0 <= target < len(inputs):
            dst = self.home[target][microbatch]
            inputs[target][microbatch] = made if dst == rank else self.send(rank, dst, made, label)

    def send(self, src: int, dst: int, made: Time, label: str) -> Time:
        """Pass a message over its link and return when it arrives."""
        leaves = max(made, self.link_free.get((src, dst), 0))
        self.link_free[src, dst] = gone = leaves + self.cost.transfer
        arrived = gone + self.cost.latency
        left = leaves if leaves > made else None
        self.messages.append(_NEW(Message, (src, dst, made, arrived, label, None, left)))
        return arrived


def _span(rank: int, start: Time, end: Time, step: Step) -> Span:
    if isinstance(step, Overlap):
        return Span(rank, start, end, "F&B", step.forward.stage, step.forward.microbatch, str(step), (*step,))
    stage, kind, microbatch = step
    return _NEW(Span, (rank, start, end, kind, stage, microbatch, f"{stage}{kind}{microbatch}", None))
