"""Deadlocks in words: the smallest circle of waits, and the one action to move.

A circle exists because on some of its ranks an action that is waited for stands behind one that waits.  If any single
move makes the program run to its end, then moving one of these actions does: a move that changes none of these orders
leaves the circle as it is.  Where must such an action stand?  Everything that can run without it runs; the place at
which its rank is stuck then is the latest one.  Every move named here has been tried, by running the program again.

If no single move is enough, the move named is the first of several, and at least one more action runs after it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from dualpipe_lab.pp.program import Overlap, Program, Step, actions_of
from dualpipe_lab.pp.validation.deadlock import DryRun, Wait
from dualpipe_lab.pp.validation.errors import Problems
from dualpipe_lab.pp.validation.index import check_work, survey
from dualpipe_lab.pp.validation.messages import check_deliveries, strip


class Move(NamedTuple):
    """An action, or a whole pair, that leaves its `position` for position `target` of the same rank.

    Positions count from 0: `position` in the row as it is, `target` in the row after the move.
    """

    rank: int
    position: int
    step: Step
    target: int

    def rest(self, program: Program) -> list[Step]:
        """Return the rank's row without what moves; the other half of a pair stays."""
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
        """Say what to do, such as "move 0F1 on rank 0 from position 2 to position 1, before 0B0"."""
        whole, row = program.ranks[self.rank][self.position], self.rest(program)
        neighbour = f"before {row[self.target]}" if self.target < self.position else f"behind {row[self.target - 1]}"
        if self.step == whole:
            start = f"move {self.step} on rank {self.rank} from position {self.position} to"
        else:
            start = f"take {self.step} out of {whole} on rank {self.rank} (position {self.position}) and run it at"
            neighbour = f"before {row[self.target]}" if self.target < len(row) else neighbour
        return f"{start} position {self.target}, {neighbour}"


def explanation(program: Program, run: DryRun) -> str:
    """Return the smallest circle of waits and its remedy in words, or "" if the program ran to its end."""
    if run.is_complete:
        return ""
    circle = run.circle()
    *others, last = sorted(wait.rank for wait in circle)
    who = f"ranks {', '.join(map(str, others))} and {last} wait for each other" if others else f"rank {last} is stuck"
    return "\n      ".join([f"deadlock: {who}", *(wait.text for wait in circle), f"remedy: {_remedy(program, run)}"])


def find_move(program: Program, run: DryRun) -> tuple[Move, bool] | None:
    """Return a move and whether the program runs to its end after it; None where a lowered program needs several.

    `run` is a dry run of the program that got stuck.
    """
    circle = run.circle()
    best, most = None, _progress(run)
    for move in sorted(_candidates(program, run, circle), key=lambda move: abs(move.target - move.position)):
        for placed in _placements(program, run, move):
            after = _dry_run(placed.apply(program), run.blocking)
            if after is not None and after.is_complete:
                return placed, True
            if after is not None and _progress(after) > most:
                best, most = placed, _progress(after)
    if program.is_lowered:
        return None  # its messages have to move too
    return best or _first_ready(run, circle), False


def _remedy(program: Program, run: DryRun) -> str:
    if found := find_move(program, run):
        return f"{found[0].words(program)}; {_effect(found[1])}"
    plain = strip(program)
    plain_run = DryRun(plain, survey(plain, Problems()))
    if plain_run.is_complete:
        return "lower() the program anew; then no send or receive stands in the way"
    found = find_move(plain, plain_run)
    assert found is not None  # only messages can leave a program without a move
    return f"strip() the messages, {found[0].words(plain)}, and lower() it again; {_effect(found[1])}"


def _effect(is_enough: bool) -> str:
    return "then it runs to its end" if is_enough else "that is the first of several moves"


def _candidates(program: Program, run: DryRun, circle: list[Wait]) -> Iterator[Move]:
    """Yield what could move: to the front what is waited for, behind that what waits; pairs as a whole or in part."""
    for wait, following in zip(circle, [*circle[1:], circle[0]], strict=True):
        rank, head, there = wait.other, following.position, wait.there
        needed, waiting = program.ranks[rank][there], program.ranks[rank][head]
        if there > head:
            yield Move(rank, there, needed, head)
            yield Move(rank, head, waiting, there)
        if isinstance(needed, Overlap):
            yield Move(rank, there, wait.needed, head)
        if isinstance(waiting, Overlap):
            yield Move(rank, head, following.action, there + 1)


def _placements(program: Program, run: DryRun, move: Move) -> Iterator[Move]:
    """Yield the move as it is, if it goes back, and with the latest place that the action may have."""
    end = move._replace(target=len(move.rest(program)))
    problems = Problems()
    moved = end.apply(program)
    without = DryRun(moved, survey(moved, problems), run.blocking)
    latest = min(without.position(move.rank), end.target)
    if move.position < move.target < latest:
        yield move
    yield move._replace(target=latest)


def _dry_run(program: Program, blocking: bool) -> DryRun | None:
    """Run a program without a clock; None if its actions or messages are out of order."""
    problems = Problems()
    found = survey(program, problems)
    check_work(program, found, problems)
    if program.is_lowered and not problems.total:
        check_deliveries(program, found, problems)
    return None if problems.total else DryRun(program, found, blocking)


def _progress(run: DryRun) -> int:
    return sum(len(actions_of(step)) for rank, steps in enumerate(run.ranks) for step in steps[: run.position(rank)])


def _first_ready(run: DryRun, circle: list[Wait]) -> Move:
    """Follow what is needed back to an action that could run at once if its turn came, and let its turn come."""
    moves = []
    for wait in circle:
        rank, position, action = wait.other, wait.there, wait.needed
        while earlier := run.missing(action):
            rank, position, action = earlier
        moves.append(Move(rank, position, action, run.position(rank)))
    return min(moves, key=lambda move: move.position - move.target)
