"""Exercises of "Embedding": bytes and rows, a row that leaks.

Chapter: book/tp/embedding.  Tables are whole numbers, so every bit is compared; messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, Unchanged, other_dtype
from dualpipe_course.declared import Predict, Repair

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = tuple(  # switched off while an answer runs
    f"dualpipe_lab.tp.{name}" for name in ("embedding", "embedding:Lookup.forward", "lm_head")
)
WIDTH, TOKENS = 3, 12
CASES = ((1, 4), (2, 6), (2, 7), (4, 11), (3, 4))  # ranks and rows of the table; the last rank of the last has none


def _one_sum(num_ranks: int, rows: int) -> list[Limit]:
    needed = 2 * (num_ranks - 1) * TOKENS * WIDTH * 8
    words = (
        "the ranks sent {found:,} bytes in all, expected {most:,}. One sum of the looked-up rows is all that travels."
    )
    return [Limit("bytes", needed, words, needed)]


def _row_in_words(off: Off) -> str:
    if off.found is None:
        return "a tensor of rows is needed"
    if off.has_other_shape:
        return f"rows of shape {list(off.found.shape)}, expected {list(off.expected.shape)}"
    place = off.place // WIDTH
    known = f": {off.slip}" * bool(off.slip)
    return f"the row of token {place} is {off.found.row(place)}, expected {off.expected.row(place)}{known}"


def _batch(rows: int) -> "tuple[Tensor, Tensor]":
    """Token ids with repetitions, and a table of whole numbers without a zero."""
    import torch

    ids = torch.arange(TOKENS) * 5 % rows
    ids[-4:] = rows - 1
    table = 1 + torch.arange(rows * WIDTH, dtype=torch.float64).view(rows, WIDTH)
    return ids, table


def _look_up(rank: int, world_size: int, fn: Callable[..., Any], rows: int) -> Found:
    from dualpipe_lab.tp.shard import TensorParallel

    start, stop = TensorParallel().span(rows)
    ids, table = _batch(rows)
    part = -(-rows // world_size)
    firsts = range(0, rows, part)
    leaked = table[ids] + sum(table[first] * (ids // part != first // part)[:, None] for first in firsts)
    own = table[start:stop].clone()
    unchanged = Unchanged(ids=ids, table=own)
    found = fn(ids, own, start)
    unchanged.check()
    slips = {
        "row 0 of another rank's part was added": Numbers.of(leaked),
        "the ranks' rows were not added up": Numbers.of(table[ids] * ((ids >= start) & (ids < stop))[:, None]),
    }
    rows_of = {"rows": Numbers.of(found)}
    return Found(rows_of, {"rows": Numbers.of(table[ids])}, {"rows": slips}, refused=other_dtype(table, found))


_SLIPS = (
    {
        14_680_064: "each byte passes a rank twice, as a partial sum and finished",
        33_554_432: "of both ways, 7/8 leave the rank",
        16_777_216: "that is the tensor; an all-reduce sends 2 (t - 1) / t of it",
        58_720_256: "a number in bf16 has 2 bytes",
    },
    {29_360_128: "every rank has the gradient of x already, and adds up its own rows locally"},
    {
        6_283: "that is a full part; seven of them leave less for the last",
        6_282: "50,257 / 8 is rounded up for the first seven ranks",
    },
)


numbers = Predict(
    "embedding-1",
    "Rows and bytes",
    ("bytes forward", "bytes backward", "rows of the last rank"),
    lambda rows, h, tokens: (3.5 * tokens * h, 0, rows - 7 * -(-rows // 8)),
    "A table of {rows:,} rows with {h:,} numbers each",
    "A microbatch has {tokens:,} tokens",
    minutes=6,
    points=1,
    hints=(
        "The sum over the ranks is that of T h numbers, of 2 bytes each.",
        "An all-reduce sends 2 (t - 1) / t of its tensor. And which rank has everything that the backward needs?",
        "Seven ranks have 50,257 / 8, rounded up. The last rank has what is left.",
    ),
    slips=_SLIPS,
    rows=(50_257, 30_522, 32_003, 64_001),
    h=(4096, 2048, 8192),
    tokens=(2048, 512, 1024, 4096),
    called={"h": "numbers of a row"},
)

look_up = Repair(
    "embedding-2",
    "The row that leaks",
    "Repair `look_up(ids, table, first)`: the rows of all tokens, the same on every rank.",
    cases=CASES,
    run=_look_up,
    limits=_one_sum,
    why=_row_in_words,
    named="{1} rows on {0} rank(s)",
    tolerance=0,
    without=LIBRARY,
    right="the rows of one table on 1 to 4 ranks, one of them without a row",
    minutes=6,
    points=2,
    hints=(
        "Look up a token of rank 1 on two ranks. What does rank 0 contribute to it?",
        "A token of another rank is looked up at row 0 so that the index is legal. What has to become of the result?",
        "Zeros for all tokens that are not here. And a rank without rows has no row 0: index only with what is yours.",
    ),
)
