"""The fix of a deadlock: explains the smallest cycle of waits, and finds the action to move.

A cycle exists because on some of its ranks a needed action stands behind a waiting action.  A move that keeps the
order of all these pairs leaves the cycle as it is.  So if a single move lets the program run to its end, it moves one
of these actions.  Its latest position is found by a run without it: the position at which its rank gets stuck.
Every move that is reported has been tried by a run of the changed program.

If no single move is enough, the reported move is the first of several, and at least one more action runs after it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from dualpipe_lab.pp.program import Overlap, Program, ProgramStep, actions_of
from dualpipe_lab.pp.validation.deadlock import UntimedRun, WaitEdge
from dualpipe_lab.pp.validation.errors import ProblemList
from dualpipe_lab.pp.validation.index import check_work, index_actions
from dualpipe_lab.pp.validation.messages import check_messages, strip


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
    """Return a move and whether the program runs to its end after it; None if a lowered program needs several.

    `run` is a run of the program that got stuck.
    """
    cycle = run.cycle()
    best, most = None, _num_run(run)
    for move in sorted(_candidates(program, run, cycle), key=lambda move: abs(move.target - move.position)):
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


def _candidates(program: Program, run: UntimedRun, cycle: list[WaitEdge]) -> Iterator[Move]:
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
    problems = ProblemList()
    moved = end.apply(program)
    without = UntimedRun(moved, index_actions(moved, problems), run.blocking)
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
