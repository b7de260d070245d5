"""Exercises of "GQA": what a rank holds and sends, who reads which head.

Chapter: book/tp/gqa.
"""

from collections.abc import Callable, Iterator
from typing import Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

NAMES = ("KV head", "numbers held", "bytes cached", "bytes sent for copies")
_SLIPS = (
    {
        0: "neighbours share a KV head, and rank 2 has query heads 4 and 5; heads are not dealt out in turn",
        2: "there are two KV heads, 0 and 1, for four ranks",
    },
    {
        640: "W_k and W_v are two; and a rank has a whole head of each, never half of one",
        2560: "that is both KV heads; a rank's query heads read one of them",
        320: "a rank has a whole KV head, never half of one",
    },
    {
        32: "a float32 has 4 bytes",
        64: "keys and values are two, and a head of each is whole here",
        256: "that is both KV heads; this rank reads one",
        1024: "one KV head serves all query heads of its group; they have no keys of their own",
    },
    {
        0: "another rank holds the same KV head, and its query heads contribute to it",
        2560: "two gradients are summed, and what is sent passes twice: as a partial sum and finished",
        7680: "two ranks hold this head, not four",
        10240: "of two passes over 2 ranks, half of the bytes each leave a rank",
        1280: "count bytes: a float32 has 4",
    },
)


def _cases() -> Iterator[tuple[int, int, int, int]]:
    """Ranks, query heads and KV heads that divide, the smallest first."""
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
        return "return three sequences of numbers: query heads, KV heads, ranks"
    size, group = num_heads // num_ranks, num_heads // num_kv_heads
    if queries != list(range(rank * size, (rank + 1) * size)):
        return f"query heads {queries}; a rank has {size} neighbours, and rank 0 begins with head 0"
    read = sorted({query // group for query in queries})
    for query in queries:
        if query // group not in keys:
            return f"query head {query} is here, and the KV head that it reads is not among {keys}"
    if keys != read:
        return f"KV heads {keys}, while query heads {queries} read {len(read)}; name each of these once, in order"
    num_copies = max(num_ranks // num_kv_heads, 1)
    first = rank // num_copies * num_copies
    if missing := sorted(set(range(first, first + num_copies)) - set(holders)):
        return f"rank {missing[0]} reads the same KV heads, and is not among the ranks {holders}"
    if holders != list(range(first, first + num_copies)):
        return f"among the ranks {holders} is one whose query heads read other KV heads, or one twice"
    return None


def _judge_heads(fn: Callable[..., Any]) -> str:
    cases = list(_cases())
    for case, (fine, found) in zip(cases, call_each(fn, cases), strict=True):
        rank, num_ranks, num_heads, num_kv_heads = case
        where = f"rank {rank} of {num_ranks}, {num_heads} query heads and {num_kv_heads} KV head(s)"
        if not fine:
            raise Wrong(ended(where, found))
        if (problem := _why_heads(found, *case)) is not None:
            raise Wrong(f"{where}: {problem}")
    return f"query heads, KV heads and their holders are right in {len(cases)} cases, MQA and MHA included"


numbers = Predict(
    "gqa-1",
    "Eight heads that read two",
    NAMES,
    lambda d: (1, 80 * d, 8 * d, 320 * d),
    "2 KV heads of {d} features",
    minutes=8,
    points=1,
    hints=(
        "Four neighbours read one KV head. Rank 2 has query heads 4 and 5.",
        "One KV head of 16 features: 16 rows of 40 in W_k, and as many in W_v. Per token, 16 keys and 16 values.",
        "Two ranks hold it, so the sum sends 2 (2 - 1) / 2 of the bytes of dW_k and dW_v.",
    ),
    slips=_SLIPS,
    d=(16, *range(4, 97, 4)),
    called={"d": "features of a head"},
)

heads = Implement(
    "gqa-2",
    "Who reads what, and who else",
    "Write `heads_of(rank, num_ranks, num_heads, num_kv_heads)`: query heads, KV heads, ranks with these.",
    judge=_judge_heads,
    minutes=8,
    points=2,
    hints=(
        "The rank's query heads begin at rank * (num_heads // num_ranks).",
        "Query head i reads KV head i // (num_heads // num_kv_heads): take the first and the last query head.",
        "With more ranks than KV heads, num_ranks // num_kv_heads neighbours hold the same one; else a rank is alone.",
    ),
)
