"""Exercises of "Zero Bubble": idle times where W is long, a split backward by hand, less room, gradients that add up.

Chapter: book/pp/zero-bubble.  Split backwards are judged word by word: results, matrix products, what is still held.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.pp import split_module, split_rows
from dualpipe_course.pp.programs import parse
from dualpipe_course.trial import needs_function, needs_ints, on_ranks, partial_score
from dualpipe_lab.pp.simulator import simulate

NUMBERS = ("idle ticks of ZB-H1", "idle ticks of ZB-H2", "ticks of a step without barriers")
EXPECTED = (9, 6, 75)  # p = 4, m = 8, F = 2, I = 3, W = 4
MISTAKES: tuple[dict[int, str], ...] = (
    {
        3: "that is the published form; while a rank waits for the first gradient to climb, no W is there to fill in",
        15: "that is the wait of a split backward that moves no W; three W of 4 ticks each can be moved into it",
        6: "no W enters the wait for F or for I; the longer of the two is left over, once per boundary",
        27: "that is 1F1B's",
    },
    {
        -9: "no idle time is less than nothing",
        0: "zero only without a barrier, and only if I is not longer than F or W by too much",
        3: "that is the idle time inside a row; with a barrier the shifted starts and ends count too",
        9: "that is H1's; I is longer than F here, so room for 7 helps with a barrier too",
    },
    {
        72: "this is one rank's work; I is a tick longer than F, and nothing fills that difference",
        78: "that is a step with a barrier",
        81: "that is a step of H1",
    },
)
# of the puzzle, all ticks 1
RANKS, MICROBATCHES, ROOM, TICKS, SLOWEST = 4, 6, (4, 3, 3, 3), 22, 27


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("zero_bubble"), exercise)


@exercise(
    "zero_bubble-1",
    "W is the longest",
    "predict",
    minutes=15,
    points=1,
    hints=(
        "The chapter's form for any room K: (p-1)(t_F+t_I) - min{(min(K,p)-1) t_I, (K-1) t_F, (K-1) t_W}.",
        "H1 has room for K = p = 4, H2 for K = 7. Which of the three terms is the least, each time?",
        "Without barriers the local bubble counts, the idle time inside a row: "
        "(p-1) max{0, t_I - t_F, t_F + t_I - 2 t_W}. Or simulate 3 steps with "
        "dualpipe_lab.pp.repeat.simulate_steps, and 4; what does the fourth add?",
    ),
)
def numbers(answer: object) -> str:
    """Predict the idle times of ZB-H1 and ZB-H2 for F, I, W = 2, 3, 4, and H2's step without barriers."""
    found = needs_ints(answer, NUMBERS)
    for name, value, expected, slips in zip(NUMBERS, found, EXPECTED, MISTAKES, strict=True):
        if value != expected:
            raise Wrong(f"{name} {value}: " + slips.get(value, "take the chapter's form and put in p = 4, m = 8"))
    return "9 and 6 idle ticks with a barrier, 75 ticks per step without one"


@exercise(
    "zero_bubble-2",
    "Two layers, six products",
    "implement",
    minutes=30,
    points=4,
    hints=(
        "With a = x W1^T, h = relu(a): da = dy W2 where h > 0 and zero elsewhere, dx = da W1. That is I.",
        "dW2 = dy^T h and dW1 = da^T x. So W needs x, h, da and dy, and I has already made da.",
        "Keep a tuple per microbatch in self.kept: (x, h) after the forward, (x, h, da, dy) after I; W pops it. "
        "The mask follows from h, so a is not kept.",
    ),
)
def split(cls: Callable[..., Any]) -> str:
    """Write an MLP with ReLU whose backward comes in two calls, each of two matrix products."""
    needs_function(cls)
    if problem := on_ranks(split_module.try_cases, 1, cls, case="calling your class")[0]:
        raise Wrong(problem)
    return f"{len(split_module.CASES)} orders: equal bit by bit, two products per call, nothing held after W"


@exercise(
    "zero_bubble-3",
    "Less room than H1",
    "puzzle",
    minutes=40,
    points=3,
    hints=(
        "Write I and W in place of each B first: 24 ticks, and the memory of 1F1B. Why is it quicker already?",
        "Rank 3 waits for nobody but rank 2. Let its W wait while it has room, so that its I come sooner.",
        "Ranks 0 and 1 may keep 1F1B's order, each I followed by its W. Rank 2 starts with three forwards. Rank 3 runs "
        "F0 I0 F1 I1, and at the end leaves three W for after its last I.",
    ),
)
def less_room(answer: object) -> str:
    """Find a program for 4 ranks and 6 microbatches: 22 ticks, activations within 4, 3, 3 and 3."""
    timeline = simulate(parse(answer, RANKS, MICROBATCHES))
    held = [timeline.peak_activations(rank) for rank in range(RANKS)]
    for rank, (number, room) in enumerate(zip(held, ROOM, strict=True)):
        if number > room:
            raise Wrong(
                f"{timeline.makespan} ticks, but rank {rank} holds {number} activations and has room for {room}; "
                "an activation is held until its W",
                picture=timeline,
            )
    if timeline.makespan > TICKS:
        raise Wrong(
            f"it fits, with {timeline.makespan} ticks; {TICKS} are possible",
            score=partial_score(timeline.makespan, SLOWEST, TICKS),
            picture=timeline,
        )
    return f"{timeline.makespan} ticks with {sum(held)} activations; 1F1B takes 27 with 10, ZB-H1 21 with 16"


@exercise(
    "zero_bubble-4",
    "Only the last one counts",
    "find the bug",
    minutes=15,
    points=2,
    hints=(
        "Run F0 I0 W0 F1 I1 W1 and compare with the two gradients alone: which one do you get?",
        "Run F0 I0 F1 I1 W0 W1. Which microbatch's gradient does W0 start from?",
        "Keep each microbatch's dy under its number, from I to W. If none is there, the W has come too early.",
    ),
)
def follow(fn: Callable[..., Any]) -> str:
    """Repair `follow(stage, row, inputs, dys)`, which replaces gradients and mixes up microbatches."""
    needs_function(fn)
    if problem := on_ranks(split_rows.try_rows, 1, fn, case="calling your function")[0]:
        raise Wrong(problem)
    return f"{len(split_rows.LEGAL)} rows add up, over two steps each; {len(split_rows.ILLEGAL)} wrong ones are refused"
