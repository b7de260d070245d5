"""Who waits for whom: runs a program without a clock and explains where it gets stuck.

At the end either every rank has run everything, or every rank that has not stands before one action whose input (or,
with blocking messages, whose partner) comes only later on a rank that is stuck as well.  Following these waits from
rank to rank leads around a circle; the smallest one is the explanation.
"""

from collections import deque
from typing import NamedTuple, TypeAlias

from dualpipe_lab.pp.program import MESSAGE_KINDS, RECV_B, RECV_F, SEND_B, SEND_F, Action, F, Program, W, actions_of

Result: TypeAlias = tuple[int, bool, int]  # stage that made it, is it an activation (or a gradient), microbatch

_PARTNER = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


class _Wait(NamedTuple):
    """One edge of a circle: `rank` cannot go on until `other` has reached what it needs."""

    rank: int
    other: int
    text: str


def explain_deadlock(program: Program, blocking: bool = False) -> str:
    """Return the smallest circle of waits in words, or "" if the program runs to its end.

    Expects a complete program.  With `blocking`, a send and its receive each wait until both ranks are there.
    """
    run = _Run(program, blocking)
    run.all_ranks()
    waits = {rank: run.waits(rank) for rank, steps in enumerate(program.ranks) if run.position[rank] < len(steps)}
    if not waits:
        return ""
    circle = _smallest_circle(waits)
    ranks = sorted({wait.rank for wait in circle})
    if len(ranks) == 1:
        who = f"rank {ranks[0]} waits for itself"
    else:
        who = f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} wait for each other"
    remedy = "run one of these actions later, behind what the others wait for"
    return "\n".join([f"deadlock: {who}", *(f"      {wait.text}" for wait in circle), f"      remedy: {remedy}"])


class _Run:
    def __init__(self, program: Program, blocking: bool) -> None:
        self.program = program
        self.blocking = blocking
        self.position = [0] * program.num_ranks
        self.made: set[Result] = set()
        self.waiting: dict[Result, int] = {}  # the rank that waits for this result
        self.meeting: dict[Action, int] = {}  # the rank that stands before this send or receive
        self.runnable = list(range(program.num_ranks))

    def all_ranks(self) -> None:
        while self.runnable:
            self.advance(self.runnable.pop())

    def advance(self, rank: int) -> None:
        """Run one rank until its end or until it must wait."""
        steps = self.program.ranks[rank]
        while self.position[rank] < len(steps):
            actions = actions_of(steps[self.position[rank]])
            if actions[0].kind in MESSAGE_KINDS:
                if self.blocking and not self.meet(actions[0], rank):
                    return
            else:
                for action in actions:
                    needed = self.needed(action)
                    if needed is not None and needed not in self.made:
                        self.waiting[needed] = rank
                        return
                for action in actions:
                    self.make(action)
            self.position[rank] += 1

    def needed(self, action: Action) -> Result | None:
        stage, kind, microbatch = action
        if kind == W or (kind == F and stage == 0):
            return None
        if kind != F and stage == self.program.num_stages - 1:
            return stage, True, microbatch  # the last backward starts from its own forward: a pair cannot hold both
        return stage - 1 if kind == F else stage + 1, kind == F, microbatch

    def make(self, action: Action) -> None:
        if action.kind == W:
            return
        result = (action.stage, action.kind == F, action.microbatch)
        self.made.add(result)
        if result in self.waiting:
            self.runnable.append(self.waiting.pop(result))

    def meet(self, message: Action, rank: int) -> bool:
        partner = self.meeting.pop(_partner(message), None)
        if partner is None:
            self.meeting[message] = rank
            return False
        self.position[partner] += 1
        self.runnable.append(partner)
        return True

    def waits(self, rank: int) -> list[_Wait]:
        """Return what a stuck rank waits for: one thing, or up to two before an overlapped pair."""
        position = self.position[rank]
        step = self.program.ranks[rank][position]
        found = []
        for action in actions_of(step):
            before = f"rank {rank} stands before {step} (position {position})"
            if action.kind in MESSAGE_KINDS:
                partner = _partner(action)
                other, there = self._find({partner})
                need = f"which needs rank {other} to reach {partner} (position {there})"
            else:
                needed = self.needed(action)
                if needed is None or needed in self.made:
                    continue
                stage, is_activation, microbatch = needed
                other, there = self._find(
                    {Action(stage, kind, microbatch) for kind in ("F" if is_activation else "BI")}
                )
                maker = self.program.ranks[other][there]
                what = "activation" if is_activation else "gradient"
                need = f"which needs the {what} of {maker} on {'the same' if other == rank else f'rank {other},'}"
                need += f" rank (position {there})" if other == rank else f" position {there}"
            found.append(_Wait(rank, other, f"{before}, {need}"))
        return found

    def _find(self, wanted: set[Action]) -> tuple[int, int]:
        for rank, steps in enumerate(self.program.ranks):
            for position, step in enumerate(steps):
                if not wanted.isdisjoint(actions_of(step)):
                    return rank, position
        raise AssertionError(f"a complete program has one of {wanted}")


def _partner(message: Action) -> Action:
    kind, offset = _PARTNER[message.kind]
    return Action(message.stage + offset, kind, message.microbatch)


def _smallest_circle(waits: dict[int, list[_Wait]]) -> list[_Wait]:
    circles = [circle for rank in waits if (circle := _circle_through(rank, waits))]
    return min(circles, key=len)


def _circle_through(start: int, waits: dict[int, list[_Wait]]) -> list[_Wait]:
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
