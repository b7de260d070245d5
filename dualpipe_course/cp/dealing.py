"""Arithmetic of a puzzle: the critical path of any way to deal out a packed sequence to the ranks of a ring.

Chapter: book/cp/ring-attention.  In: positions by rank.  Out: pairs by rank and step, and the path.
  a query sees     the keys of its own document, up to itself
  a step           rank r has the block of rank r - i; it lasts as long as its busiest rank
  bound            all visible pairs over the ranks, rounded up
"""

from typing import Any

from dualpipe_course.exercise import Wrong
from dualpipe_course.plain import plain

DOCUMENTS = (16, 8)  # lengths
RANKS, BUDGET = 4, 46
LENGTH = sum(DOCUMENTS)
ROOM = LENGTH // RANKS
_DOCUMENT = [number for number, size in enumerate(DOCUMENTS) for _ in range(size)]
BOUND = -(-sum(size * (size + 1) // 2 for size in DOCUMENTS) // RANKS)


def parse(answer: object) -> list[list[int]]:
    """Return an answer as positions by rank; raise `Wrong` for anything that is no way to deal them out."""
    found = plain(answer)
    if not isinstance(found, list) or len(found) != RANKS:
        raise Wrong(f"this check takes {RANKS} lists of positions, one per rank")
    ranks: list[list[Any]] = [held if isinstance(held, list) else [held] for held in found]
    given = [position for held in ranks for position in held]
    if any(position is ... for position in given):
        raise Wrong("not answered yet: put the positions of each rank in place of the dots")
    if not all(type(position) is int for position in given):
        raise Wrong("positions are whole numbers, from 0")
    for position in range(LENGTH):
        if (times := given.count(position)) != 1:
            raise Wrong(f"position {position} is on {times} ranks; each of 0 to {LENGTH - 1} belongs to one")
    if len(given) != LENGTH:
        raise Wrong(f"there are positions 0 to {LENGTH - 1}, got {sorted(set(given) - set(range(LENGTH)))} as well")
    if (most := max(map(len, ranks))) > ROOM:
        raise Wrong(f"a rank has room for {ROOM} positions, and one would hold {most}")
    return ranks


def pairs(ranks: list[list[int]]) -> list[list[int]]:
    """Visible pairs by rank and step."""
    return [
        [sum(_sees(i, j) for i in held for j in ranks[(rank - step) % RANKS]) for step in range(RANKS)]
        for rank, held in enumerate(ranks)
    ]


def critical_path(ranks: list[list[int]]) -> int:
    """The sum over the steps of what the busiest rank computes.

    >>> critical_path([list(range(rank, 24, 4)) for rank in range(4)])
    52
    """
    return sum(max(step) for step in zip(*pairs(ranks), strict=True))


def _sees(i: int, j: int) -> bool:
    return j <= i and _DOCUMENT[i] == _DOCUMENT[j]
