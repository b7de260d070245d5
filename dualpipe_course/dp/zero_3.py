"""Exercises of "ZeRO-3": its numbers, a layer without its weight, a unit that is away, how far ahead to ask.

Chapter: book/dp/zero-3.  Gradients are judged against one process in float64; what is whole when is counted, and so is
what a layer keeps between forward and backward.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.dp import gathering
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.plain import plain
from dualpipe_course.trial import check_ints, needs_function, partial_score

NUMBERS = ("bytes held", "bytes sent", "all-gathers")
EXPECTED = (16800, 55800, 27)
_SLIPS = (
    {67200: "this is plain data parallelism; everything is dealt out to 4 ranks", 16000: "the root is dealt out too"},
    {
        18600: "this is one microbatch; there are 3",
        56700: "the root is gathered once per microbatch, for forward and backward together",
        74400: "(N - 1) / N: a rank's own shard does not travel",
        54000: "these are the units; the root travels too",
        37800: "units that are freed after the forward are gathered twice",
        12600: "this is plain data parallelism, two units of traffic per step",
    },
    {
        30: "the root is not freed after the forward, so it is gathered once per microbatch",
        24: "these are the units'; the root is gathered too",
        15: "units that are freed after the forward are gathered twice",
        9: "this is one microbatch; there are 3",
    },
)
SIZES, WORK, ROOM = (2, 2, 4, 1, 3, 3), (5, 3, 3, 1, 1, 4), 8  # of the puzzle: GB, ticks, GB
LAZY, BEST = 32, 20


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("zero_3"), exercise)


@exercise(
    "zero_3-1",
    "Four units and a tied root",
    "predict",
    minutes=10,
    points=1,
    hints=(
        "16 bytes for each of 4,200 parameters, dealt out to 4 ranks.",
        "Per microbatch a unit travels three times and the root twice, each time 3/4 of its bytes in bf16.",
        "Four units are gathered twice in each of 3 microbatches, the root once.",
    ),
)
def numbers(answer: object) -> str:
    """Predict bytes held, bytes sent and all-gathers of 4 units and a root on 4 ranks, 3 microbatches."""
    general = (
        "16 * 4,200 / 4",
        "3 / 4 of 3 * 3 * 8,000 bytes for the units and of 2 * 3 * 400 for the root",
        "3 * (2 * 4 + 1)",
    )
    check_ints(answer, NUMBERS, EXPECTED, _SLIPS, general)
    return "16,800 bytes held, 55,800 sent, 27 all-gathers"


@exercise(
    "zero_3-2",
    "A linear layer without its weight",
    "implement",
    minutes=30,
    points=4,
    hints=(
        "Write a torch.autograd.Function: its forward saves x and the shard, not W, and its backward gathers W again.",
        "With y = x W^T: dx = dy W and dW = dy^T x. The backward returns one gradient per argument, None for a number.",
        "Pad the flattened dW to N * len(shard) before the reduce-scatter, and cut it off the gathered W.",
    ),
)
def linear(fn: Callable[..., Any]) -> str:
    """Write a linear layer that gathers its weight in forward and backward and keeps none of it in between."""
    needs_function(fn)
    for num_ranks in (2, 1, 3, 4):
        gathering.check_linear(fn, num_ranks)
    return "two layers on 1 to 4 ranks: gradients of one process, two gathers and a scatter each, no weight kept"


@exercise(
    "zero_3-3",
    "Away when it is needed",
    "find the bug",
    minutes=20,
    points=3,
    hints=(
        "Which units have NaN in their gradients: the last one too?",
        "register_full_backward_hook calls its function when the gradients of the module's inputs have been computed.",
        "There is a hook that comes before the module's backward; or hook the output's gradient.",
    ),
)
def away(fn: Callable[..., Any]) -> str:
    """Repair the hooks of a unit whose weights are away in its backward."""
    needs_function(fn)
    for num_ranks, num_microbatches in ((1, 1), (2, 1), (2, 2), (3, 2)):
        gathering.check_connect(fn, num_ranks, num_microbatches)
    return "gradients of one process, two gathers per unit and microbatch, at most two units whole at once"


@exercise(
    "zero_3-4",
    "How far ahead",
    "puzzle",
    minutes=25,
    points=2,
    hints=(
        "Which units fit into 8 GB before the first forward?",
        "A long forward early on is time for the link. Let it work on unit 2 while unit 0 computes.",
        "Whenever a unit has been freed, ask for the next one that fits.",
    ),
)
def how_far_ahead(answer: object) -> str:
    """Choose when to ask for each of six units: within 8 GB, as few ticks as possible."""
    asked = _asked(answer)
    if (over := next((turn for turn in range(len(SIZES)) if _memory(asked, turn) > ROOM), None)) is not None:
        raise Wrong(f"before the forward of unit {over}, {_memory(asked, over)} GB are taken; there is room for {ROOM}")
    if (ticks := _ticks(asked)) > BEST:
        raise Wrong(f"it fits and takes {ticks} ticks; {BEST} are possible", score=partial_score(ticks, LAZY, BEST))
    return f"{BEST} ticks within {ROOM} GB, {sum(WORK)} of them work; one unit ahead takes 24"


def _asked(given: object) -> list[int]:
    answer = plain(given)
    if not isinstance(answer, (list, tuple)) or len(answer) != len(SIZES):
        raise Wrong(f"expected a list of {len(SIZES)} turns, one for each unit")
    if not all(type(turn) is int for turn in answer):
        raise Wrong("a turn is the whole number of a unit")
    if (late := next((unit for unit, turn in enumerate(answer) if not 0 <= turn <= unit), None)) is not None:
        raise Wrong(f"unit {late} is asked for at turn {answer[late]}; it is needed at turn {late}, and the first is 0")
    if any(first > second for first, second in pairwise(answer)):
        raise Wrong("units are asked for in their order, so that no turn may be before that of the unit before")
    return list(answer)


def _memory(asked: list[int], turn: int) -> int:
    return sum(size for unit, size in enumerate(SIZES) if unit >= turn and asked[unit] <= turn)


def _ticks(asked: list[int]) -> int:
    now, link, there = 0, 0, [0] * len(SIZES)
    for turn, work in enumerate(WORK):
        for unit in (unit for unit, when in enumerate(asked) if when == turn):
            there[unit] = link = max(now, link) + SIZES[unit]
        now = max(now, there[turn]) + work
    return now
