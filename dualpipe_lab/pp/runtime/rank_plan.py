"""What one rank does in a step, in order: its row of the lowered program, and which receives it posts ahead of time.

Chapter: book/pp/pp-basic.  In: a lowered program, a rank.  Out: an `Itinerary`.
  posted early   the next `lookahead` messages of every stream (one source rank, one direction of travel), so that they
                 travel while the rank works
  posted at all  where the lowered program has the RECV, at the latest: then all ranks follow one common order, and the
                 step ends even if a send blocks until its receive is posted
  buffers        `lookahead` per stream, or what the schedule itself lets pile up before its use; not one per microbatch
Elsewhere: torch posts all receives of a step where its lowered order has them, and keeps a buffer for each microbatch.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

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
    Step,
    W,
    actions_of,
)

_MADE_BY = {RECV_F: -1, RECV_B: 1}  # from the stage that receives to the stage that made it


class Itinerary(NamedTuple):
    """The steps and messages of one rank.

    Attributes:
        row: what the rank does, in order.
        early: for positions in `row`, the receives that may be posted before them.
        last: the last backward action of each stage.
        at_once: I and W of the first stage where one follows the other.  Nobody waits for what this I returns, so both
            may be one walk of autograd, as B is.
    """

    row: tuple[Step, ...]
    early: dict[int, list[Action]]
    last: dict[int, Action]
    at_once: frozenset[Action]


def plan_rank(lowered: Program, rank: int, lookahead: int, forward_only: bool = False) -> Itinerary:
    """Plan one rank's step; with `forward_only`, its forwards and their messages alone.

    >>> from dualpipe_lab.pp.lowering import lower
    >>> from dualpipe_lab.pp.schedules import gpipe
    >>> plan = plan_rank(lower(gpipe(2, 3)), 1, lookahead=1)
    >>> {position: " ".join(map(str, receives)) for position, receives in plan.early.items()}
    {0: '1RECV_F0', 2: '1RECV_F1', 4: '1RECV_F2'}
    """
    row = lowered.ranks[rank]
    if forward_only:
        row = tuple(_forwards(row))
    last = {action.stage: action for step in row for action in actions_of(step) if action.kind in (B, W)}
    return Itinerary(row, _early(lowered, row, lookahead) if lookahead else {}, last, frozenset(_at_once(row)))


def made_by(receive: Action) -> Action:
    """Return the action whose result a RECV expects: an F, or a B (which stands for B and I).

    >>> print(made_by(Action(2, RECV_B, 0)))
    3B0
    """
    stage, kind, microbatch = receive
    return Action(stage + _MADE_BY[kind], F if kind == RECV_F else B, microbatch)


def _forwards(row: tuple[Step, ...]) -> list[Step]:
    singles = [step.forward if isinstance(step, Overlap) else step for step in row]
    return [step for step in singles if step.kind in (F, SEND_F, RECV_F)]


def _at_once(row: tuple[Step, ...]) -> Iterator[Action]:
    work = [step for step in row if isinstance(step, Overlap) or step.kind not in MESSAGE_KINDS]
    for first, second in pairwise(work):
        if isinstance(first, Action) and first[:2] == (0, I) and second == first._replace(kind=W):
            yield from (first, second)


def _early(lowered: Program, row: tuple[Step, ...], lookahead: int) -> dict[int, list[Action]]:
    """A receive is posted once the one `lookahead` places before it in its stream has been used."""
    streams: defaultdict[tuple[int, str], list[tuple[int, Action]]] = defaultdict(list)
    due = {step: position for position, step in enumerate(row) if isinstance(step, Action)}
    for position, step in enumerate(row):
        for stage, kind, microbatch in actions_of(step):
            receive = Action(stage, RECV_F if kind == F else RECV_B, microbatch)
            if kind not in MESSAGE_KINDS and kind != W and receive in due:
                source = lowered.rank_of(made_by(receive).stage, microbatch)
                streams[source, receive.kind].append((position, receive))
    early: defaultdict[int, list[Action]] = defaultdict(list)
    for uses in streams.values():
        for number, (_, receive) in enumerate(uses):
            position = uses[number - lookahead][0] + 1 if number >= lookahead else 0
            if position <= due[receive]:
                early[position].append(receive)
    return dict(sorted(early.items()))
