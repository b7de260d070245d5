"""Exercises of "Cross-entropy": bytes of a loss, loss and gradient, a maximum of one's own, a gather that sums.

Chapter: book/tp/cross-entropy.  Losses are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.tp import logits
from dualpipe_course.trial import check_ints, needs_function, on_ranks


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("cross_entropy"), exercise)


@exercise(
    "cross_entropy-1",
    "The bytes of a loss",
    "predict",
    minutes=12,
    points=1,
    hints=(
        "Three numbers per token: the maximum, the sum of exponentials, the target's logit. Four bytes each.",
        "An all-reduce sends 2 (t - 1) / t of its tensor from each rank, a gather (t - 1) / t of the whole result.",
        "Label smoothing spreads a part of the target over all entries: it needs the sum of all shifted logits too.",
    ),
)
def numbers(answer: object) -> str:
    """Predict bytes of the loss, of gathered logits, and of a smoothed loss: 4,096 tokens, 120,000 entries, 8 ranks."""
    slips = (
        {
            43_008: "each byte passes a rank twice, as a partial sum and finished",
            98_304: "of both ways, 7/8 leave the rank",
            57_344: "that is two numbers per token; the maximum is the third",
            114_688: "three numbers per token are enough without smoothing",
        },
        {
            983_040_000: "a rank's own eighth does not travel to it",
            1_720_320_000: "a gather passes each byte once, and a logit in bf16 has 2 bytes",
            430_080_000: "count bytes: a logit in bf16 has 2 of them",
        },
        {
            86_016: "smoothing needs a fourth number, the sum of all shifted logits",
            172_032: "one number more, not three",
        },
    )
    general = ("2 (t - 1) / t of 3 T numbers of 4 bytes", "7/8 of T V logits of 2 bytes", "one number more per token")
    names = ("bytes of the loss", "bytes of a gather", "bytes with smoothing")
    check_ints(answer, names, (86_016, 860_160_000, 114_688), slips, general)
    return "86,016 bytes instead of 860,160,000, and 114,688 with label smoothing"


@exercise(
    "cross_entropy-2",
    "Loss and gradient of one's own columns",
    "implement",
    minutes=25,
    points=4,
    hints=(
        "M = y.amax(1) and an all-reduce with 'max'. A rank without columns contributes -inf: build M with new_full.",
        "Clamp the column of targets that are not here, look up, and multiply by the mask; -100 is nobody's target.",
        "The gradient is softmax minus one-hot, zero where the target is -100, over max(n, 1) valid targets. "
        "All ranks have all targets, so n needs no message.",
    ),
)
def loss_and_gradient(fn: Callable[..., Any]) -> str:
    """Write `loss_and_gradient(y, targets, first)`: the mean loss and the gradient of this rank's logits."""
    needs_function(fn)
    for num_ranks, vocabulary in ((1, 4), (2, 16), (2, 7), (4, 8), (3, 4)):
        results = logits.run(fn, num_ranks, vocabulary, logits.CASES, means=True)
        logits.check_losses(results, vocabulary, logits.CASES)
        why = "Logits stay where they are, and the backward needs no message."
        logits.check_bytes(results, vocabulary, len(logits.CASES), why)
    return "loss and gradient equal one process on 25 batches, a rank without columns included; 3 numbers per token"


@exercise(
    "cross_entropy-3",
    "A maximum of one's own",
    "find the bug",
    minutes=5,
    points=2,
    hints=(
        "Put equal logits in: the result is right. What is different about ranks whose logits are not equal?",
        "Sums of exponentials may be added if the same number was subtracted from all logits of a token.",
        "One more all-reduce, of the maximum, before anything is subtracted. It is needed for the target as well.",
    ),
)
def losses(fn: Callable[..., Any]) -> str:
    """Repair `losses(y, targets, first)`, which gives too small a loss as soon as the ranks' maxima differ."""
    needs_function(fn)
    cases = logits.CASES[:3]
    for num_ranks, vocabulary in ((1, 4), (2, 16), (3, 7), (4, 8)):
        results = logits.run(fn, num_ranks, vocabulary, cases, means=False)
        logits.check_losses(results, vocabulary, cases)
        logits.check_bytes(results, vocabulary, len(cases), "One maximum per token is all that is missing.")
    return "the losses equal one process for any logits, +-8192 included"


@exercise(
    "cross_entropy-4",
    "The gradient of a gather",
    "find the bug",
    minutes=5,
    points=2,
    hints=(
        "Compare y.grad on 2 and on 4 ranks. By which factor do they differ?",
        "Every rank computes the same loss from the gathered logits. Is the gradient of a column to be added up?",
        "Look at the table in the docstring of dualpipe_lab.tp.mappings: which gather has a slice as its backward?",
    ),
)
def gathered(fn: Callable[..., Any]) -> str:
    """Repair `gathered_loss(y, targets)`: gather the logits, return the loss, leave its gradient in `y.grad`."""
    needs_function(fn)
    for num_ranks in (1, 2, 4):
        case = f"{num_ranks} rank(s)"
        results = on_ranks(_gathered, num_ranks, Without(fn, *logits.LIBRARY), case=case)
        logits.check_losses(results, 4 * num_ranks, logits.CASES[1:2])
        sent = results.ledger.sent() - results.ledger.sent("all_gather_single")
        if sent or results.ledger.count("all_gather_single", 0) != 1:
            raise Wrong(
                f"{case}: beside one gather the ranks sent {sent} bytes; the backward only picks this rank's columns, "
                "and that is no message"
            )
    return "loss and gradient equal one process on 1, 2 and 4 ranks, and the backward sent nothing"


def _gathered(rank: int, world_size: int, fn: Callable[..., Any]) -> list[logits.Found]:
    from torch.nn.functional import cross_entropy

    y, targets = logits.batch(logits.CASES[1], 4 * world_size)
    start, stop = 4 * rank, 4 * rank + 4
    part, whole = y[:, start:stop].clone().requires_grad_(), y.clone().requires_grad_()
    loss = float(fn(part, targets).detach())
    assert part.grad is not None, "y.grad is empty: call backward on a loss that depends on y"
    expected = cross_entropy(whole, targets)
    expected.backward()
    return [
        logits.Found([loss], part.grad.tolist(), [float(expected.detach())], whole.grad[:, start:stop].tolist(), [])
    ]
