"""Exercises of "Ring attention": pairs and bytes, both directions of a ring, a layout, an LSE that is not the row's.

Chapter: book/cp/ring-attention.  Numbers are judged against the formula, bytes by the ledger, overlap by model time.
The puzzle shards a packed sequence over the ranks of a ring:
  a query sees     the keys of its own document, up to itself
  a step           rank r has the block of rank r - i; it lasts as long as its busiest rank
  bound            all visible pairs over the ranks, rounded up
"""

from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course.cp.flash_attention import LIBRARY
from dualpipe_course.cp.rings import Case, check_backward, check_forward, check_parts
from dualpipe_course.cp.tiles import Row, check_kept
from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.plain import plain
from dualpipe_course.switched_off import AUTOGRAD, Without
from dualpipe_course.trial import partial_score
from dualpipe_course.variants import WORDS, Known
from dualpipe_course.wrong import Wrong

RING = tuple(f"dualpipe_lab.cp.{name}" for name in ("ring", "ring_attention", "all_gather_attention"))
NAMES = ("zigzag path", "contiguous path", "bytes forward", "bytes backward", "hops of a gradient")
CONTIGUOUS = 81  # the critical path of the two documents, cut contiguously
CASES = (
    Case("contiguous", 4, 1), Case("contiguous", 4, 2), Case("zigzag", 4, 2), Case("contiguous", 5, 2),
    Case("striped", 7, 3), Case("zigzag", 8, 2, 60.0), Case("zigzag", 16, 4), Case("contiguous", 5, 4),
)  # fmt: skip
EQUAL_CASES = (
    Case("contiguous", 4, 1), Case("contiguous", 4, 2), Case("zigzag", 8, 2, 30.0), Case("striped", 6, 3),
    Case("zigzag", 16, 4),
)  # fmt: skip
KEPT = [
    Row(2, (3,)), Row(2, (2, 2)), Row(4, (2, 2), 0), Row(4, (2, 2, 2), 1), Row(4, (2, 3, 1), -2),
    Row(2, (3, 3), None, 60.0), Row(3, (2, 1, 2), 0, 1.0, 1600.0),
]  # fmt: skip
PARTS = (
    (Case("contiguous", 4, 1), [4]), (Case("contiguous", 6, 2), [6]), (Case("contiguous", 6, 2), [2, 4]),
    (Case("striped", 5, 2), [1, 3, 1]), (Case("zigzag", 12, 3), [5, 7]), (Case("zigzag", 12, 3), [3, 1, 8]),
)  # fmt: skip
DOCUMENTS = (16, 8)  # lengths
RANKS, BUDGET = 4, 46
LENGTH = sum(DOCUMENTS)
ROOM = LENGTH // RANKS
_DOCUMENT = [number for number, size in enumerate(DOCUMENTS) for _ in range(size)]
BOUND = -(-sum(size * (size + 1) // 2 for size in DOCUMENTS) // RANKS)


def _ring_of(n: int, d: int) -> Sequence[int]:
    size = 32 // n
    hop = size * 2 * 2 * d * 2
    path = size * (size + 1) // 2 + (n - 1) * size**2
    return 32 * 33 // 2 // n, path, (n - 1) * hop, (n - 1) * hop + n * 2 * hop, n


def _slips(n: int, d: int) -> Known:
    size = 32 // n
    zigzag, path, forward, backward, _ = _ring_of(n, d)
    hop, hops, share = forward // (n - 1), WORDS[n - 1], {2: "half", 4: "a quarter", 8: "an eighth"}[n]
    plural = "s" if n > 2 else ""
    next_hop = {2: "second", 4: "fourth", 8: "eighth"}[n]
    return (
        (
            (n * zigzag, f"these are the pairs of all {WORDS[n]} ranks; they work at the same time"),
            (512 // n, "a triangle contains its diagonal: a query sees itself"),
            (path, "that is contiguous; under zigzag each rank has an early and a late chunk"),
            (n * size**2, "half of each block after the first is not seen"),
        ),
        (
            (zigzag, f"that is {share} of all pairs; the last rank has more, and the others wait"),
            (n * size**2, "the own block is a triangle"),
            (path - size, f"a triangle of {size} positions has {size} * {size + 1} / 2 pairs"),
        ),
        (
            (n * hop, f"a block visits the other {hops + ' ranks' if n > 2 else 'rank'} and needs no {next_hop} hop"),
            (forward // 2, "keys travel, and values too"),
            (hop, f"that is one hop; a rank passes on {hops} block{plural}"),
            (2 * forward, "there are 2 KV heads; queries stay at home"),
        ),
        (
            (forward, "gradients travel as well"),
            (backward - forward, "these are the gradients; keys and values go round once more"),
            (3 * forward, "gradients take one hop more than the blocks: they come home"),
            (forward + n * hop, "gradients are summed in float32, 4 bytes each"),
            (2 * forward, "that is the all-gather form"),
        ),
        (
            (n - 1, f"after {hops} hop{plural} all ranks have added to it, and it is not on its own rank"),
            (2 * n, "one way round is enough"),
        ),
    )


def _parse(answer: object) -> list[list[int]]:
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


def _pairs(ranks: list[list[int]]) -> list[list[int]]:
    """Visible pairs by rank and step."""
    return [
        [sum(_sees(i, j) for i in held for j in ranks[(rank - step) % RANKS]) for step in range(RANKS)]
        for rank, held in enumerate(ranks)
    ]


def _critical_path(ranks: list[list[int]]) -> int:
    """The sum over the steps of what the busiest rank computes.

    >>> _critical_path([list(range(rank, 24, 4)) for rank in range(4)])
    52
    """
    return sum(max(step) for step in zip(*_pairs(ranks), strict=True))


def _sees(i: int, j: int) -> bool:
    return j <= i and _DOCUMENT[i] == _DOCUMENT[j]


def _judge_forward(fn: Callable[..., Any], case: Any) -> None:
    check_forward(Without(fn, *LIBRARY, *RING), case)


def _judge_layout(answer: object) -> str:
    ranks = _parse(answer)
    path, budget, bound = _critical_path(ranks), BUDGET, BOUND
    if path > budget:
        steps = list(zip(*_pairs(ranks), strict=True))
        slowest = max(range(len(steps)), key=lambda i: max(steps[i]) - min(steps[i]))
        raise Wrong(
            f"the critical path is {path}, the budget {budget}; no layout is below {bound}. Least even is step "
            f"{slowest}, with {', '.join(map(str, steps[slowest]))} pairs on the four ranks",
            score=partial_score(path, CONTIGUOUS, bound),
        )
    return f"a path within {budget}; a ring cannot go below {bound}"


def _judge_whole_rows(fn: Callable[..., Any]) -> str:
    check_kept(Without(fn, *LIBRARY, *RING, *AUTOGRAD), KEPT)
    return f"gradients equal the formula in {len(KEPT)} cases, queries that see nothing of a block, or of any, included"


def _judge_part(fn: Callable[..., Any]) -> str:
    check_parts(fn, PARTS)
    return f"ids, labels and positions of every rank in {len(PARTS)} layouts, one document or several"


def _judge_backward(fn: Callable[..., Any], case: Any) -> None:
    check_backward(Without(fn, *LIBRARY, *RING, *AUTOGRAD), case)


numbers = Predict(
    "ring_attention-1",
    "Thirty-two positions",
    NAMES,
    _ring_of,
    "A causal ring of {n} ranks",
    "2 key and value heads of {d} numbers",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Zigzag gives every rank a quarter of 32 * 33 / 2 pairs, in every step. Contiguous: the last rank is busiest "
        "in all four steps.",
        "A block is 8 positions, keys and values, 2 heads of 8 numbers, 2 bytes: 512 bytes. Forward: three hops.",
        "Backward: the same three hops again, and four hops of gradients, with 4 bytes for each number.",
    ),
    slips=_slips,
    n=(4, 8, 2),
    d=(8, 4, 12, 16, 20, 24, 32, 40, 48, 64),
    called={"n": "ranks", "d": "numbers of a head"},
)

forward = Implement(
    "ring_attention-2",
    "The ring forward",
    "Write `ring_forward(q, k, v, where, attend)`: causal attention to the keys of all ranks.",
    cases=[(case,) for case in CASES],
    judge=_judge_forward,
    right=f"output and LSE equal one process in {len(CASES)} cases; every message hides behind work",
    minutes=30,
    points=5,
    hints=(
        "At step i, rank r has the block of rank (r - i) mod N. The last step sends nothing.",
        "Start comm.isend and comm.irecv of the next block before attend, and wait after it. Blocks differ in length: "
        "len(where[source]) says how long the coming one is.",
        "total = logaddexp(lse, block_lse); the weight of the block is exp(block_lse - total). Begin with the own "
        "block: then total is never -inf.",
    ),
)

layout = Puzzle(
    "ring_attention-3",
    "Two documents",
    "Deal out a sequence of two documents so that the ring's critical path is within the budget.",
    judge=_judge_layout,
    minutes=15,
    points=3,
    hints=(
        "The zigzag of the whole sequence has a path of 75, stripes have 52. What does zigzag assume about pairs?",
        "A document is a triangle of its own. What balances one triangle?",
        "Eight chunks of two positions of the first document, eight of one of the second. Which does rank 0 get?",
    ),
)

whole_rows = Repair(
    "ring_attention-4",
    "The LSE at hand",
    "Repair a backward that gives every block its own output and LSE.",
    judge=_judge_whole_rows,
    minutes=15,
    points=3,
    trail=True,
    hints=(
        "With a single block it is right. Give it two, and add up the dV of both: whose sum should that be?",
        "exp(s - lse) are a query's weights among all keys if lse is that of all keys. What makes one LSE of several?",
        "do . out is a sum over all keys too, so the blocks' outputs have to be merged: each counts by exp of its LSE "
        "less the merged one. Which queries have a merged LSE of -inf?",
    ),
)

part = Repair(
    "ring_attention-5",
    "First cut, then shifted",
    "Repair a function that gives a rank its part of a batch of packed documents.",
    judge=_judge_part,
    minutes=10,
    points=2,
    hints=(
        "Take 0 1 2 3 on two ranks. Which label has the last token of the first rank?",
        "Labels are a matter of the sequence, and so are its documents. RoPE asks where a token is in its document, "
        "not in the part.",
        "Make labels and positions for the whole sequence first, with the ends of documents in mind; cut them as the "
        "tokens are cut. Sums of the lengths say where a document ends.",
    ),
)

backward = Implement(
    "ring_attention-6",
    "The ring backward",
    "Write `ring_backward(do, q, k, v, out, lse, where)`: gradients of this rank's part of a causal ring.",
    cases=[(case,) for case in EQUAL_CASES],
    judge=_judge_backward,
    right=f"gradients equal one process in {len(EQUAL_CASES)} cases, at home after as many hops as there are ranks",
    minutes=20,
    points=4,
    hints=(
        "What a block's rank needs of the others is a sum over all queries: dK and dV travel with K and V, and every "
        "rank adds its part.",
        "Weights are exp(s - lse) with the lse that is given: that of all keys. Of a block alone they add up to less "
        "than 1.",
        "dS = P (dP - D), and D is dO . out, the sum of P dP over all keys. After N hops the block is on its own rank.",
    ),
)
