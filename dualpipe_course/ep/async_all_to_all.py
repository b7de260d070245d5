"""Exercises of "Asynchronous all-to-all": what hides, the two halves of an exchange, a wait in the wrong line.

Chapter: book/ep/async-all-to-all.  Judged on the virtual clock: results, bytes and model time are exact.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.ep.overlapped import check_layer
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import check_ints, needs_function

NAMES = ("forward in turn", "forward overlapped", "backward overlapped", "saved per step")
EXPECTED = (37, 29, 38, 20)
_SLIPS = (
    {25: "there are two exchanges, one there and one back", 29: "in turn, the shared expert's time is added"},
    {37: "that is in turn; the shared expert runs beside one exchange", 25: "the exchange is longer than the job"},
    {
        34: "backwards the job is the longer one: the exchange ends before it",
        50: "that is in turn; the shared expert's 16 ms run beside one exchange",
        26: "the exchange of the results' gradients and the experts come first, and nothing runs beside them",
    },
    {8: "that is the forward's share; the backward saves too", 24: "forward the job is the shorter one: it hides 8"},
)
_HALVES = tuple(
    f"dualpipe_lab.ep.all_to_all:{name}"
    for name in ("dispatch", "combine", "Exchange", "Launch", "Complete", "start_dispatch", "start_combine")
)


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("async_all_to_all"), exercise)


@exercise(
    "async_all_to_all-1",
    "The shorter of two",
    "predict",
    minutes=5,
    points=1,
    hints=(
        "In turn everything adds up: two exchanges, the experts, the shared expert.",
        "Beside each other, an exchange and a job take as long as the longer of the two.",
        "What a direction saves is the shorter of the two; the step saves both.",
    ),
)
def numbers(answer: object) -> str:
    """Predict how long a layer takes with its shared expert beside the dispatch."""
    general = (
        "add up two exchanges, the experts and the shared expert",
        "the longer of exchange and shared expert, then the experts, then an exchange",
        "an exchange, the experts, then the longer of exchange and shared expert",
        "add what the two directions save",
    )
    check_ints(answer, NAMES, EXPECTED, _SLIPS, general)
    return "37 ms in turn, 29 overlapped, 38 backward, 20 saved per step"


@exercise(
    "async_all_to_all-2",
    "Two halves",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "start_rows(rows, splits) issues, also for gradients, and .wait() gives what arrived.",
        "Wait.backward issues the exchange of grad with splits.transposed, and must not wait for it.",
        "Issue.backward waits for what Wait.backward has issued, and returns that as the gradient of x.",
    ),
)
def halves(fn: Callable[..., Any]) -> str:
    """Write `start_dispatch(x, splits)`, whose `.wait()` gives the rows; both directions leave room for work."""
    needs_function(fn)
    case = "rows issued, the shared expert, rows waited for"
    found = check_layer(Without(lambda *parts: _beside(fn, *parts), *_HALVES), case, num_exchanges=4)
    if found.forward > 50:
        raise Wrong(f"{case}: the forward takes {found.forward:.0f} ms, 50 are enough: nothing ran beside the exchange")
    if found.backward > 80:
        raise Wrong(
            f"{case}: the forward overlaps. The backward takes {found.backward:.0f} ms, 80 are enough: who waits for "
            "the exchange of the gradient, and when?"
        )
    return "rows and gradients are right; 50 ms forward and 80 backward, with the shared expert beside the exchange"


@exercise(
    "async_all_to_all-3",
    "Nothing hides",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "All results are right. Write down when each line is done: an exchange takes 20 ms, the shared expert too.",
        "What lies between an issue and its wait runs beside it. What lies there now?",
        "The shared expert needs x alone. Call it after an issue, wait after that, and add its result at the end.",
    ),
)
def layer(fn: Callable[..., Any]) -> str:
    """Repair a layer whose asynchronous exchanges hide nothing."""
    needs_function(fn)
    found = check_layer(fn, "2 ranks", num_exchanges=4)
    for name, taken, best in (("forward", found.forward, 50), ("backward", found.backward, 80)):
        if taken > best:
            raise Wrong(
                f"2 ranks: results are right, and the {name} takes {taken:.0f} ms; {best} are enough. "
                "What runs between each issue and its wait?"
            )
    return "50 ms forward and 80 backward: the shared expert runs beside an exchange in both directions"


def _beside(fn: Callable[..., Any], x: Any, splits: Any, expert: Any, shared: Any) -> Any:
    """The answer in a layer: there beside the shared expert, and back."""
    travelling = fn(x, splits)
    other = shared(x)
    rows = expert(travelling.wait())
    return fn(rows, splits.transposed).wait() + other
