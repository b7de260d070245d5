"""Deadlocks: runs a program without a clock and finds the ranks that wait for each other.

Messages of a lowered program are buffered: a message leaves at its send, and the action that uses it waits for it,
wherever its receive stands.  With blocking messages, a send and its receive wait for each other.
A run ends in one of two ways.  Either every rank has run all its steps, or every unfinished rank stands before an
action whose input (or, with blocking messages, whose partner) comes later on an unfinished rank.  In the second case
the waits form a cycle; the smallest cycle is the explanation.
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
from dualpipe_lab.pp.validation.index import ActionIndex

_PARTNER = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


class WaitEdge(NamedTuple):
    """One edge of a cycle: `rank` stands before `action`, which needs `needed`, a later action of rank `other`.

    `position` is the position of `action` in the list of its rank, `other_position` that of `needed`.
    """

    rank: int
    position: int
    action: Action
    other: int
    other_position: int
    needed: Action
    text: str


class UntimedRun:
    """A run without a clock of a program whose work is complete.

    `order` lists entries (rank, end): the rank can now run up to position `end`.
    With `blocking`, a send and its receive each wait until both ranks have reached them.
    """

    def __init__(self, program: Program, index: ActionIndex, blocking: bool = False) -> None:
        self.ranks = program.ranks
        self.number, self.stride = index.number, index.stride
        self.last_stage = program.num_stages - 1
        self.blocking, self.is_lowered = blocking, not index.count.keys().isdisjoint(MESSAGE_KINDS)
        self.reached = [rank * self.stride for rank in range(program.num_ranks)]  # step before each rank
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)  # number of a step -> ranks that wait for it
        self.blocked: dict[Action, int] = {}  # the send or receive that a rank is blocked in -> this rank
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
        """Whether every rank has run all its steps."""
        return all(self.position(rank) == len(steps) for rank, steps in enumerate(self.ranks))

    def cycle(self) -> list[WaitEdge]:
        """Return the smallest cycle of waits; empty if the program ran to its end."""
        waits = {rank: self._waits(rank) for rank, steps in enumerate(self.ranks) if self.position(rank) < len(steps)}
        cycles = [cycle for rank in waits if (cycle := _cycle_through(rank, waits))]
        return min(cycles, key=len, default=[])

    def missing(self, action: Action) -> tuple[int, int, Action] | None:
        """Return rank, position and name of the action that has to run before this one; None if this one may run."""
        number = self.number[_partner(action)] if action.kind in MESSAGE_KINDS else self._missing(action)
        if number is None:
            return None
        other, other_position = divmod(number, self.stride)
        parts = actions_of(self.ranks[other][other_position])
        for part in parts:
            if (part.kind == F) == self._needs_forward(action):
                return other, other_position, part
        return other, other_position, parts[0]

    def _needs_forward(self, action: Action) -> bool:
        return action.kind == F or (action.kind != W and action.stage == self.last_stage)

    def _advance(self, rank: int) -> None:
        """Run one rank until its end, or until an input is missing."""
        steps, waiting, first = self.ranks[rank], self.waiting, rank * self.stride
        for number in range(self.reached[rank], first + len(steps)):
            step = steps[number - first]
            for action in (step,) if isinstance(step, Action) else step:
                missing = self._missing(action)
                if missing is not None:
                    waiting[missing].append(rank)
                    return
            if (
                self.blocking
                and isinstance(step, Action)
                and step.kind in MESSAGE_KINDS
                and not self._pair_up(step, rank)
            ):
                return
            self.reached[rank] = number + 1
            if number in waiting:
                self.runnable += waiting.pop(number)

    def _missing(self, action: Action) -> int | None:
        """Return the number of the step that has to run before this action; None if the action may run."""
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
            backward = B if (stage + 1, B, microbatch) in self.number else I
            needed = self._result(stage + 1, SEND_B, backward, microbatch)
        return None if needed < self.reached[needed // self.stride] else needed

    def _result(self, stage: int, send: str, work: str, microbatch: int) -> int:
        """Return the number of the step after which a result is available: its send, if it has one."""
        here = self.number[stage, work, microbatch]
        return self.number.get((stage, send, microbatch), here) if self.is_lowered else here

    def _pair_up(self, message: Action, rank: int) -> bool:
        """Complete a send and its receive if both ranks have reached them; otherwise block this rank."""
        partner = self.blocked.pop(_partner(message), None)
        if partner is None:
            self.blocked[message] = rank
            return False
        self.reached[partner] += 1
        self.runnable.append(partner)
        return True

    def _waits(self, rank: int) -> list[WaitEdge]:
        """Return the waits of a stuck rank: one, or up to two before an overlapped pair."""
        position = self.position(rank)
        step = self.ranks[rank][position]
        found = []
        for action in actions_of(step):
            if missing := self.missing(action):
                other, other_position, needed = missing
                result = "activation" if self._needs_forward(action) else "gradient"
                what = "" if needed.kind in MESSAGE_KINDS else f"the {result} of "
                where = "the same rank" if other == rank else f"rank {other}"
                text = f"rank {rank} stands before {step} (position {position}), which needs "
                text += f"{what}{self.ranks[other][other_position]} on {where} (position {other_position})"
                found.append(WaitEdge(rank, position, action, other, other_position, needed, text))
        return found


def _partner(message: Action) -> Action:
    kind, offset = _PARTNER[message.kind]
    return Action(message.stage + offset, kind, message.microbatch)


def _cycle_through(start: int, waits: Mapping[int, list[WaitEdge]]) -> list[WaitEdge]:
    """Search breadth first from a rank along its waits until they lead back to it."""
    queue: deque[list[WaitEdge]] = deque([[]])
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
