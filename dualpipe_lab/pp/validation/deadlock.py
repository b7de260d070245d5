"""Who waits for whom: runs a program without a clock and explains where it gets stuck.

In a lowered program a message leaves where its send stands, and is awaited by the action that uses it, wherever its
receive stands: messages are buffered.  With blocking messages, a send and its receive wait for each other.
At the end either every rank has run everything, or every rank that has not stands before one action whose input (or,
with blocking messages, whose partner) comes only later on a rank that is stuck as well.  Following these waits from
rank to rank leads around a circle; the smallest one is the explanation.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from dualpipe_lab.pp.program import (
    MESSAGE_KINDS,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    B,
    F,
    I,
    Program,
    W,
    actions_of,
)
from dualpipe_lab.pp.validation.index import Survey

_PARTNER = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


class Wait(NamedTuple):
    """One edge of a circle: `rank` stands before `action`, which needs `needed`; that comes later on rank `other`.

    `position` and `there` are the places of both in the lists of their ranks.
    """

    rank: int
    position: int
    action: Action
    other: int
    there: int
    needed: Action
    text: str


class DryRun:
    """A run without a clock of a complete program.

    `order` lists the turns: (rank, end) means that this rank can now run up to position `end`.
    With `blocking`, a send and its receive each wait until both ranks are there.
    """

    def __init__(self, program: Program, found: Survey, blocking: bool = False) -> None:
        self.ranks = program.ranks
        self.number, self.stride = found.number, found.stride
        self.last_stage = program.num_stages - 1
        self.blocking, self.is_lowered = blocking, not found.count.keys().isdisjoint(MESSAGE_KINDS)
        self.reached = [rank * self.stride for rank in range(program.num_ranks)]  # the number of the step before us
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)  # number of a step -> ranks that wait for it
        self.meeting: dict[Action, int] = {}  # the send or receive that a rank stands before -> this rank
        self.order: list[tuple[int, int]] = []
        self.runnable = list(range(program.num_ranks))
        while self.runnable:
            rank = self.runnable.pop()
            self._advance(rank)
            self.order.append((rank, self.position(rank)))

    def position(self, rank: int) -> int:
        """Return the position of the step that a rank stands before."""
        return self.reached[rank] - rank * self.stride

    @property
    def is_complete(self) -> bool:
        """Whether every rank has run everything."""
        return all(self.position(rank) == len(steps) for rank, steps in enumerate(self.ranks))

    def circle(self) -> list[Wait]:
        """Return the smallest circle of waits; empty if the program ran to its end."""
        waits = {rank: self._waits(rank) for rank, steps in enumerate(self.ranks) if self.position(rank) < len(steps)}
        circles = [circle for rank in waits if (circle := _circle_through(rank, waits))]
        return min(circles, key=len, default=[])

    def missing(self, action: Action) -> tuple[int, int, Action] | None:
        """Return rank, position and name of the action that this one needs and that has not run; None if it may run."""
        number = self.number[_partner(action)] if action.kind in MESSAGE_KINDS else self._missing(action)
        if number is None:
            return None
        other, there = divmod(number, self.stride)
        parts = actions_of(self.ranks[other][there])
        return other, there, next((part for part in parts if (part.kind == F) == self._needs_forward(action)), parts[0])

    def _needs_forward(self, action: Action) -> bool:
        return action.kind == F or (action.kind != W and action.stage == self.last_stage)

    def _advance(self, rank: int) -> None:
        """Run one rank until its end or until it must wait."""
        steps, waiting, first = self.ranks[rank], self.waiting, rank * self.stride
        for number in range(self.reached[rank], first + len(steps)):
            step = steps[number - first]
            for action in (step,) if isinstance(step, Action) else step:
                missing = self._missing(action)
                if missing is not None:
                    waiting[missing].append(rank)
                    return
            if self.blocking and isinstance(step, Action) and step.kind in MESSAGE_KINDS and not self._meet(step, rank):
                return
            self.reached[rank] = number + 1
            if number in waiting:
                self.runnable += waiting.pop(number)

    def _missing(self, action: Action) -> int | None:
        """Return the number of the step that has to run before this action and has not; None if it may run."""
        stage, kind, microbatch = action
        if kind == F:
            if stage == 0:
                return None
            needed = self._result(stage - 1, SEND_F, F, microbatch)
        elif kind == W:
            needed = self.number[stage, I, microbatch]
        elif kind in MESSAGE_KINDS:
            return None
        elif stage == self.last_stage:
            needed = self.number[stage, F, microbatch]
        else:
            whole = B if (stage + 1, B, microbatch) in self.number else I
            needed = self._result(stage + 1, SEND_B, whole, microbatch)
        return None if needed < self.reached[needed // self.stride] else needed

    def _result(self, stage: int, send: str, work: str, microbatch: int) -> int:
        """Return the number of the step that hands a result over: its send, if it has one."""
        here = self.number[stage, work, microbatch]
        return self.number.get((stage, send, microbatch), here) if self.is_lowered else here

    def _meet(self, message: Action, rank: int) -> bool:
        partner = self.meeting.pop(_partner(message), None)
        if partner is None:
            self.meeting[message] = rank
            return False
        self.reached[partner] += 1
        self.runnable.append(partner)
        return True

    def _waits(self, rank: int) -> list[Wait]:
        """Return what a stuck rank waits for: one thing, or up to two before an overlapped pair."""
        position = self.position(rank)
        step = self.ranks[rank][position]
        found = []
        for action in actions_of(step):
            if missing := self.missing(action):
                other, there, needed = missing
                result = "activation" if self._needs_forward(action) else "gradient"
                what = "" if needed.kind in MESSAGE_KINDS else f"the {result} of "
                where = "the same rank" if other == rank else f"rank {other}"
                text = f"rank {rank} stands before {step} (position {position}), which needs "
                text += f"{what}{self.ranks[other][there]} on {where} (position {there})"
                found.append(Wait(rank, position, action, other, there, needed, text))
        return found


def _partner(message: Action) -> Action:
    kind, offset = _PARTNER[message.kind]
    return Action(message.stage + offset, kind, message.microbatch)


def _circle_through(start: int, waits: Mapping[int, list[Wait]]) -> list[Wait]:
    """Search breadth first from a rank along its waits until they come back to it."""
    queue: deque[list[Wait]] = deque([[]])
    seen = set()
    while queue:
        path = queue.popleft()
        for wait in waits[path[-1].other if path else start]:
            if wait.other == start:
                return [*path, wait]
            if wait.other not in seen:
                seen.add(wait.other)
                queue.append([*path, wait])
    return []
