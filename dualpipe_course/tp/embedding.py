"""Exercises of "Embedding": bytes and rows, a row that leaks, tokens that go on cut.

Chapter: book/tp/embedding.  Tables and gradients are whole numbers, so every bit is compared; messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, Unchanged, compare_on_ranks, other_dtype
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.switched_off import Without

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = tuple(  # switched off while an answer runs
    f"dualpipe_lab.tp.{name}" for name in ("embedding", "embedding:Lookup.forward", "lm_head")
)
WIDTH, TOKENS = 3, 12
CASES = ((1, 4), (2, 6), (2, 7), (4, 11), (3, 4))  # ranks and rows of the table; the last rank of the last has none


def _check(
    harness: Callable[..., Found], fn: Callable[..., Any], num_ranks: int, rows: int, times: int, because: str
) -> None:
    """Raise `Wrong` unless every rank has the rows of one process, for `times` the bytes of all tokens."""
    needed = times * TOKENS * WIDTH * 8
    words = f"the ranks sent {{found:,}} bytes in all, expected {{most:,}}. {because}"
    compare_on_ranks(
        harness,
        num_ranks,
        Without(fn, *LIBRARY),
        rows,
        case=f"{rows} rows on {num_ranks} rank(s)",
        why=_row_in_words,
        limits=[Limit("bytes", needed, words, needed)],
        tolerance=0,
        at=", rank {rank}: ",
    )


def _row_in_words(off: Off) -> str:
    what = "gradient of row" if off.name.startswith("gradient") else "row"
    if off.found is None:
        return f"a tensor of {what}s is needed"
    if off.has_other_shape:
        return f"{what}s of shape {list(off.found.shape)}, expected {list(off.expected.shape)}"
    place = off.place // WIDTH
    of = f"the {what} {place}" if what == "gradient of row" else f"the {what} of token {place}"
    known = f": {off.slip}" * bool(off.slip)
    return f"{of} is {off.found.row(place)}, expected {off.expected.row(place)}{known}"


def _batch(rows: int) -> "tuple[Tensor, Tensor, Tensor]":
    """Token ids with repetitions, a table without a zero, and gradients, all of whole numbers."""
    import torch

    ids = torch.arange(TOKENS) * 5 % rows
    ids[-4:] = rows - 1
    table = 1 + torch.arange(rows * WIDTH, dtype=torch.float64).view(rows, WIDTH)
    grad = 1 + torch.arange(TOKENS * WIDTH, dtype=torch.float64).view(TOKENS, WIDTH) % 7
    return ids, table, grad


def _table_gradient(ids: "Tensor", grad: "Tensor", rows: int) -> "Tensor":
    return grad.new_zeros(rows, WIDTH).index_add_(0, ids, grad)


def _look_up(rank: int, world_size: int, fn: Callable[..., Any], rows: int) -> Found:
    from dualpipe_lab.tp.shard import TensorParallel

    start, stop = TensorParallel().span(rows)
    ids, table, _ = _batch(rows)
    part = -(-rows // world_size)
    firsts = range(0, rows, part)
    leaked = table[ids] + sum(table[first] * (ids // part != first // part)[:, None] for first in firsts)
    own = table[start:stop].clone()
    unchanged = Unchanged(ids=ids, table=own)
    found = fn(ids, own, start)
    unchanged.check()
    slips = {
        "row 0 of another rank's part was added": Numbers.of(leaked),
        "the ranks' rows were not added up": Numbers.of(_own(ids, table, start, stop)),
    }
    rows_of = {"rows": Numbers.of(found)}
    return Found(rows_of, {"rows": Numbers.of(table[ids])}, {"rows": slips}, refused=other_dtype(table, found))


def _own(ids: "Tensor", table: "Tensor", start: int, stop: int) -> "Tensor":
    return table[ids] * ((ids >= start) & (ids < stop))[:, None]


def _tokens(rank: int, world_size: int, fn: Callable[..., Any], rows: int) -> Found:
    import torch

    from dualpipe_lab.tp.shard import TensorParallel

    start, stop = TensorParallel().span(rows)
    first, last = TensorParallel().span(TOKENS)
    ids, table, grad = _batch(rows)
    shard = table[start:stop].clone().requires_grad_()
    x = fn(ids, shard, start)
    x.backward(grad[first:last])
    assert shard.grad is not None, "the table has no gradient: return it second in backward"
    again = table[start:stop].clone().requires_grad_()
    fn(ids, again, start).sum().backward()  # its gradient is one number, expanded
    masked = grad.clone()
    masked[:first], masked[last:] = 0, 0
    own_sum, own_tokens = _own(ids, table, start, stop)[first:last], _table_gradient(ids, masked, rows)[start:stop]
    expected = {
        "rows": table[ids][first:last],
        "gradient": _table_gradient(ids, grad, rows)[start:stop],
        "gradient of a sum": _table_gradient(ids, torch.ones_like(grad), rows)[start:stop],
    }
    return Found(
        {"rows": Numbers.of(x), "gradient": Numbers.of(shard.grad), "gradient of a sum": Numbers.of(again.grad)},
        {name: Numbers.of(value) for name, value in expected.items()},
        {
            "rows": {"the ranks' rows were not added up": Numbers.of(own_sum)},
            "gradient": {"only this rank's tokens are in it": Numbers.of(own_tokens)},
        },
        refused=other_dtype(table, x),
    )


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


def _judge_look_up(fn: Callable[..., Any], num_ranks: Any, rows: Any) -> None:
    _check(_look_up, fn, num_ranks, rows, 2 * (num_ranks - 1), "One sum of the looked-up rows is all that travels.")


def _judge_tokens(fn: Callable[..., Any], num_ranks: Any, rows: Any) -> None:
    why = "A reduce-scatter forward and a gather backward are half a sum each."
    _check(_tokens, fn, num_ranks, rows, 2 * 2 * (num_ranks - 1), why)


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
    judge=_judge_look_up,
    right="the rows of one table on 1 to 4 ranks, one of them without a row",
    minutes=6,
    points=2,
    hints=(
        "Look up a token of rank 1 on two ranks. What does rank 0 contribute to it?",
        "A token of another rank is looked up at row 0 so that the index is legal. What has to become of the result?",
        "Zeros for all tokens that are not here. And a rank without rows has no row 0: index only with what is yours.",
    ),
)


tokens = Implement(
    "embedding-4",
    "Tokens that go on cut",
    "Write the function behind `look_up_tokens(ids, table, first)`: this rank's tokens, and their backward.",
    cases=CASES,
    judge=_judge_tokens,
    right="own tokens forward and all gradients backward, for the bytes of one sum",
    minutes=20,
    points=4,
    hints=(
        "Forward: a tensor of all tokens, own rows or zeros, then comm.reduce_scatter_single(own_tokens, all_tokens).",
        "Backward: grad is that of this rank's tokens. comm.all_gather_single(all_tokens, own_tokens) gives all of it.",
        "Then add up: new zeros of the table's shape, index_add_ with the rows that are here. Save rows and mask "
        "in the forward; collectives want contiguous tensors.",
    ),
)
