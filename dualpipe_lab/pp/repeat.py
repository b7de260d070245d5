"""Several optimizer steps in a row, with or without a barrier between them.

Chapter: book/pp/zero-bubble.  In: the program of one step.  Out: a program of several, its timeline, its time per step.
Without a barrier, each rank updates the weights of its stages after its last backward of a step and before its next F,
so the gradients are those of the synchronous run.  But at that time no rank knows a number that needs all gradients.
Clipping by the global norm, or skipping a step that overflows, needs post-validation: a rank updates with the partial
norm that has reached it, receives the full norm during the next warm-up, and if its update was wrong, undoes it and
updates again.  The copies of a stage on two ranks (DualPipe) wait for the sum of their gradients, which is not part of
the program and not simulated.
Source: Qi et al. 2024 (arXiv 2401.10241), section 4.
"""

from fractions import Fraction
from itertools import count
from typing import TypeAlias

from dualpipe_lab.pp.cost import UNIT_COST, Cost
from dualpipe_lab.pp.program import Action, Overlap, Program, ProgramStep, actions_of, check_counts, parse_action
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Message, Span, Time, Timeline

State: TypeAlias = tuple[Time, ...]  # when every rank, and every link, is free after a step


def repeat(program: Program, num_steps: int) -> Program:
    """Return the program of several steps without a barrier; microbatch i of step k is number k * M + i.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b
    >>> print(repeat(one_f_one_b(2, 1), num_steps=2))
    # 1F1B, 2 steps: 2 ranks, 2 stages, 2 microbatches
    rank 0: 0F0 0B0 0F1 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """
    check_counts("repeat", num_steps=num_steps)
    size = program.num_microbatches
    ranks = [[_later(step, k * size) for k in range(num_steps) for step in steps] for steps in program.ranks]
    name = f"{program.name}, {num_steps} steps"
    return Program(name, ranks, program.num_stages, num_steps * size, program.num_directions)


def simulate_steps(program: Program, num_steps: int, cost: Cost = UNIT_COST, barrier: bool = False) -> Timeline:
    """Return the timeline of several steps; with a barrier, a step starts when all ranks have ended the previous one.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b
    >>> [simulate_steps(one_f_one_b(4, 8), 3, barrier=barrier).makespan for barrier in (False, True)]
    [99, 99]
    """
    if not barrier:
        return simulate(repeat(program, num_steps), cost)
    check_counts("simulate_steps", num_steps=num_steps)
    one, size = simulate(program, cost), program.num_microbatches
    steps = [(k * size, k * one.makespan) for k in range(num_steps)]
    spans = [[_later_span(span, *shift) for shift in steps for span in row] for row in one.spans_by_rank]
    messages = [_later_message(message, *shift) for shift in steps for message in one.messages]
    return Timeline(f"{program.name}, {num_steps} steps with a barrier", spans, messages)


def step_time(program: Program, cost: Cost = UNIT_COST, barrier: bool = False) -> Time:
    """Return the exact time of one more step in a long run.

    With a barrier this is the makespan.  Without a barrier, a rank's idle time before its first and after its last
    action overlaps with other steps; ZB-H2 and ZBV are zero-bubble in this sense only.  Ranks and links settle into a
    pattern that repeats after one or a few steps; the time is the average over the pattern, at least the work of the
    busiest rank.

    >>> from dualpipe_lab.pp.schedules import build
    >>> [step_time(build("zero_bubble_h2", 4, 8), barrier=barrier) for barrier in (False, True)]
    [24, 27]
    """
    if barrier:
        return simulate(program, cost).makespan
    for doublings in count(2):
        states = _states(program, 2**doublings, cost)
        seen: dict[State, int] = {}
        for step, state in enumerate(states):
            pattern = tuple(time - state[0] for time in state)
            if (before := seen.setdefault(pattern, step)) != step:
                time = Fraction(state[0] - states[before][0]) / (step - before)
                return time.numerator if time.denominator == 1 else time
    raise AssertionError("count() does not end")


def _states(program: Program, num_steps: int, cost: Cost) -> list[State]:
    """Return when each rank and each link is free after every step; what comes later depends on nothing else."""
    timeline = simulate(repeat(program, num_steps), cost)
    spans = [[row[(k + 1) * len(row) // num_steps - 1].end for row in timeline.spans_by_rank] for k in range(num_steps)]
    links = sorted({(message.src, message.dst) for message in timeline.messages})
    free: list[dict[tuple[int, int], Time]] = [dict.fromkeys(links, 0) for _ in range(num_steps)]
    for message in timeline.messages:
        (made_by,) = actions_of(parse_action(message.label))
        here = free[made_by.microbatch // program.num_microbatches]
        link = message.src, message.dst
        here[link] = max(here[link], message.arrived - cost.latency)
    return [(*ends, *links_free.values()) for ends, links_free in zip(spans, free, strict=True)]


def _later(step: ProgramStep, shift: int) -> ProgramStep:
    if isinstance(step, Action):
        return _later_action(step, shift)
    return Overlap(_later_action(step.forward, shift), _later_action(step.backward, shift))


def _later_action(action: Action, shift: int) -> Action:
    return action._replace(microbatch=action.microbatch + shift)


def _later_span(span: Span, shift: int, time: Time) -> Span:
    parts = [_later_action(Action(*part), shift) for part in span.actions]
    label = str(Overlap(*parts)) if span.pair else str(parts[0])
    pair = (parts[0], parts[1]) if span.pair else None
    start, end = span.start + time, span.end + time
    return Span(span.rank, start, end, span.kind, span.stage, parts[0].microbatch, label, pair)


def _later_message(message: Message, shift: int, time: Time) -> Message:
    made_by = parse_action(message.label)
    return message._replace(
        sent=message.sent + time,
        arrived=message.arrived + time,
        left=None if message.left is None else message.left + time,
        label=str(_later(made_by, shift)),
    )
