"""`RankPlan`: what one rank does in a step, in order, found once for all steps.

Chapter: book/pp/pp-basic.  In: a lowered program, a rank.  Out: a `RankPlan`.
Elsewhere: torch posts all receives of a step where its lowered order has them, and keeps a buffer for each microbatch;
here a stream has `lookahead`, or what the schedule itself lets pile up before its use.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from dualpipe_lab.pp.program import (
    MESSAGE_KINDS,
    RECV_B,
    RECV_F,
    SEND_F,
    Action,
    B,
    F,
    I,
    Overlap,
    Program,
    ProgramStep,
    W,
    actions_of,
)
from dualpipe_lab.pp.runtime.stage import SpanTitle, span_title

_MADE_BY = {RECV_F: -1, RECV_B: 1}  # from the stage that receives to the stage that made the result


class PlannedAction(NamedTuple):
    """One action of a rank, with what no step changes.

    Results are named by the F or B that makes them; B stands for B and I.

    Attributes:
        action: F, B, I or W.
        label: its text, `0F3`.
        takes: the result of a neighbouring stage that the action waits for; None where it needs none.
        makes: the result that a neighbouring stage waits for; None where none does.
        is_last_stage: whether its stage computes the loss.
        is_full_backward: whether it does the work of I and W together, or is the W whose work is then done.  No rank
            waits for the result of an I of the first stage, so where W directly follows, I may be B: one walk of
            autograd.  A subclass of `Stage` keeps them apart.
        ends_stage: whether its microbatch is the last one whose backward the stage runs.
    """

    action: Action
    label: str
    takes: Action | None
    makes: Action | None
    is_last_stage: bool
    is_full_backward: bool
    ends_stage: bool


class PlannedStep(NamedTuple):
    """One step of a rank: work, or a message.

    Attributes:
        step: an action, a pair or a message, as the program has it.
        title: kind, stage, microbatch, label and pair of its span, as the simulator writes them.
        work: its action, or both of a pair; empty for a message.
        message: its send or receive; None for work.
        prefetched: the receives that may be launched before it.
    """

    step: ProgramStep
    title: SpanTitle
    work: tuple[PlannedAction, ...]
    message: Action | None
    prefetched: tuple[Action, ...]


RankPlan: TypeAlias = tuple[PlannedStep, ...]


def choose_lookahead(asked: int | None, in_order: bool) -> int:
    """Return the number of prefetched receives per stream: as asked, or by default 2 with tags and 0 in order.

    In order, a rank of 1F1B that launched its receives first would wait for a gradient whose activation it has not
    sent, while the other rank waits for this activation behind its own receives.

    >>> choose_lookahead(None, in_order=False), choose_lookahead(None, in_order=True)
    (2, 0)
    """
    if in_order and asked:
        raise ValueError(
            f"NCCL has no tags and completes the messages between two ranks in the order of their launch, so a receive "
            f"launched ahead of its turn would block those before it, got lookahead={asked}; use lookahead=0 or None"
        )
    return (0 if in_order else 2) if asked is None else asked


def plan_rank(
    lowered: Program, rank: int, lookahead: int, forward_only: bool = False, in_turn: bool = False
) -> RankPlan:
    """Plan one rank's step.

    Args:
        lowered: a program with its messages.
        rank: its rank.
        lookahead: the receives of a stream, which is one source rank and one direction of travel, that may travel
            while the rank works.  A receive is launched at latest where the program has the RECV.  All ranks follow one
            common order there, so the step ends even if a send blocks until its receive is launched.
        forward_only: plan the forwards and their messages alone.
        in_turn: run the actions of a pair one after the other, and send the forward's result between them.

    >>> from dualpipe_lab.pp.lowering import lower
    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> for planned in plan_rank(lower(gpipe(2, 2)), 1, lookahead=1)[:4]:
    ...     print(planned.title[3], *planned.prefetched)
    1RECV_F0 1RECV_F0
    1F0
    1RECV_F1 1RECV_F1
    1F1
    """
    steps = lowered.ranks[rank]
    if forward_only:
        steps = tuple(_forwards(steps))
    full_backwards = frozenset(_full_backwards(steps))
    if in_turn:
        steps = tuple(_in_turn(steps))
    ends = {action.stage: action for step in steps for action in actions_of(step) if action.kind in (B, W)}
    prefetched = _prefetched_receives(lowered, steps, lookahead) if lookahead else {}
    last = lowered.num_stages - 1

    def planned(action: Action) -> PlannedAction:
        index, kind, microbatch = action
        takes = makes = None
        if kind == F:
            takes = Action(index - 1, F, microbatch) if index else None
            makes = action if index < last else None
        elif kind != W:
            takes = Action(index + 1, B, microbatch) if index < last else None
            makes = Action(index, B, microbatch) if index else None
        is_end = ends.get(index) in (action, Action(index, W, microbatch))
        return PlannedAction(action, str(action), takes, makes, index == last, action in full_backwards, is_end)

    found = []
    for position, step in enumerate(steps):
        message = step if isinstance(step, Action) and step.kind in MESSAGE_KINDS else None
        work = () if message else tuple(map(planned, actions_of(step)))
        found.append(PlannedStep(step, span_title(step), work, message, tuple(prefetched.get(position, ()))))
    return tuple(found)


def made_by(message: Action) -> Action:
    """Return the action whose result a message carries: an F, or a B (which stands for B and I).

    >>> print(made_by(Action(2, RECV_B, 0)), made_by(Action(3, "SEND_B", 0)))
    3B0 3B0
    """
    stage, kind, microbatch = message
    return Action(stage + _MADE_BY.get(kind, 0), F if kind in (RECV_F, SEND_F) else B, microbatch)


def _forwards(steps: tuple[ProgramStep, ...]) -> list[ProgramStep]:
    singles = [step.forward if isinstance(step, Overlap) else step for step in steps]
    return [step for step in singles if step.kind in (F, SEND_F, RECV_F)]


def _in_turn(steps: tuple[ProgramStep, ...]) -> Iterator[ProgramStep]:
    """Yield the forward of each pair, the send of its result, and then the backward."""
    early = {
        Action(step.forward.stage, SEND_F, step.forward.microbatch) for step in steps if isinstance(step, Overlap)
    } & {*steps}
    for step in steps:
        if isinstance(step, Overlap):
            yield step.forward
            if (send := step.forward._replace(kind=SEND_F)) in early:
                yield send
            yield step.backward
        elif step not in early:
            yield step


def _full_backwards(steps: tuple[ProgramStep, ...]) -> Iterator[Action]:
    work = [step for step in steps if isinstance(step, Overlap) or step.kind not in MESSAGE_KINDS]
    for first, second in pairwise(work):
        if isinstance(first, Action) and first[:2] == (0, I) and second == first._replace(kind=W):
            yield from (first, second)


def _prefetched_receives(lowered: Program, steps: tuple[ProgramStep, ...], lookahead: int) -> dict[int, list[Action]]:
    """A receive is launched once the message `lookahead` places before it in its stream has been used."""
    streams: defaultdict[tuple[int, str], list[tuple[int, Action]]] = defaultdict(list)
    latest = {step: position for position, step in enumerate(steps) if isinstance(step, Action)}
    for position, step in enumerate(steps):
        for stage, kind, microbatch in actions_of(step):
            receive = Action(stage, RECV_F if kind == F else RECV_B, microbatch)
            if kind not in MESSAGE_KINDS and kind != W and receive in latest:
                source = lowered.rank_of(made_by(receive).stage, microbatch)
                streams[source, receive.kind].append((position, receive))
    prefetched: defaultdict[int, list[Action]] = defaultdict(list)
    for uses in streams.values():
        for number, (_, receive) in enumerate(uses):
            position = uses[number - lookahead][0] + 1 if number >= lookahead else 0
            if position <= latest[receive]:
                prefetched[position].append(receive)
    return dict(prefetched)
