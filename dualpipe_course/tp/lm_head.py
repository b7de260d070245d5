"""Exercises of "LM head": what a rank holds and sends, words that do not exist, the likeliest word of all ranks.

Chapter: book/tp/lm-head.  Losses and gradients are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, compare_on_ranks
from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.switched_off import Without

if TYPE_CHECKING:
    pass

TOKENS, WIDTH = 5, 3


_TWO_SUMS = "the ranks sent {found:,} bytes in all; two all-reduces of one number per token: {most:,}"


def _entry_in_words(off: Off) -> str:
    assert off.found is not None, "return entries"
    if off.has_other_shape:
        return f"entries of shape {list(off.found.shape)}, expected {list(off.expected.shape)}"
    ours, theirs = int(off.found.flat[off.place]), int(off.expected.flat[off.place])
    rule = "of equal logits the smallest entry counts, also across ranks"
    return f"token {off.place} got entry {ours}, expected {theirs}; {rule}"


def _padded(rank: int, world_size: int, fn: Callable[..., Any], vocabulary: int, level: int) -> Found:
    import torch
    from torch.nn.functional import cross_entropy

    generator = torch.Generator().manual_seed(vocabulary)
    x, weight = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (TOKENS, vocabulary))
    if level:
        x[:, 0], weight[:, 0] = 1.0, level
    targets, part = (torch.arange(TOKENS) + 3) % vocabulary, -(-vocabulary // world_size)
    padding = weight.new_zeros(part * world_size - vocabulary, WIDTH)
    first = rank * part
    own = torch.cat([weight, padding])[first : first + part].clone().requires_grad_()
    own_x = x.clone().requires_grad_()
    loss = fn(own_x, own, targets, first, vocabulary)
    loss.backward()
    x.requires_grad_(), weight.requires_grad_()
    expected = cross_entropy(x @ weight.t(), targets)
    expected.backward()
    d_weight = torch.cat([weight.grad, padding])[first : first + part]
    names = ("the loss", "the gradient of x", "the gradient of the weight")
    found, right = (
        dict(zip(names, map(Numbers.of, values), strict=True))
        for values in ((loss, own_x.grad, own.grad), (expected, x.grad, d_weight))
    )
    return Found(found, right)


def _likeliest(rank: int, world_size: int, fn: Callable[..., Any], vocabulary: int, dtype: str) -> Found:
    import torch

    from dualpipe_lab.tp.shard import TensorParallel

    y = torch.randint(-9, 0, (TOKENS, vocabulary), generator=torch.Generator().manual_seed(3)).double()
    y[0, :], y[1, -1], y[2, 0] = -5, 8192, 8192
    y[3, 1], y[3, -1] = -0.5, -0.5
    y = y.to(getattr(torch, dtype))
    start, stop = TensorParallel().span(vocabulary)
    found = fn(y[:, start:stop].clone(), start)
    entries, expected = [int(entry) for entry in found], [row.index(max(row)) for row in y.tolist()]
    return Found({"entries": Numbers.of(entries)}, {"entries": Numbers.of(expected)})


_SLIPS = (
    {
        1_966_080_000: "that is what one rank alone would hold",
        122_880_000: "a logit in bf16 has 2 bytes",
        491_520_000: "a logit in bf16 has 2 bytes",
    },
    {
        58_720_256: "each byte passes a rank twice, as a partial sum and finished",
        67_108_864: "that is the tensor; an all-reduce sends 2 (t - 1) / t of it",
        134_217_728: "of both ways, 7/8 leave the rank",
    },
    {
        57_344: "that is one number per token",
        114_688: "that is two numbers per token; the maximum is the third",
        86_016: "each byte passes a rank twice",
    },
)


def _judge_likeliest(fn: Callable[..., Any]) -> str:
    library = ("dualpipe_lab.tp.mappings",)
    for num_ranks, vocabulary, dtype in (
        (1, 4, "float64"),
        (2, 40, "float64"),
        (3, 4, "float64"),
        (4, 39, "float64"),
        (2, 600, "bfloat16"),
    ):
        case = f"{vocabulary} entries on {num_ranks} rank(s)" + ", logits in bf16" * (dtype == "bfloat16")
        allowed = 2 * (num_ranks - 1) * 2 * TOKENS * 8
        compare_on_ranks(
            _likeliest,
            num_ranks,
            Without(fn, *library),
            vocabulary,
            dtype,
            case=case,
            why=_entry_in_words,
            limits=[Limit("bytes", allowed, _TWO_SUMS, least=allowed / 2)],
            tolerance=0,
            at=", rank {rank}: ",
        )
    return "the smallest of the largest, on 1 to 4 ranks, for two numbers per token"


numbers = Predict(
    "lm_head-1",
    "Held and sent",
    ("bytes of logits held", "bytes sent for dx", "bytes sent for the loss"),
    lambda tokens, words, t: (2 * tokens * words // t, 16_384 * tokens * (t - 1) // t, 24 * tokens * (t - 1) // t),
    "{tokens:,} tokens, ",
    "a vocabulary of {words:,} entries on {t} ranks",
    minutes=6,
    points=1,
    hints=(
        "A rank has the logits of 15,000 entries for every token, 2 bytes each.",
        "The gradient of x is summed: T h numbers of 2 bytes, and 2 (t - 1) / t of them leave each rank.",
        "The loss sums three numbers per token, of 4 bytes each.",
    ),
    slips=_SLIPS,
    tokens=(8192, 2048, 4096, 16_384),
    words=(120_000, 64_000, 96_000, 128_000),
    t=(8, 4, 16),
    called={"t": "ranks", "words": "vocabulary"},
)

padded = Repair(
    "lm_head-2",
    "Words that do not exist",
    "Repair `padded_loss(x, weight, targets, first, vocabulary_size)`, whose padding rows count as words.",
    cases=((1, 4, 0), (2, 8, 0), (2, 7, 0), (4, 9, 0), (4, 5, 0), (2, 7, -400)),
    run=_padded,
    named="{1} entries on {0} rank(s), logits near {2}",
    right="loss and gradients equal one process with 0 to 7 rows of padding",
    minutes=10,
    points=2,
    hints=(
        "With all logits 0, a vocabulary of 7 on 2 ranks has a loss of ln 8. Where does the eighth word come from?",
        "Column j of this rank is entry first + j. Entries from vocabulary_size on are padding.",
        "logits.masked_fill(is_padding, -torch.inf): the exponential is 0, and so is the gradient of the padding rows.",
    ),
)

likeliest = Implement(
    "lm_head-3",
    "The likeliest word",
    "Write `likeliest(y, first)`: the entry with the largest logit, the smallest of several, on every rank.",
    judge=_judge_likeliest,
    minutes=15,
    points=3,
    hints=(
        "First the largest logit of all ranks, by an all-reduce with 'max'. A rank without columns contributes -inf.",
        "A rank with a logit equal to it knows an entry: first + column. What do all others contribute to a 'min'?",
        "A number larger than any entry. Of several equal columns take the smallest: (y == M).int().argmax(1).",
    ),
)
