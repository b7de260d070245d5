"""Exercises of "1F1B basic": times and bytes of the serial order, a layer's way back, a router's gradient.

Chapter: book/ep/one-f-one-b-basic.  Gradients are judged against autograd on one process.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.ep.roads import CASES, check_backward
from dualpipe_course.exercise import exercise, hint_of
from dualpipe_course.switched_off import AUTOGRAD, Without
from dualpipe_course.trial import check_ints, needs_function

NAMES = ("pair", "waiting", "split backward", "bytes")
EXPECTED = (168, 48, 83, 12288)
_SLIPS = (
    {120: "that is the work; the ranks wait for the rows too", 148: "C and D travel in the backward too"},
    {24: "two journeys forward and two back", 36: "there are four layers"},
    {
        104: "that is the serial backward: M_W and A_W can run while rows travel",
        80: "the first C_B has nothing to hide behind",
        86: "D_B of a layer hides behind its M_W",
    },
    {
        16384: "a rank's own quarter does not travel",
        6144: "each token goes to 2 experts; or is that one direction?",
        3072: "those are the bytes of one layer",
        768: "that is one all-to-all",
        24576: "float32 has 4 bytes",
    },
)


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("one_f_one_b_basic"), exercise)


@exercise(
    "one_f_one_b_basic-1",
    "Four layers",
    "predict",
    minutes=10,
    points=1,
    hints=(
        "Forward: 2 pieces of work and 2 journeys per layer. Backward: 4 and 2.",
        "If M_W runs while D_B travels and A_W while the next C_B does, one journey is left: which?",
        "One all-to-all of a rank: 3 of 4 parts of 16 * 2 rows of 8 numbers of 4 bytes. How many per layer?",
    ),
)
def numbers(answer: object) -> str:
    """Predict times and bytes of a pair of four layers."""
    general = (
        "per layer 6 pieces of work and 4 journeys",
        "what the pair takes beyond its work",
        "4 pieces of work per layer, and the journey that nothing hides",
        "4 layers, 4 all-to-alls in each, (e - 1) / e of T k rows each",
    )
    check_ints(answer, NAMES, EXPECTED, _SLIPS, general)
    return "168 ticks, 48 of them waiting; the split backward takes 83; 12,288 bytes"


@exercise(
    "one_f_one_b_basic-2",
    "The way back",
    "implement",
    minutes=20,
    points=3,
    hints=(
        "exchange((w * dy) in the order of the experts) gives the gradients of h on the expert's rank.",
        "du = that * (1 - h^2). du @ W_M travels home: exchange it, and put it back into the order of the tokens.",
        "x_M gets three gradients: dy, what came home, and w_M's: dw * w * (1 - w) times w_R, with dw = <dy, y_M>.",
    ),
)
def way_back(fn: Callable[..., Any]) -> str:
    """Write `backward(W_A, w_R, W_M, saved, dy, exchange)`: dx and the gradients of the three weights."""
    needs_function(fn)
    check_backward(Without(fn, *AUTOGRAD))
    return f"all gradients equal autograd's on one process in {len(CASES)} cases, with two all-to-alls"


@exercise(
    "one_f_one_b_basic-3",
    "A router that learns from others",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "dW_M is right, so what travels is right. What does the router need of it?",
        "y = x_M + w_M y_M. Differentiate by w_M: does w_M itself occur in the result?",
        "y_M is in the order of the tokens. In which order is `rows`?",
    ),
)
def router(fn: Callable[..., Any]) -> str:
    """Repair a backward whose router gets a wrong gradient."""
    needs_function(fn)
    check_backward(fn)
    return f"all gradients equal autograd's on one process in {len(CASES)} cases"
