"""Exercises of "GQA": what a rank holds and sends, who reads which head, the backward of the projections, a step.

Chapter: book/tp/gqa.  Gradients and weights are judged against one process, messages by the ledger.
"""

from collections.abc import Callable, Iterator
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.tp import copies
from dualpipe_course.trial import call_each, check_ints, ended, needs_function

NAMES = ("key head", "numbers held", "bytes cached", "bytes sent for copies")
EXPECTED = (1, 1280, 128, 5120)
_SLIPS = (
    {
        0: "neighbours share a key head, and rank 2 has query heads 4 and 5; heads are not dealt out in turn",
        2: "there are two key heads, 0 and 1, for four ranks",
    },
    {
        640: "W_k and W_v are two; and a rank has a whole head of each, never half of one",
        2560: "that is both key heads; a rank's query heads read one of them",
        320: "a rank has a whole key head, never half of one",
    },
    {
        32: "a float32 has 4 bytes",
        64: "keys and values are two, and a head of each is whole here",
        256: "that is both key heads; this rank reads one",
        1024: "one key head serves all query heads of its group; they have no keys of their own",
    },
    {
        0: "another rank holds the same key head, and its query heads contribute to it",
        2560: "two gradients are summed, and what is sent passes twice: as a partial sum and finished",
        7680: "two ranks hold this head, not four",
        10240: "of two passes over 2 ranks, half of the bytes each leave a rank",
        1280: "count bytes: a float32 has 4",
    },
)


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("gqa"), exercise)


@exercise(
    "gqa-1",
    "Eight heads that read two",
    "predict",
    minutes=8,
    points=1,
    hints=(
        "Four neighbours read one key head. Rank 2 has query heads 4 and 5.",
        "One key head of 16 features: 16 rows of 40 in W_k, and as many in W_v. Per token, 16 keys and 16 values.",
        "Two ranks hold it, so the sum sends 2 (2 - 1) / 2 of the bytes of dW_k and dW_v.",
    ),
)
def numbers(answer: object) -> str:
    """Predict what rank 2 of 4 holds, caches and sends for its copy of a key head."""
    general = (
        "query head i reads key head i // 4",
        "16 rows of 40, twice",
        "16 keys and 16 values of 4 bytes",
        "2 (1 - a_kv / t) of the bytes of dW_k and dW_v",
    )
    check_ints(answer, NAMES, EXPECTED, _SLIPS, general)
    return "key head 1, 1,280 numbers held, 128 bytes cached per token, 5,120 sent for the copies"


@exercise(
    "gqa-2",
    "Who reads what, and who else",
    "implement",
    minutes=8,
    points=2,
    hints=(
        "The rank's query heads begin at rank * (num_heads // num_ranks).",
        "Query head i reads key head i // (num_heads // num_kv_heads): take the first and the last query head.",
        "With more ranks than key heads, num_ranks // num_kv_heads neighbours hold the same one; else a rank is alone.",
    ),
)
def heads(fn: Callable[..., Any]) -> str:
    """Write `heads_of(rank, num_ranks, num_heads, num_kv_heads)`: query heads, key heads, ranks with these."""
    cases = list(_cases())
    for case, (fine, found) in zip(cases, call_each(fn, cases), strict=True):
        rank, num_ranks, num_heads, num_kv_heads = case
        where = f"rank {rank} of {num_ranks}, {num_heads} query heads and {num_kv_heads} key head(s)"
        if not fine:
            raise Wrong(ended(where, found))
        if (problem := _why_heads(found, *case)) is not None:
            raise Wrong(f"{where}: {problem}")
    return f"query heads, key heads and their holders are right in {len(cases)} cases, MQA and MHA included"


@exercise(
    "gqa-3",
    "Three weights behind one input",
    "implement",
    minutes=12,
    points=3,
    hints=(
        "x was read three times on every rank: add the three parts of dx at home, then sum once over all ranks.",
        "d_keys has what this rank's query heads contribute; others read the same key head on the ranks of `copies`.",
        "dk = d_keys.T @ x is linear in d_keys: sum dk and dv over `copies`. dx needs nothing more than its sum.",
    ),
)
def projections(fn: Callable[..., Any]) -> str:
    """Write `projections_backward(d_queries, d_keys, d_values, x, q, k, v, copies)`: dx, dq, dk and dv."""
    needs_function(fn)
    for case in copies.CASES:
        copies.check_projections(fn, *case)
    return f"all gradients equal one process in {len(copies.CASES)} cases, with and without copies; no byte too many"


@exercise(
    "gqa-4",
    "Copies that go their own ways",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "Four query heads read one key head on four ranks. Compare its four copies after a step.",
        "Each copy has the gradient that its own query heads ask for. Who has the others?",
        "All-reduce the gradients of layer.k and layer.v over layer.replicas, once, after the last microbatch; or call "
        "sum_partial_gradients of dualpipe_lab.tp.grads there.",
    ),
)
def step(fn: Callable[..., Any]) -> str:
    """Repair a training step after which the copies of a key head differ."""
    needs_function(fn)
    for case in copies.STEPS:
        copies.check_step(fn, *case)
    return f"all weights equal one process in {len(copies.STEPS)} cases of 1 to 3 microbatches, and the copies agree"


def _cases() -> Iterator[tuple[int, int, int, int]]:
    """Ranks, query heads and key heads that divide, the smallest first."""
    for num_ranks in (1, 2, 3, 4, 6, 8):
        for num_heads in (1, 2, 4, 6, 8, 12):
            for num_kv_heads in range(1, num_heads + 1):
                fits = num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0
                if fits and num_heads % num_kv_heads == 0 and num_heads % num_ranks == 0:
                    yield from ((rank, num_ranks, num_heads, num_kv_heads) for rank in range(num_ranks))


def _why_heads(found: Any, rank: int, num_ranks: int, num_heads: int, num_kv_heads: int) -> str | None:
    try:
        queries, keys, holders = (list(map(int, part)) for part in found)
    except (TypeError, ValueError):
        return "return three sequences of numbers: query heads, key heads, ranks"
    size, group = num_heads // num_ranks, num_heads // num_kv_heads
    if queries != list(range(rank * size, (rank + 1) * size)):
        return f"query heads {queries}; a rank has {size} neighbours, and rank 0 begins with head 0"
    read = sorted({query // group for query in queries})
    for query in queries:
        if query // group not in keys:
            return f"query head {query} is here, and the key head that it reads is not among {keys}"
    if keys != read:
        return f"key heads {keys}, while query heads {queries} read {len(read)}; name each of these once, in order"
    num_copies = max(num_ranks // num_kv_heads, 1)
    first = rank // num_copies * num_copies
    if missing := sorted(set(range(first, first + num_copies)) - set(holders)):
        return f"rank {missing[0]} reads the same key heads, and is not among the ranks {holders}"
    if holders != list(range(first, first + num_copies)):
        return f"among the ranks {holders} is one whose query heads read other key heads, or one twice"
    return None
