"""Exercises of "Layouts for context parallelism": a window on three layouts, and a layout for two masks.

Chapter: book/cp/ring-layouts.  A query at position i sees the keys i - window + 1 to i, or all up to i.
  work of rank r in step s    its queries' pairs with keys of rank (r - s) mod c
  critical path               the sum over the steps of the busiest rank's pairs
"""

from collections.abc import Sequence

from dualpipe_course.declared import Predict, Puzzle
from dualpipe_course.plain import plain
from dualpipe_course.trial import partial_score
from dualpipe_course.wrong import Wrong

NAMES = ("visible pairs", "contiguous", "striped", "zigzag", "hops")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        136: "that is without the window",
        64: "the first three queries see fewer than four keys",
        74: "a window of 4 holds the query's own position and three before it",
    },
    {
        58: "that is without the window",
        10: "the first keys of a rank's block are seen from the block before as well: the second step is not empty",
        14: "three of the four queries see keys of the rank before: 3, 2 and 1 of them",
        26: "only the rank before is near enough: the later steps have no pairs",
    },
    {
        40: "that is without the window",
        4: "that is one step",
        14: "positions 0 to 2 make some ranks lighter, and the busiest rank counts",
        15: "in each step the busiest rank has 4 pairs",
    },
    {
        34: "that is without the window",
        16: "the ranks are busiest in different steps, so no single rank's pairs are the path",
        10: "that is the first step",
        20: "in the third step every rank has one pair",
        15: "the third and the fourth step have pairs too",
    },
    {
        3: "that is the ring of an unlimited mask; how far back does a window of 4 reach?",
        0: "the first queries of a block see keys of the block before",
        2: "the window reaches three positions back, and the block before has four",
    },
)

LENGTH, RANKS, ROOM, WINDOW, LOCAL = 24, 4, 6, 6, 5
BUDGET, START, LEAST = 248, 309, 240


def _window_on(length: int, window: int) -> Sequence[int]:
    size, half = length // 4, length // 8
    owners = (
        [position // size for position in range(length)],
        [position % 4 for position in range(length)],
        [min(position // half, 7 - position // half) for position in range(length)],
    )
    paths = [critical_path(work_of(owner, 4, window)) for owner in owners]
    visible = sum(min(window, position + 1) for position in range(length))
    return visible, *paths, -(-(window - 1) // size)


def work_of(owner: Sequence[int], num_ranks: int, window: int | None) -> list[list[int]]:
    """Visible pairs by rank and step.

    >>> work_of([0, 1, 0, 1], 2, None)
    [[3, 1], [3, 3]]
    """
    pairs = [[0] * num_ranks for _ in range(num_ranks)]
    seen = [0] * num_ranks
    for position, rank in enumerate(owner):
        seen[rank] += 1
        if window is not None and position >= window:
            seen[owner[position - window]] -= 1
        for other, count in enumerate(seen):
            pairs[rank][(rank - other) % num_ranks] += count
    return pairs


def critical_path(pairs: Sequence[Sequence[int]]) -> int:
    """The sum over the steps of what the busiest rank computes."""
    return sum(max(step) for step in zip(*pairs, strict=True))


def _parse(answer: object) -> list[int]:
    """Return an answer as the owner of every position; raise `Wrong` for anything that is no layout."""
    owner = plain(answer)
    if not isinstance(owner, list) or len(owner) != LENGTH:
        raise Wrong(f"this check takes a list of {LENGTH} ranks: the owner of each position")
    if any(type(rank) is not int or not 0 <= rank < RANKS for rank in owner):
        raise Wrong(f"an owner is a rank, 0 to {RANKS - 1}")
    for rank in range(RANKS):
        if (count := owner.count(rank)) != ROOM:
            raise Wrong(f"rank {rank} holds {count} positions; each rank holds {ROOM}")
    return owner


def _judge_two_masks(answer: object) -> str:
    owner = _parse(answer)
    local, full = (critical_path(work_of(owner, RANKS, window)) for window in (WINDOW, None))
    total = LOCAL * local + full
    words = f"{LOCAL} * {local} + {full} = {total} pairs"
    if total > BUDGET:
        raise Wrong(f"legal: {words}; the budget is {BUDGET}", score=partial_score(total, START, LEAST))
    return f"at most {BUDGET} pairs on the critical paths of six layers"


numbers = Predict(
    "ring_layouts-1",
    "A window on three layouts",
    NAMES,
    _window_on,
    "attends to {length} positions with a window of {window}.",
    minutes=12,
    points=2,
    hints=(
        "Query i sees min(4, i + 1) keys. Draw the band of 16 by 16, and colour the rows by rank.",
        "Of four keys in a row, the stripes give one to each rank. Of a contiguous block, who sees keys outside of it?",
        "Zigzag: rank 0 holds 0, 1, 14, 15 and rank 3 holds 6, 7, 8, 9. Which pairs lie between neighbours in chunks?",
    ),
    slips=_SLIPS,
    length=(16, 24, 32, 40),
    window=(4, 3, 5, 6, 7, 8),
)


two_masks = Puzzle(
    "ring_layouts-3",
    "One layout for two masks",
    "Lay 24 positions out on 4 ranks for five layers with a window and one without, in at most 248 pairs.",
    judge=_judge_two_masks,
    minutes=20,
    points=3,
    hints=(
        "Take stripes as a start: 34 pairs under the window, 84 without. Why is one rank the busiest in every full "
        "step?",
        "In stripes rank 3 is the last of every four. Who could be the last of the next four?",
        "Move the order on by one from each four positions to the next: 0 1 2 3, then 3 0 1 2, and so on.",
    ),
)
