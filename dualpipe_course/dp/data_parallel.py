"""Exercises of "Data parallel": two means, a step over unequal microbatches, a library that averages, a fair deal.

Chapter: book/dp/data-parallel.  Gradients are judged against one process in float64, messages by the ledger.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.differences import TOLERANCE, apart
from dualpipe_course.dp import shares
from dualpipe_course.plain import plain
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks, partial_score
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong

LENGTHS = (115, 4, 54, 46, 26, 7, 24, 87, 45, 91, 86, 16, 51, 60, 40, 48)  # tokens of each sequence of the puzzle
RANKS, LIMIT, IN_ORDER = 4, 200, 238
_OWN_TOKENS = (
    "each rank has divided by its own tokens, so what a token weighs depends on its rank: "
    "1/n of all n tokens is right for every one"
)
_WHY_ONCE = "Gradients are summed once per step, after the last microbatch."


def _slips(a: int, b: int, c: int, n: int) -> Known:
    loss, of_means = (a + b + c) / 8, a + b / 3 + c / 4
    no_rank = "the average divides by all 4 ranks, also by the one that adds nothing"
    return (
        ((of_means / 4, "that is the mean of means"), (2 * loss, "divide by the tokens, not by the ranks")),
        (
            (loss, f"that is the loss of the batch; the means are {a}, {b // 3} and {c // 4}"),
            (of_means // 3, no_rank),
            (of_means / 3, no_rank),
            (of_means, "an average divides by the number of ranks"),
        ),
        (
            (18 * n, "the sum runs once per step, after the third microbatch"),
            (
                4 * n,
                "each byte passes a rank twice, once as a partial sum and once finished; of both, 3/4 leave the rank",
            ),
            (8 * n, "a rank's own quarter does not travel: (N - 1) / N of it does, twice"),
            (3 * n, "that is the reduce-scatter alone; an all-gather of the finished sums follows"),
            (1.5 * n, "count bytes; a float32 has 4 of them"),
        ),
    )


def _deal(given: object) -> list[list[int]]:
    answer = plain(given)
    if not isinstance(answer, (list, tuple)) or len(answer) != RANKS:
        raise Wrong(f"this check takes {RANKS} lists of sequence numbers, one per rank")
    for rank, own in enumerate(answer):
        if not isinstance(own, (list, tuple)) or len(own) != len(LENGTHS) // RANKS:
            raise Wrong(f"rank {rank} needs a list of {len(LENGTHS) // RANKS} sequences, got {own!r}")
        if not all(type(i) is int and 0 <= i < len(LENGTHS) for i in own):
            raise Wrong(f"rank {rank}: sequences have the numbers 0 to {len(LENGTHS) - 1}, got {list(own)}")
    flat = sorted(i for own in answer for i in own)
    if twice := [i for i in set(flat) if flat.count(i) > 1]:
        raise Wrong(f"sequence {min(twice)} is dealt out twice; each goes to one rank")
    return [list(own) for own in answer]


def _step(rank: int, world_size: int, fn: Callable[..., Any], case: shares.Shares) -> tuple[shares.Grads, float]:
    model = shares.make_model()
    returned = fn(model, shares.microbatches(case, rank))
    return shares.grads_of(model), float(returned)


def _averaged(rank: int, world_size: int, fn: Callable[..., Any], case: shares.Shares) -> tuple[shares.Grads, int]:
    from torch import nn

    from dualpipe_lab import comm

    model, calls = shares.make_model(), []

    def average(module: nn.Module) -> None:
        calls.append(1)
        for parameter in module.parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, "average() needs a gradient on every rank"
                comm.all_reduce(parameter.grad, "avg")

    fn(model, *shares.microbatches(case, rank)[0], average)
    return shares.grads_of(model), len(calls)


def _judge_step(fn: Callable[..., Any]) -> str:
    cases: list[shares.Shares] = [
        [[3]], [[2], [2]], [[1], [3]], [[2, 1], [3, 3]], [[1, 4], [2], [5, 0, 3]], [[4], [0], [], [7, 2]],
    ]  # fmt: skip
    for case in cases:
        name = shares.named(case)
        results = on_ranks(_step, len(case), Without(fn, *shares.LIBRARY), case, case=name)
        grads, loss = shares.reference(case)
        for rank, (found, returned) in enumerate(results):
            if (problem := shares.why_different(found, grads, len(case))) is not None:
                raise Wrong(f"{name}: rank {rank}: {problem}")
            if not abs(returned - loss) <= TOLERANCE * max(1.0, loss):
                both = apart(returned, loss)
                whole = f"that of all tokens is {both.expected}{both.why}"
                raise Wrong(f"{name}: rank {rank} returned {both.found} as the loss, {whole}")
        shares.check_sums(results, shares.GRADIENT_BYTES, 32, name, _WHY_ONCE)
    return "gradients and loss equal one process on 6 batches, a rank without anything included; one sum per step"


def _judge_averaged(fn: Callable[..., Any]) -> str:
    cases: list[shares.Shares] = [[[2]], [[3], [3]], [[1], [2]], [[4], [0]], [[2], [1], [5]], [[1], [1], [4], [2]]]
    for case in cases:
        name = shares.named(case)
        results = on_ranks(_averaged, len(case), Without(fn, *shares.LIBRARY), case, case=name)
        grads, _ = shares.reference(case)
        for rank, (found, calls) in enumerate(results):
            if calls != 1:
                raise Wrong(f"{name}: rank {rank} called average() {calls} times; it is to be called once")
            if (problem := shares.why_different(found, grads, len(case))) is not None:
                if shares.why_different(found, shares.mean_of_means(case), len(case)) is None:
                    problem = _OWN_TOKENS
                raise Wrong(f"{name}: rank {rank}: {problem}")
        shares.check_sums(
            results, shares.GRADIENT_BYTES, 16, name, "average() sends the gradients; you need one number beside it."
        )
    return "gradients equal one process for equal and unequal shares, and average() ran once"


def _judge_fair_deal(answer: object) -> str:
    dealt = _deal(answer)
    tokens = [sum(LENGTHS[i] for i in own) for own in dealt]
    if max(tokens) > LIMIT:
        slowest = tokens.index(max(tokens))
        raise Wrong(
            f"rank {slowest} has {max(tokens)} tokens and all wait for it; {LIMIT} are possible. By rank: {tokens}",
            score=partial_score(max(tokens), IN_ORDER, LIMIT),
        )
    return f"{LIMIT} tokens on every rank, in the order of the file it were up to {IN_ORDER}"


numbers = Predict(
    "data_parallel-1",
    "Two means and a message",
    ("loss", "mean of means", "bytes sent"),
    lambda a, b, c, n: ((a + b + c) / 8, (a + b / 3 + c / 4) / 4, 6 * n),
    "add up to {a}, {b}, {c} and 0.",
    "{n:,} float32 parameters",
    minutes=6,
    points=1,
    trail=True,
    hints=(
        "The loss of the batch is the sum of all losses over the number of all tokens.",
        "The other one: 20/1, 12/3 and 16/4, and their mean over all four ranks. What does rank 3 contribute?",
        "An all-reduce sends 2 (N - 1) / N of its tensor from each rank, however many microbatches went before.",
    ),
    slips=_slips,
    a=(20, 12, 28, 36),
    b=(12, 9, 24, 36),
    c=(16, 8, 20, 32),
    n=(1000, 2000, 3000, 4000, 5000),
    called={"a": "losses", "b": "", "c": "", "n": "parameters"},
)

step = Implement(
    "data_parallel-2",
    "A step of unequal microbatches",
    "Write `data_parallel_step(model, microbatches)`: gradients and loss of the mean over all tokens of all ranks.",
    judge=_judge_step,
    minutes=30,
    points=4,
    hints=(
        "Count the valid targets of all your microbatches first, and add the counts up over the ranks: one number.",
        "Each microbatch adds cross_entropy(..., reduction='sum') / n to .grad. Nothing is sent between microbatches.",
        "A rank without a microbatch has .grad None. It must take part in the sum with zeros, or the others wait "
        "for it. The loss is a sum over the ranks too.",
    ),
)

averaged = Repair(
    "data_parallel-3",
    "Right in spite of the average",
    "Repair `backward_and_average(model, tokens, targets, average)` for ranks with unequal numbers of tokens.",
    judge=_judge_averaged,
    minutes=15,
    points=3,
    trail=True,
    hints=(
        "Try two ranks with 1 and 2 valid tokens. By what should each rank's loss be multiplied?",
        "average() adds up N gradients and divides by N. Whatever you put into it comes out N times too small.",
        "N times the sum of this rank's losses, divided by the tokens of all ranks. Use reduction='sum': "
        "a rank without a token then has loss 0. A mean over no token is NaN, though torch's gradient of it is 0.",
    ),
)

fair_deal = Puzzle(
    "data_parallel-4",
    "A fair deal",
    "Deal 16 sequences to 4 ranks, 4 to each, so that no rank has more than 200 tokens.",
    judge=_judge_fair_deal,
    minutes=15,
    points=2,
    hints=(
        "There are 800 tokens, so a perfect deal gives every rank 200. The longest sequence needs short company.",
        "Dealing the sorted sequences to and fro comes to 213: 115 then sits with 48, 46 and 4. Exchange pairs.",
        "Search: pick four that sum to 200 and hold the longest, then four of the rest with the longest of those.",
    ),
)
