"""Exercises of "Interleaved and breadth-first": its numbers, and any number of microbatches.

Chapter: book/pp/interleaved.  Programs are judged by the validator and the simulator: ticks with free links and with
messages that take time, and what each rank holds.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.pp import gradients
from dualpipe_course.pp.loops import check_loop
from dualpipe_course.trial import call_each, ended, needs_function
from dualpipe_course.wrong import Wrong

NUMBERS = ("makespan", "peak of rank 0", "messages", "makespan for 2 microbatches")
MISTAKES = {
    270: "this is 1F1B; a rank waits for (p - 1) small stages, not for (p - 1) of its whole share",
    222: "divided by v twice: 2 and 4 ticks are those of a small stage already",
    702: "F takes 2 ticks and B 4 for one small stage; the three stages of a rank have 6 and 12 together",
}
UNITS = ("rank(s)", "microbatch(es)", "stage(s) per rank")
Size = tuple[int, ...]


def _try_sizes(fn: Callable[..., Any], sizes: Sequence[Size], units: Sequence[str], check: Callable[..., None]) -> int:
    """Call the learner's builder on every size without the library's; `check(answer, *size)` raises `Wrong`.

    The smallest size that fails is named.  Returns how many there were.
    """
    needs_function(fn)
    sizes = sorted(sizes, key=lambda size: (sum(size), size))
    results = call_each(gradients.without_library(fn), sizes)
    for size, (fine, value) in zip(sizes, results, strict=True):
        case = ", ".join(f"{number} {unit}" for number, unit in zip(size, units, strict=True))
        if not fine:
            raise Wrong(ended(case, value))
        try:
            check(value, *size)
        except Wrong as wrong:
            raise Wrong(f"{case}: {wrong.message}", picture=wrong.picture) from None
    return len(sizes)


def _judge_program(fn: Callable[..., Any]) -> str:
    sizes = [(p, m, v) for p in range(1, 5) for m in range(1, 10) for v in (1, 2, 3)]
    number = _try_sizes(fn, [*sizes, (4, 13, 2), (8, 20, 2), (8, 5, 3)], UNITS, check_loop)
    return f"{number} sizes: valid, no tick too many with free links and with slow ones, no activation too many"


numbers = Predict(
    "interleaved-1",
    "Four numbers of a loop",
    NUMBERS,
    lambda m, f, b: ((3 * m + 3) * (f + b), 5, 22 * m, 13 * (f + b)),
    "with {m} microbatches and three",
    "takes {f} ticks for F and {b} for B",
    minutes=10,
    points=1,
    hints=(
        "A rank works for v m small forwards and backwards. How long do the other ranks make it wait?",
        "Rank 0 holds (v - 1) p + 2 (p - 1) + 1 small stages. Three of them make one share.",
        "Each microbatch crosses v p - 1 boundaries down and as many up. For m < p, a lap takes p small stages, "
        "however few there are: max(m, p) stands in the formula where m stood.",
    ),
    slips=(
        MISTAKES,
        {
            15: "that many small stages; the unit asked for is a rank's whole share, three of them",
            4: "that is 1F1B's; the warm-up of a loop is staggered twice as deep",
            12: "that is breadth first's",
        },
        {
            72: "that is 1F1B's, without the loop",
            132: "that is one direction; gradients travel too",
            216: "from the last rank each microbatch goes on to rank 0, except at the end",
        },
        {54: "the formula for m >= p; 2 microbatches cannot keep 4 ranks busy for a lap"},
    ),
    m=(12, 8, 16, 20),
    f=(2, 3, 1),
    b=(4, 3, 5, 6),
    called={"m": "microbatches", "f": "F", "b": "B"},
)

program = Implement(
    "interleaved-2",
    "Any number of microbatches",
    "Write the interleaved order for any number of ranks, microbatches and stages per rank.",
    judge=_judge_program,
    minutes=35,
    points=4,
    hints=(
        "Make the sizes of the rounds first: m // p rounds, at least one. m % rounds of them get one more.",
        "Forwards: for each round, for each stage of the rank, for each microbatch of the round. "
        "Backwards: the same with the stages reversed.",
        "Warm up with (v - 1) times the first round's size, plus 2 (p - 1 - rank) forwards; then a forward and a "
        "backward in turn, as long as there are forwards. The larger rounds come first: why?",
    ),
)
