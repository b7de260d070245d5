"""Exercises of "Sparse mixture of experts": rows by hand, I and W of grouped products, a missing sort, a wrong divisor.

Chapter: book/ep/smoe.  Judged with whole numbers against one process: sums are exact in any order.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.ep.experts import GRIDS, GROUPS, ROUTINGS, check_backward, check_gradients, check_layer
from dualpipe_course.exercise import exercise, hint_of
from dualpipe_course.switched_off import AUTOGRAD, Without
from dualpipe_course.trial import check_ints, needs_function

NAMES = ("rows for expert 0", "rows for expert 1", "place on arrival", "place after regroup", "bytes forward")
EXPECTED = (5, 3, 2, 5, 320)
_SLIPS = (
    {2: "those are rank 0's own; rank 1's tokens choose expert 0 too", 3: "those come from rank 1 alone"},
    {1: "that is rank 0's own; rank 1's tokens choose expert 1 too", 2: "those come from rank 1 alone"},
    {5: "that is its place after the regroup; on arrival its own rank's rows lie together", 3: "places begin with 0"},
    {2: "that is its place on arrival; all rows of expert 0 come before it now", 6: "places begin with 0"},
    {
        160: "that is the dispatch; the combine sends the results of others' rows home",
        256: "the dispatch sends the slots for rank 1's experts alone, a row each of 32 bytes",
        512: "slots for its own experts do not travel",
        640: "that is the backward as well",
    },
)


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("smoe"), exercise)


@exercise(
    "smoe-1",
    "Eight tokens on two ranks",
    "predict",
    minutes=5,
    points=1,
    hints=(
        "Write the 8 slots of each rank with their experts, and sort them by expert, earlier slots first.",
        "Rank 0 receives its own slots for experts 0 and 1 first, then those of rank 1, each part sorted by expert.",
        "Bytes: 5 slots of rank 0 are for rank 1, and 5 rows of rank 1 were worked on here. A row has 32 bytes.",
    ),
)
def numbers(answer: object) -> str:
    """Predict which rows arrive at rank 0, where one of them lies, and what rank 0 sends."""
    general = (
        "count expert 0 in the choices of both ranks",
        "count expert 1 in the choices of both ranks",
        "rank 0's rows come first, sorted by expert",
        "the rows of expert 0 come first, then those of expert 1, each in the order of the ranks",
        "32 bytes for each row that rank 0 sends, there and back",
    )
    check_ints(answer, NAMES, EXPECTED, _SLIPS, general)
    return "5 and 3 rows, from place 2 to place 5, 320 bytes"


@exercise(
    "smoe-2",
    "I and W",
    "implement",
    minutes=10,
    points=3,
    hints=(
        "rows.split(counts) gives each expert's rows; y = x W^T for each of them, so dx = dy W and dW = dy^T x.",
        "dx has as many rows as y: join the experts' parts with torch.cat. dW has the weights' shape: torch.stack.",
        "An expert without rows has a matrix of zeros as dW. A product of [out, 0] and [0, in] is one.",
    ),
)
def backward(input_grad: Callable[..., Any], weight_grad: Callable[..., Any]) -> str:
    """Write the two halves of a grouped product's backward: `input_grad` and `weight_grad`."""
    needs_function(input_grad)
    needs_function(weight_grad)
    library = [f"dualpipe_lab.ep.moe.experts:{name}" for name in ("grouped_product", "grouped_weight_grad")]
    by_rows, by_weights = (Without(fn, *library, *AUTOGRAD) for fn in (input_grad, weight_grad))
    for counts in GROUPS:
        for are_whole in (True, False):
            check_backward(by_rows, by_weights, counts, are_whole)
    return f"both gradients are right for {len(GROUPS)} groupings, experts without rows included"


@exercise(
    "smoe-3",
    "Right with one expert per rank",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "On one rank with four experts it is right, on four ranks with four experts too. Print counts on two ranks.",
        "Rows arrive source by source, and each source's rows are sorted by expert. What do counts say about them?",
        "A second stable argsort, of the experts of the arriving rows, before the product; its inverse after it.",
    ),
)
def regrouped(fn: Callable[..., Any]) -> str:
    """Repair a layer that is right with one expert per rank."""
    needs_function(fn)
    for routing in ROUTINGS:
        check_layer(fn, *routing)
    return f"every token has its experts' results in {len(ROUTINGS)} cases, up to 4 experts per rank"


@exercise(
    "smoe-4",
    "A factor that depends on the grid",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "Whose tokens are in an expert's gradient before anything is summed?",
        "The router's gradients are right: a sum over all ranks, divided by the tokens of all ranks.",
        "Experts: a sum over the copies, divided by the tokens of all ranks, as the router's. No average.",
    ),
)
def scaled(fn: Callable[..., Any]) -> str:
    """Repair the sum of gradients of a layer whose experts have copies."""
    needs_function(fn)
    for grid in GRIDS:
        check_gradients(fn, *grid)
    return f"all gradients are those of the mean over all tokens on {len(GRIDS)} grids"
