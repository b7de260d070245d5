"""Exercises of "All-to-all": what travels, the exchange with its gradient, a round trip that only even blocks survive.

Chapter: book/ep/all-to-all.  Rows and gradients are told apart by number, messages counted by the ledger.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.ep.exchanges import TABLES, check_bytes, check_exchange
from dualpipe_course.exercise import exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import check_ints, needs_function

NAMES = ("rows received", "bytes forward", "bytes backward", "bytes of counts")
EXPECTED = (7, 80, 64, 16)
_SLIPS = (
    {
        8: "that is what rank 1 sends: its row of the table; it receives a column",
        4: "the block for oneself is part of the output, though it does not travel",
    },
    {
        128: "the 3 rows for rank 1 itself stay where they are",
        320: "a row has 4 numbers of 4 bytes, 16 in all",
        64: "that is what rank 1 receives; it sends along its row of the table",
    },
    {
        80: "that is the forward; gradients go back to the ranks that the rows came from",
        112: "the gradients of its own 3 rows stay where they are",
        128: "backwards a rank sends as many rows as it received, its own left out",
    },
    {
        24: "the number for oneself does not travel",
        8: "one number of 8 bytes to each of the 2 others",
        4: "a count is a number of 8 bytes, and there are 2 others",
    },
)


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("all_to_all"), exercise)


@exercise(
    "all_to_all-1",
    "Rank 1 of three",
    "predict",
    minutes=5,
    points=1,
    hints=(
        "Rank 1 sends row 1 of the table and receives column 1; its own block is in both.",
        "What stays at home is not sent: in the forward that leaves one block, in the backward as well.",
        "A row is 4 float32, so 16 bytes. A count is an int64, and each other rank gets one.",
    ),
)
def numbers(answer: object) -> str:
    """Predict what rank 1 receives and sends for a table of counts."""
    general = (
        "add up column 1 of the table",
        "16 bytes for each row that rank 1 has for others",
        "16 bytes for each row that came from others",
        "8 bytes to each of the others",
    )
    check_ints(answer, NAMES, EXPECTED, _SLIPS, general)
    return "7 rows arrive, 80 bytes leave forward, 64 backward, 16 before the rows"


@exercise(
    "all_to_all-2",
    "Rows, there and back",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "dispatch: all_to_all_single on a tensor of N counts tells each rank its column. Then allocate, then rows.",
        "comm.all_to_all_single(output, input, output_split_sizes, input_split_sizes): which is which backwards?",
        "The rows for rank 0 must lie first: a stable argsort of `to` says which they are, a bincount how many. "
        "Gradients may be strided: send grad.contiguous(). The output keeps the type of x and the shape of its rows.",
    ),
)
def exchange(fn: Callable[..., Any]) -> str:
    """Write `dispatch(x, to)`: rows for this rank in the order of their sources, with gradients."""
    needs_function(fn)
    own = Without(fn, "dualpipe_lab.ep.all_to_all")
    for table in TABLES:
        check_exchange(own, table)
    for row in ((), (2, 2)):
        check_exchange(own, TABLES[3], row=row)
    check_bytes(own, TABLES[3])
    check_bytes(own, TABLES[-1])
    return f"rows and gradients are in their places for {len(TABLES)} tables, ranks without rows and rows of any shape"


@exercise(
    "all_to_all-3",
    "It works with even blocks",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "Print the rows that come back on 3 ranks with the table [[1, 2, 0], [0, 1, 2], [2, 0, 1]].",
        "The rows that a rank received are the ones it must send back. Which splits say how many those are?",
        "One rank has nothing to send. Who waits for it, and what else does it have to do in this function?",
    ),
)
def round_trip(fn: Callable[..., Any]) -> str:
    """Repair a round trip of rows: there, some work, and back to their places, for any table."""
    needs_function(fn)
    for table in TABLES:
        check_exchange(fn, table, returns=True)
    return f"every row comes back to its place for {len(TABLES)} tables, a rank without rows included"
