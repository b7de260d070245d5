"""Exercises of "Mixed-precision Adam": stairs and scales, one decision, the order of a step, rounding at random.

Chapter: book/dp/mixed-precision-adam.  Scales are judged step by step beside `torch.amp.GradScaler`, messages by the
ledger, gradients against float64, and rounding over every one of the equally likely noises.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.dp import precision
from dualpipe_course.exercise import exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import check_ints, needs_function

NAMES = ("steps until the copy moves", "last scale", "steps made", "bytes per parameter")
EXPECTED = (40, 512, 7, 7)
_LIBRARY = "dualpipe_lab.dp.mixed_precision:LossScaler."


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("mixed_precision_adam"), exercise)


@exercise(
    "mixed_precision_adam-1",
    "Four numbers",
    "predict",
    minutes=12,
    points=2,
    hints=(
        "Below 2, neighbouring bf16 numbers are 2^-7 apart. How far must the master be from 2 to be rounded to the "
        "next one?",
        "An overflow halves the scale and starts the count of good steps anew; so does a doubling.",
        "Working weights and gradients are whole on every rank; the master and both moments are divided by N.",
    ),
)
def numbers(answer: object) -> str:
    """Predict when a bf16 copy moves, where a scale ends, how many steps are made, and what a rank holds."""
    check_ints(
        answer,
        NAMES,
        EXPECTED,
        (
            {
                79: "at 0.0079 the master is a whole spacing away; it is rounded to the nearest, so half is enough",
                78: "at 0.0078 the master is a whole spacing away; it is rounded to the nearest, so half is enough",
                20: "2^-8 is the spacing below 1; between 1 and 2 it is twice that",
                39: "after 39 steps the master is 0.0039 below 2, and the middle between the two is 0.00390625 below",
            },
            {
                1024: "the last overflow comes after the scale has grown to 1024 again",
                256: "after the first overflow, three good steps in a row double the scale",
                2048: "the first two good steps do not count with those after the overflow",
            },
            {9: "an overflow is a step that nobody makes", 5: "only the two overflows are skipped"},
            {
                16: "that is a rank without ZeRO; the optimizer state is divided by 4",
                4: "ZeRO-1 divides the optimizer state alone; weights and gradients stay whole",
                10: "the 12 bytes of master and moments are divided by 4, not by 2",
                6: "the master is a part of the optimizer state: 4 + 4 + 4 bytes, divided by 4",
            },
        ),
        (
            "half of the spacing below 2 is 2^-8 = 0.00390625, and each step is 0.0001",
            "follow the nine steps one by one, with the scale and the count of good steps in a row",
            "count the steps without an overflow",
            "2 + 2 + (4 + 4 + 4) / 4",
        ),
    )
    return "40 steps of standstill, scale 512 after 7 of 9 steps, 7 bytes per parameter"


@exercise(
    "mixed_precision_adam-2",
    "One decision",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "Make one number of your own gradients: 1 if any element is inf or nan, else 0. isfinite() tells.",
        "comm.all_reduce(number, 'max') makes it everybody's. A rank without gradients takes part too.",
        "On overflow: scale times 0.5, good = 0. Otherwise good + 1, and when good reaches the interval: scale times "
        "2, good = 0.",
    ),
)
def all_step(fn: Callable[..., Any]) -> str:
    """Write `all_step(gradients, state)`: whether the ranks step, and the next scale; alike on all ranks."""
    needs_function(fn)
    precision.check_decisions(Without(fn, _LIBRARY + "update", _LIBRARY + "found_inf"))
    return "1 to 3 ranks, 40 steps: scales equal torch's GradScaler, one message of one number per step"


@exercise(
    "mixed_precision_adam-3",
    "The step that stays small",
    "find the bug",
    minutes=15,
    points=2,
    hints=(
        "Take one gradient of 0.5, a scale of 1024 and max_norm = 1, and follow the function by hand.",
        "max_norm is about the true gradient: divide by the scale before you take the norm.",
        "2^-20 / 1024 = 2^-30 is no fp16 number. In which type must the division be done?",
    ),
)
def prepare(fn: Callable[..., Any]) -> str:
    """Repair `prepare(gradients, scale, max_norm)`: fp32 gradients, unscaled, then clipped."""
    needs_function(fn)
    precision.check_prepared(fn)
    return "gradients on 1 to 3 ranks equal float64, clipped and not, and the smallest are still there"


@exercise(
    "mixed_precision_adam-4",
    "Round at random",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "x.view(torch.int32) gives the bits of an fp32 number. Its upper 16 bits are a bf16 number: x rounded towards "
        "zero.",
        "Add the noise to the bits. How often does a carry reach the upper half, if the lower half is one quarter of "
        "2^16?",
        "Clear the lower half with & -(2**16), look at the bits as fp32 again, and convert; inf and nan must not get "
        "noise.",
    ),
)
def round_at_random(fn: Callable[..., Any]) -> str:
    """Write `round_at_random(x, noise)`: fp32 to bf16, right on average over all noises."""
    needs_function(fn)
    precision.check_rounding(fn)
    return "over all 65,536 noises the mean is the number itself, to the last bit"
