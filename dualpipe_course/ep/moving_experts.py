"""Exercises of "Experts that move": what a move sends, replicas that are near first, a norm that counts replicas.

Chapter: book/ep/moving-experts.  Judged with whole numbers: sums are exact in any order.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, check_ints, ended, needs_function

NAMES = ("slots that change", "experts that travel", "MiB in training", "MiB in serving", "tokens for the last")
EXPECTED = (5, 3, 63, 9, 3)
_SLIPS: tuple[dict[int, str], ...] = (
    {
        12: "compare slot by slot; most of them keep their expert",
        3: "two slots of rank 3 change as well, although nothing has to travel for them",
    },
    {
        5: "two slots of rank 3 take their experts from each other",
        4: "ranks 0 to 2 get one expert each, and rank 3 none",
    },
    {
        105: "a slot that takes its expert from its own rank sends nothing",
        54: "there are two moments and a master copy: 2 + 4 + 4 + 4 bytes per number",
        45: "there is a master copy, too: 2 + 4 + 4 + 4 bytes per number",
        21: "that is one expert",
    },
    {15: "a slot that takes its expert from its own rank sends nothing", 3: "that is one expert"},
    {2: "source rank 2 begins with the last replica, number 2", 7: "the three replicas take turns"},
)
_GENERAL = (
    "compare the two tables slot by slot",
    "of the slots that change, count those whose expert was on no slot of the same rank",
    "a number has 2 bytes as a weight, 4 in the master copy and 4 in each of two moments",
    "in serving a number has 2 bytes, and nothing else moves",
    "token t goes to the replica (2 + t) modulo 3",
)
# chosen experts, slots of each expert, source rank, slots of a rank, ranks of a node
CASES: tuple[tuple[list[int], list[list[int]], int, int, int], ...] = (
    ([0, 0, 0], [[0]], 0, 1, 1),
    ([0, 0, 0, 0], [[0, 1, 2]], 0, 3, 1),
    ([0, 0, 0, 0], [[0, 2]], 1, 2, 1),
    ([0, 1, 0, 1, 0], [[0, 3], [1, 2]], 0, 1, 2),
    ([0, 0, 0, 0, 0], [[0, 2, 5]], 3, 2, 2),
    ([0, 0, 1, 0, 1, 1], [[1, 4, 6], [0, 3, 5, 7]], 1, 2, 2),
    ([0, 0, 1, 0, 1, 1], [[1, 4, 6], [0, 3, 5, 7]], 3, 2, 2),
    ([2, 0, 2, 1, 0, 2, 2], [[0, 9], [4], [1, 2, 3, 8, 11]], 2, 2, 3),
    ([2, 0, 2, 1, 0, 2, 2], [[0, 9], [4], [1, 2, 3, 8, 11]], 5, 2, 3),
    ([1, 0, 1, 0, 0], [[6, 7], [4, 5]], 1, 2, 2),
    ([], [[0], [1]], 0, 1, 1),
)
# the expert in each slot, the number of ranks
TABLES: tuple[tuple[list[int], int], ...] = (
    ([0, 1, 2], 1),
    ([0, 1, 0, 2], 1),
    ([0, 1, 2, 3], 2),
    ([0, 1, 1, 0], 2),
    ([0, 0, 1, 2, 0, 2], 2),
    ([2, 1, 0, 2, 1, 2, 0, 2], 4),
)


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("moving_experts"), exercise)


@exercise(
    "moving_experts-1",
    "A move on four ranks",
    "predict",
    minutes=8,
    points=1,
    hints=(
        "Write the two tables below each other, three slots per rank, and mark the slots that differ.",
        "Rank 3 exchanges the experts of two of its slots. What does it have to receive?",
        "An expert has 3 * 1024 * 512 numbers: 3 MiB at 2 bytes, 21 MiB at 14 bytes.",
    ),
)
def numbers(answer: object) -> str:
    """Predict which slots a move changes, what travels in training and in serving, and how tokens are shared."""
    check_ints(answer, NAMES, EXPECTED, _SLIPS, _GENERAL)
    return "5 slots, 3 experts, 63 MiB in training and 9 MiB in serving; 3 tokens for the last replica"


@exercise(
    "moving_experts-2",
    "The nearest replica",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "Slot s is on rank s // slots_per_rank, and rank r on node r // ranks_per_node.",
        "Make three lists of an expert's slots: on this rank, on this node, all. The first that is not empty counts.",
        "Keep a counter for each expert. Token n of an expert, from 0, gets number (rank + n) modulo the length.",
    ),
)
def nearest(fn: Callable[..., Any]) -> str:
    """Write `slots_of(chosen, slots, rank, slots_per_rank, ranks_per_node)`: near replicas first, in turns."""
    needs_function(fn)
    given = [(list(case[0]), [list(row) for row in case[1]], *case[2:]) for case in CASES]
    for case, (is_fine, found) in zip(CASES, call_each(fn, given), strict=True):
        chosen, slots, rank, per_rank, per_node = case
        where = f"chosen {chosen}, slots {slots}, rank {rank}, {per_rank} slots a rank, {per_node} ranks a node"
        if not is_fine:
            raise Wrong(ended(where, found))
        _judge_nearest(where, plain(found), *case)
    return f"{len(CASES)} cases: own rank, own node, then anywhere, and replicas take turns"


@exercise(
    "moving_experts-3",
    "A norm that grows with the replicas",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "Two replicas on one rank are counted once. Where are the two replicas in the first case that is wrong?",
        "Every rank knows the whole table. Which one of an expert's slots can all ranks agree on without a message?",
        "A slot counts if no lower slot of the table, on any rank, has the same expert.",
    ),
)
def norm(fn: Callable[..., Any]) -> str:
    """Repair `squared(rows, table, rank)`, whose sum over the ranks counts some experts twice."""
    needs_function(fn)
    given, wanted = [], []
    for table, num_ranks in TABLES:
        size = len(table) // num_ranks
        for rank in range(num_ranks):
            rows = [[float(expert + 1), float(2 * expert)] for expert in table[rank * size :][:size]]
            given.append((rows, list(table), rank))
        wanted.append(sum(float((expert + 1) ** 2 + (2 * expert) ** 2) for expert in set(table)))
    results = call_each(fn, given)
    for (table, num_ranks), expected in zip(TABLES, wanted, strict=True):
        own, results = results[:num_ranks], results[num_ranks:]
        where = f"table {table} on {num_ranks} rank(s)"
        total = 0.0
        for is_fine, found in own:
            if not is_fine:
                raise Wrong(ended(where, found))
            value = plain(found)
            if not isinstance(value, int | float):
                raise Wrong(f"{where}: return one number, got {type(found).__name__}")
            total += value
        both = f"{where}: the ranks' squares sum to {total:g}, those of the experts to {expected:g}"
        if total > expected + 1e-9:
            raise Wrong(f"{both}; who counts?")
        if not total > expected - 1e-9:
            raise Wrong(f"{both}; an expert is left out")
    return f"every expert counts once in {len(TABLES)} tables"


def _judge_nearest(
    where: str, found: object, chosen: Sequence[int], slots: Sequence[Sequence[int]], rank: int, size: int, near: int
) -> None:
    if not isinstance(found, list) or len(found) != len(chosen) or not all(type(slot) is int for slot in found):
        raise Wrong(f"{where}: return a list with one slot for each of {len(chosen)} tokens, got {found}")
    turns = [0] * len(slots)
    for token, (expert, slot) in enumerate(zip(chosen, found, strict=True)):
        at = f"{where}: token {token}"
        if slot not in slots[expert]:
            raise Wrong(f"{at}: slot {slot} does not hold expert {expert}")
        own = [s for s in slots[expert] if s // size == rank]
        close = [s for s in slots[expert] if s // size // near == rank // near]
        allowed = own or close or list(slots[expert])
        if slot not in allowed:
            place = "on this rank" if own else "on this node"
            raise Wrong(f"{at}: slot {slot} is far away, and expert {expert} has a replica {place}")
        if slot != (right := allowed[(rank + turns[expert]) % len(allowed)]):
            raise Wrong(f"{at}: slot {slot} is near enough, but it is the turn of slot {right}")
        turns[expert] += 1
