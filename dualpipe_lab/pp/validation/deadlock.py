"""Deadlocks: runs a program without a clock, finds the ranks that wait for each other, and the action to move.

Messages of a lowered program are buffered: a message leaves at its send, and the action that uses it waits for it,
wherever its receive stands.  With blocking messages, a send and its receive wait for each other.
A run ends in one of two ways.  Either every rank has run all its steps, or every unfinished rank stands before an
action whose input (or, with blocking messages, whose partner) comes later on an unfinished rank.  In the second case
the waits form a cycle; the smallest cycle is the explanation.
The fix: a cycle exists because on some of its ranks a needed action stands behind a waiting action.  A move that keeps
the order of all these pairs leaves the cycle as it is.  So if a single move lets the program run to its end, it moves
one of these actions.  Its latest position is found by a run without it: the position at which its rank gets stuck.
Every move that is reported has been tried by a run of the changed program.  If no single move is enough, the reported
move is the first of several, and at least one more action runs after it.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
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
    Overlap,
    Program,
    ProgramStep,
    W,
    actions_of,
)
from dualpipe_lab.pp.validation.rules import ActionIndex, ProblemList, check_messages, check_work, index_actions, strip

_PARTNER = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


class WaitEdge(NamedTuple):
    """One edge of a cycle: `rank` stands before `action`, which needs `needed`, a later action of rank `other`."""

    rank: int
    position: int  # of `action` in the list of its rank
    action: Action
    other: int
    other_position: int  # of `needed`
    needed: Action
    text: str


class UntimedRun:
    """A run without a clock of a program whose work is complete; `order`: entries (rank, the end of what it can run).

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
        """Return whether every rank has run all of its steps."""
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
        made = next((part for part in parts if (part.kind == F) == self._needs_forward(action)), parts[0])
        return other, other_position, made

    def _needs_forward(self, action: Action) -> bool:
        return action.kind == F or (action.kind != W and action.stage == self.last_stage)

    def _advance(self, rank: int) -> None:
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


class Move(NamedTuple):
    """The move of an action, or of a full pair, from `position` to position `target` of the same rank.

    Positions count from 0: `position` in the row before the move, `target` in the row after it.
    """

    rank: int
    position: int
    step: ProgramStep
    target: int

    def rest(self, program: Program) -> list[ProgramStep]:
        """Return the rank's row without the moved action; the other half of a pair stays."""
        row = list(program.ranks[self.rank])
        left = [action for action in actions_of(row[self.position]) if self.step not in (action, row[self.position])]
        row[self.position : self.position + 1] = left
        return row

    def apply(self, program: Program) -> Program:
        """Return the program after the move."""
        row = self.rest(program)
        row.insert(self.target, self.step)
        return program.with_ranks([*program.ranks[: self.rank], row, *program.ranks[self.rank + 1 :]])

    def words(self, program: Program) -> str:
        """Describe the move, such as "move 0F1 on rank 0 from position 2 to position 1, before 0B0"."""
        original, row = program.ranks[self.rank][self.position], self.rest(program)
        neighbour = f"before {row[self.target]}" if self.target < self.position else f"behind {row[self.target - 1]}"
        if self.step == original:
            start = f"move {self.step} on rank {self.rank} from position {self.position} to"
        else:
            start = f"take {self.step} out of {original} on rank {self.rank} (position {self.position}) and run it at"
            neighbour = f"before {row[self.target]}" if self.target < len(row) else neighbour
        return f"{start} position {self.target}, {neighbour}"


def explain_deadlock(program: Program, run: UntimedRun) -> str:
    """Return the smallest cycle of waits and its fix in words, or "" if the program ran to its end."""
    if run.is_complete:
        return ""
    cycle = run.cycle()
    *others, last = sorted(wait.rank for wait in cycle)
    who = f"ranks {', '.join(map(str, others))} and {last} wait for each other" if others else f"rank {last} is stuck"
    return "\n      ".join([f"deadlock: {who}", *(wait.text for wait in cycle), f"fix: {_fix_text(program, run)}"])


def find_fix(program: Program, run: UntimedRun) -> tuple[Move, bool] | None:
    """Return a move for a run that got stuck, and whether it then ends; None if a lowered program needs several."""
    cycle = run.cycle()
    best, most = None, _num_run(run)
    for move in sorted(_candidates(program, cycle), key=lambda move: abs(move.target - move.position)):
        for placed in _placements(program, run, move):
            after = _run_again(placed.apply(program), run.blocking)
            if after is not None and after.is_complete:
                return placed, True
            if after is not None and _num_run(after) > most:
                best, most = placed, _num_run(after)
    if program.is_lowered:
        return None  # its messages have to move too
    return best or _first_ready(run, cycle), False


def _fix_text(program: Program, run: UntimedRun) -> str:
    if found := find_fix(program, run):
        return f"{found[0].words(program)}; {_effect(found[1])}"
    plain = strip(program)
    plain_run = UntimedRun(plain, index_actions(plain, ProblemList()))
    if plain_run.is_complete:
        return "lower() the program anew; then no send or receive stands in the way"
    found = find_fix(plain, plain_run)
    assert found is not None  # only messages can leave a program without a move
    return f"strip() the messages, {found[0].words(plain)}, and lower() it again; {_effect(found[1])}"


def _effect(is_enough: bool) -> str:
    return "then it runs to its end" if is_enough else "that is the first of several moves"


def _candidates(program: Program, cycle: list[WaitEdge]) -> Iterator[Move]:
    """Yield moves of needed actions to the front and of waiting actions to the back; pairs in full or by halves."""
    for wait, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        rank, head, behind = wait.other, following.position, wait.other_position
        needed, waiting = program.ranks[rank][behind], program.ranks[rank][head]
        if behind > head:
            yield Move(rank, behind, needed, head)
            yield Move(rank, head, waiting, behind)
        if isinstance(needed, Overlap):
            yield Move(rank, behind, wait.needed, head)
        if isinstance(waiting, Overlap):
            yield Move(rank, head, following.action, behind + 1)


def _placements(program: Program, run: UntimedRun, move: Move) -> Iterator[Move]:
    """Yield the move itself, if it goes back, and the move to the latest position that the action may have."""
    end = move._replace(target=len(move.rest(program)))
    moved = end.apply(program)
    without = UntimedRun(moved, index_actions(moved, ProblemList()), run.blocking)
    latest = min(without.position(move.rank), end.target)
    if move.position < move.target < latest:
        yield move
    yield move._replace(target=latest)


def _run_again(program: Program, blocking: bool) -> UntimedRun | None:
    """Run a program without a clock; None if its actions or messages are out of order."""
    problems = ProblemList()
    index = index_actions(program, problems)
    check_work(program, index, problems)
    if program.is_lowered and not problems.total:
        check_messages(program, index, problems)
    return None if problems.total else UntimedRun(program, index, blocking)


def _num_run(run: UntimedRun) -> int:
    return sum(len(actions_of(step)) for rank, steps in enumerate(run.ranks) for step in steps[: run.position(rank)])


def _first_ready(run: UntimedRun, cycle: list[WaitEdge]) -> Move:
    """Follow the needed actions back to one that can run at once, and return the move to its rank's position."""
    moves = []
    for wait in cycle:
        rank, position, action = wait.other, wait.other_position, wait.needed
        while earlier := run.missing(action):
            rank, position, action = earlier
        moves.append(Move(rank, position, action, run.position(rank)))
    return min(moves, key=lambda move: move.position - move.target)
