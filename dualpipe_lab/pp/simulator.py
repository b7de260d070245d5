"""`simulate`: computes the exact time of every action of a program, in one pass over it.

Chapter: book/pp/gpipe.  In: a `Program` (plain or lowered) and a `Cost`.  Out: a `Timeline`.
The timing model:
  1. A rank runs its steps in order, one at a time, each as soon as the rank is free and the step's input has arrived.
  2. F of stage s needs the result of F of stage s-1; B and I of stage s need that of B or I of stage s+1.
  3. A result for a stage on the same rank arrives at the end of the step that made it; all others are messages.
  4. An overlapped pair starts when both inputs have arrived and releases both results at its end, forward first.
  5. A send takes no time of the sender; a rank waits for a message just before the step that needs it.
A feasible program has exactly one solution of these rules, in whatever order the ranks are advanced.
"""

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import Action, B, F, I, Overlap, Program, W
from dualpipe_lab.pp.validation.validator import validate
from dualpipe_lab.timeline import WORK, Message, Span, Time, Timeline
from dualpipe_lab.timeline.data import Unit

_TOWARDS = {F: 1, B: -1, I: -1, W: 0}  # from the stage that makes a result to the stage that needs it
_NEW = tuple.__new__  # makes a named tuple in half the time; there are hundreds of thousands


def simulate(program: Program, cost: Cost = UNIT_COST, unit: Unit = "ticks") -> Timeline:
    """Return the timeline of a program; every time is exact.  Time and memory O(actions).

    `unit` is the unit of the costs: ticks, or ns to compare with a run on the virtual clock.
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
    costs = cost.to_dict(program.num_stages)
    return Timeline(program.name, run.spans, run.messages, source="simulated", unit=unit, costs=costs)


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
        # For each stage, by microbatch: its rank, and when its activation, its gradient is there (W waits for neither).
        self.home: list[dict[int, int]] = [{} for _ in range(program.num_stages)]
        activations, gradients, nothing = ([dict[int, Time]() for _ in self.home] for _ in range(3))
        self.inputs = {F: activations, B: gradients, I: gradients, W: nothing}
        for (stage, microbatch), rank in program.placement.items():
            self.home[stage][microbatch] = rank

    def advance(self, rank: int, end: int) -> None:
        spans = self.spans[rank]
        now: Time = spans[-1].end if spans else 0
        for step in self.ranks[rank][self.position[rank] : end]:
            if isinstance(step, Overlap):
                span = self.pair(step, rank, now)
            elif step.kind in self.ticks:
                stage, kind, microbatch = step
                ready = self.inputs[kind][stage].get(microbatch, 0)
                start = ready if ready > now else now
                done = start + self.ticks[kind][stage]
                label = f"{stage}{kind}{microbatch}"
                span = _NEW(Span, (rank, start, done, kind, stage, microbatch, label, None, WORK))
                self.release(step, rank, done, span.label)
            else:  # a send or a receive: it takes no time, and its message is known already
                continue
            spans.append(span)
            now = span.end
        self.position[rank] = end

    def pair(self, step: Overlap, rank: int, now: Time) -> Span:
        ready = [self.inputs[kind][stage].get(microbatch, 0) for stage, kind, microbatch in step]
        start = max(now, *ready)
        done = start + self.cost.of_pair(step, self.ticks)
        for action in step:
            self.release(action, rank, done, str(action))
        forward, backward = step
        return Span(rank, start, done, "F&B", forward.stage, forward.microbatch, str(step), (forward, backward))

    def release(self, action: Action, rank: int, made: Time, label: str) -> None:
        """Hand a result to the next stage: at once on this rank, as a message otherwise.

        A message leaves when its directed link (source rank to destination rank) is free, occupies the link for
        `transfer` ticks, and arrives `latency` ticks later.  Messages on a link keep the order in which they were made.
        """
        stage, kind, microbatch = action
        target = stage + _TOWARDS[kind]
        if target == stage or not 0 <= target < len(self.home):
            return
        src_dst = rank, self.home[target][microbatch]
        arrived = made
        if src_dst[0] != src_dst[1]:
            free = self.link_free.get(src_dst, 0)
            leaves = free if free > made else made
            self.link_free[src_dst] = gone = leaves + self.cost.transfer
            arrived = gone + self.cost.latency
            left = leaves if leaves > made else None
            self.messages.append(_NEW(Message, (*src_dst, made, arrived, label, None, left)))
        self.inputs[kind][target][microbatch] = arrived
