"""Exercises of "LM head": what a rank holds and sends, words that do not exist.

Chapter: book/tp/lm-head.  Losses and gradients are judged against one process in float64.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course.comparison import Found, Numbers
from dualpipe_course.declared import Predict, Repair

TOKENS, WIDTH = 5, 3


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
