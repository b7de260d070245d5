"""Who waits for whom: runs a program without a clock and explains where it gets stuck.

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
from dualpipe_lab.pp.survey import Survey

_PARTNER = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}
_NO_INPUT = frozenset({W, *MESSAGE_KINDS})


class _Wait(NamedTuple):
    """One edge of a circle: `rank` cannot go on until `other` has reached what it needs."""

    rank: int
    other: int
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
        self.blocking = blocking
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

    def explanation(self) -> str:
        """Return the smallest circle of waits in words, or "" if the program ran to its end."""
        waits = {rank: self._waits(rank) for rank, steps in enumerate(self.ranks) if self.position(rank) < len(steps)}
        if not waits:
            return ""
        circles = [circle for rank in waits if (circle := _circle_through(rank, waits))]
        circle = min(circles, key=len)
        *others, last = sorted(wait.rank for wait in circle)
        who = (
            f"ranks {', '.join(map(str, others))} and {last} wait for each other" if others else f"rank {last} is stuck"
        )
        remedy = "remedy: move one of these actions behind what it waits for, or what is waited for to the front"
        return "\n      ".join([f"deadlock: {who}", *(wait.text for wait in circle), remedy])

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
            needed = self.number[stage - 1, F, microbatch]
        elif kind in _NO_INPUT:
            return None
        elif stage == self.last_stage:
            needed = self.number[stage, F, microbatch]
        else:
            whole = self.number.get((stage + 1, B, microbatch))
            needed = self.number[stage + 1, I, microbatch] if whole is None else whole
        return None if needed < self.reached[needed // self.stride] else needed

    def _meet(self, message: Action, rank: int) -> bool:
        partner = self.meeting.pop(_partner(message), None)
        if partner is None:
            self.meeting[message] = rank
            return False
        self.reached[partner] += 1
        self.runnable.append(partner)
        return True

    def _waits(self, rank: int) -> list[_Wait]:
        """Return what a stuck rank waits for: one thing, or up to two before an overlapped pair."""
        position = self.position(rank)
        step = self.ranks[rank][position]
        found = []
        for action in actions_of(step):
            is_message = action.kind in MESSAGE_KINDS
            number = self.number[_partner(action)] if is_message else self._missing(action)
            if number is None:
                continue
            other, there = divmod(number, self.stride)
            result = "activation" if action.kind == F or action.stage == self.last_stage else "gradient"
            what = "" if is_message else f"the {result} of "
            where = "the same rank" if other == rank else f"rank {other}"
            text = f"rank {rank} stands before {step} (position {position}), which needs "
            found.append(_Wait(rank, other, f"{text}{what}{self.ranks[other][there]} on {where} (position {there})"))
        return found


def _partner(message: Action) -> Action:
    kind, offset = _PARTNER[message.kind]
    return Action(message.stage + offset, kind, message.microbatch)


def _circle_through(start: int, waits: Mapping[int, list[_Wait]]) -> list[_Wait]:
    """Search breadth first from a rank along its waits until they come back to it."""
    queue: deque[list[_Wait]] = deque([[]])
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
