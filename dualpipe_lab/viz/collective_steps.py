"""The steps of a collective: from what ranks held before a call to what it returned, message by message.

Chapter: book/start/ranks-and-messages.  In: name, the numbers on each rank before and after.  Out: `Steps`, which play.
Steps on N ranks:
  all_reduce       2 (N - 1)     a ring: chunks are added, then the finished ones are passed on
  reduce_scatter   N - 1         the first half of it          all_gather   N - 1   the second half
  reduce           N             a reduce-scatter, then every chunk to the root
  broadcast        ceil(log2 N)  a tree: every rank that has the tensor gives it to one more
  scatter, gather, all_to_all    1
These are the algorithms of the chapter's table.  The last step must hold what the ranks returned, so a picture of a run
is never another run's.  Elsewhere: NCCL's rings and trees; Thakur et al. 2005.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from dualpipe_lab.viz.steplog import Cell, MessageStep, Steps

Rows: TypeAlias = Sequence[Sequence[float]]  # by rank: the numbers it holds


class _Number(NamedTuple):
    value: float
    owner: int | None  # the rank that held it first; None for a sum


_Row: TypeAlias = list[_Number]
_Move: TypeAlias = tuple[int, int, _Row]  # from, to, what


class _Moves(NamedTuple):
    title: str
    moves: list[_Move]
    rows: list[_Row]  # by rank, after the step


def collective_steps(name: str, before: Rows, after: Rows, root: int | None = None, note: str = "") -> Steps:
    """Return the messages of a collective, step by step, between what the ranks held before and after it.

    Args:
        name: of the call: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, reduce, scatter or gather.
        before: by rank, its numbers before the call.
        after: by rank, the numbers that the call returned to it; empty for a rank to which it returned nothing.
        root: of the last four.
        note: shown beside the name.

    Raises:
        ValueError: an unknown name, a missing root, rows of different lengths, or another `after` than the steps give.

    >>> print(collective_steps("all_to_all", [[0, 1], [10, 11]], [[0, 10], [1, 11]]))
    all_to_all: 2 ranks, 1 step
    1. each rank's blocks: 0->1 1, 1->0 10
    rank 0: 0 10
    rank 1: 1 11
    """
    if name not in _STEPS:
        raise ValueError(f"the steps of {name!r} are not known; known are {', '.join(_STEPS)}")
    if name in _ROOTED and (root is None or not 0 <= root < len(before)):
        raise ValueError(f"{name} needs its root, a rank from 0 to {len(before) - 1}, got {root}")
    if len({len(row) for row in before}) != 1 or len(before) != len(after):
        raise ValueError(f"{name} needs rows of one length before it, for as many ranks as after it")
    start = [[_Number(value, rank) for value in row] for rank, row in enumerate(before)]
    found = _STEPS[name](start, root or 0)
    for rank, (row, reached) in enumerate(zip(after, found[-1].rows if found else start, strict=True)):
        values = [number.value for number in reached]
        if row and list(row) != values:
            raise ValueError(f"{name} gives rank {rank} {values}, but it returned {list(row)}; check the call")
        if not row:
            reached.clear()
    log = [
        MessageStep(title, [(src, dst, _cell(numbers)) for src, dst, numbers in moves], _held(rows))
        for title, moves, rows in found
    ]
    return Steps(name, _held(start), log, note)


def _held(rows: list[_Row]) -> list[list[Cell]]:
    return [[_cell([number]) for number in row] for row in rows]


def _cell(numbers: _Row) -> Cell:
    """Return the numbers as a text, in the colour of the rank that held all of them first."""
    owners = {number.owner for number in numbers}
    return ",".join(f"{number.value:g}" for number in numbers), owners.pop() if len(owners) == 1 else None


def _chunk(row: _Row, index: int, num_ranks: int) -> slice:
    length = -(-len(row) // num_ranks)  # rounded up
    return slice(index * length, (index + 1) * length)


def _ring(rows: list[_Row], steps: range, offset: int = 0) -> list[_Moves]:
    """Send one chunk to the right in every step; in the first N - 1 steps the receiver adds it, later it keeps it."""
    num_ranks, found = len(rows), []
    for step in steps:
        adds = step < num_ranks - 1
        cuts = [_chunk(row, (rank - step - offset) % num_ranks, num_ranks) for rank, row in enumerate(rows)]
        moves = [(r, (r + 1) % num_ranks, rows[r][cut]) for r, cut in enumerate(cuts)]
        rows = [list(row) for row in rows]
        for (_, dst, numbers), cut in zip(moves, cuts, strict=True):
            mine = rows[dst][cut]
            sums = [_Number(a.value + b.value, None) for a, b in zip(mine, numbers, strict=True)]
            rows[dst][cut] = sums if adds else numbers
        found.append(_Moves("one chunk to the right, " + ("added" if adds else "kept"), moves, rows))
    return found


def _reduce_scatter(rows: list[_Row], root: int) -> list[_Moves]:
    found, num_ranks = _ring(rows, range(len(rows) - 1), offset=1), len(rows)
    if found:
        last = [row[_chunk(row, rank, num_ranks)] for rank, row in enumerate(found[-1].rows)]
        found[-1] = found[-1]._replace(rows=last)
    return found


def _reduce(rows: list[_Row], root: int) -> list[_Moves]:
    found = _reduce_scatter(rows, root)
    return [*found, *_gather(found[-1].rows if found else rows, root, "finished chunks to the root")]


def _all_gather(rows: list[_Row], root: int) -> list[_Moves]:
    num_ranks, found = len(rows), []
    held: list[dict[int, _Row]] = [{rank: row} for rank, row in enumerate(rows)]
    for step in range(num_ranks - 1):
        sent = [(rank - step) % num_ranks for rank in range(num_ranks)]
        moves = [(rank, (rank + 1) % num_ranks, rows[index]) for rank, index in enumerate(sent)]
        for rank, index in enumerate(sent):
            held[(rank + 1) % num_ranks][index] = rows[index]
        after = [[value for index in sorted(pieces) for value in pieces[index]] for pieces in held]
        found.append(_Moves("the newest piece to the right, kept", moves, after))
    return found


def _all_to_all(rows: list[_Row], root: int) -> list[_Moves]:
    num_ranks = range(len(rows))
    blocks = [[row[_chunk(row, dst, len(rows))] for dst in num_ranks] for row in rows]
    moves = [(src, dst, blocks[src][dst]) for src in num_ranks for dst in num_ranks if src != dst]
    after = [[v for src in num_ranks for v in blocks[src][dst]] for dst in num_ranks]
    return [_Moves("each rank's blocks", moves, after)]


def _broadcast(rows: list[_Row], root: int) -> list[_Moves]:
    num_ranks, found, reach = len(rows), list[_Moves](), 1
    while reach < num_ranks:
        pairs = [(near, near + reach) for near in range(min(reach, num_ranks - reach))]
        moves = [((root + a) % num_ranks, (root + b) % num_ranks, rows[root]) for a, b in pairs]
        reached = {dst for _, dst, _ in moves}
        rows = [list(rows[root]) if rank in reached else row for rank, row in enumerate(rows)]
        found.append(_Moves("every rank that has it gives it to one more", moves, rows))
        reach *= 2
    return found


def _scatter(rows: list[_Row], root: int) -> list[_Moves]:
    blocks = [rows[root][_chunk(rows[root], rank, len(rows))] for rank in range(len(rows))]
    return [_Moves("a block to every rank", [(root, r, b) for r, b in enumerate(blocks) if r != root], blocks)]


def _gather(rows: list[_Row], root: int, title: str = "every rank's block to the root") -> list[_Moves]:
    moves = [(rank, root, row) for rank, row in enumerate(rows) if rank != root]
    total = [value for row in rows for value in row]
    return [_Moves(title, moves, [total if r == root else [] for r in range(len(rows))])]


_STEPS: dict[str, Callable[[list[_Row], int], list[_Moves]]] = {
    "all_reduce": lambda rows, root: _ring(rows, range(2 * (len(rows) - 1))),
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": _scatter,
    "gather": _gather,
}
_ROOTED = ("broadcast", "reduce", "scatter", "gather")
