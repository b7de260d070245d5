"""Exercises of "Asynchronous all-to-all": what hides, the two halves of an exchange, a wait in the wrong line.

Chapter: book/ep/async-all-to-all.  Judged on the virtual clock: results, bytes and model time are exact.
"""

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from dualpipe_course import check as checks
from dualpipe_course.comparison import Found, Limit, Numbers, Off, compare_on_ranks
from dualpipe_course.exercise import exercise, hint_of
from dualpipe_course.meter import Meter
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import check_ints, needs_function
from dualpipe_lab.world.emulate.link import Link

if TYPE_CHECKING:
    from torch import Tensor


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
LINK = Link(gbps=0.0012)  # 3,000 bytes in 20 ms
TABLE, ROWS, COLUMNS = ((1, 3), (2, 2)), 4, 125  # every exchange takes as long as three rows
NUM_EXCHANGES = 4  # of rows, in both directions together


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
    _check_layer(
        Without(lambda *parts: _beside(fn, *parts), *_HALVES),
        case,
        "the forward takes {found:.0f} ms, {most} are enough: nothing ran beside the exchange",
        "the forward overlaps. The backward takes {found:.0f} ms, {most} are enough: who waits for the exchange of the "
        "gradient, and when?",
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
    forward, backward = (
        f"results are right, and the {way} takes {{found:.0f}} ms; {{most}} are enough. What runs between each "
        "issue and its wait?"
        for way in ("forward", "backward")
    )
    _check_layer(fn, "2 ranks", forward, backward)
    return "50 ms forward and 80 backward: the shared expert runs beside an exchange in both directions"


def _beside(fn: Callable[..., Any], x: Any, splits: Any, expert: Any, shared: Any) -> Any:
    """The answer in a layer: there beside the shared expert, and back."""
    travelling = fn(x, splits)
    other = shared(x)
    rows = expert(travelling.wait())
    return fn(rows, splits.transposed).wait() + other


def _check_layer(fn: Callable[..., Any], case: str, forward: str, backward: str) -> None:
    """Raise `Wrong` unless results, gradients, bytes and the model time of rank 0 are right.

    Args:
        fn: from `x`, splits, expert and shared expert to `y`.
        case: what is tried, in words.
        forward: the sentence if the forward takes too long.
        backward: the same of the backward.
    """
    needed = NUM_EXCHANGES // 2 * (TABLE[0][1] + TABLE[1][0]) * COLUMNS * 8
    sent = f"rank {{rank}} sent {{found}} bytes, {{most}} are {NUM_EXCHANGES} exchanges of rows"
    compare_on_ranks(
        _step,
        2,
        fn,
        case=case,
        why=_rows_in_words,
        limits=[
            Limit("bytes", needed, sent, needed, scope="each"),
            Limit("forward", [50, inf], forward, scope="each"),
            Limit("backward", [80, inf], backward, scope="each"),
        ],
        tolerance=0,
        clock="virtual",
        link=LINK,
    )


def _rows_in_words(off: Off) -> str:
    found = None if off.found is None else off.found.flat
    where = ": both experts' results, in their places" * (off.name == "y")
    return f"{off.name} is {found}, should be {off.expected.flat}{where}"


def _step(rank: int, world_size: int, fn: Callable[..., Any]) -> Found:
    import torch

    from dualpipe_lab.ep.all_to_all import Splits

    x = (10.0 * rank + 1 + torch.arange(ROWS).double()).repeat(COLUMNS, 1).t().contiguous().requires_grad_()
    meter = Meter()
    y = fn(x, Splits(TABLE[rank], (TABLE[0][rank], TABLE[1][rank])), _worker(rank + 2.0, 10), _worker(10.0, 20))
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"a tensor is needed, got {type(y).__name__}")
    forward = meter.lap()
    if y.requires_grad and y.shape == x.shape:
        y.backward((1 + torch.arange(ROWS).double()).unsqueeze(1).expand(-1, COLUMNS))
    backward = meter.lap()
    # row i of rank r: 10 r + i + 1; the expert of rank j multiplies by j + 2, the shared one by 10
    factors = torch.tensor([12.0 if i < TABLE[rank][0] else 13.0 for i in range(ROWS)], dtype=torch.float64)
    numbered = 1 + torch.arange(ROWS).double()
    return Found(
        {"y": Numbers.of(y[:, 0]), "dx": None if x.grad is None else Numbers.of(x.grad[:, 0])},
        {"y": Numbers.of((10.0 * rank + numbered) * factors), "dx": Numbers.of(factors * numbered)},
        costs={"forward": forward.ms, "backward": backward.ms},
    )


def _worker(factor: float, ms: float) -> Callable[["Tensor"], "Tensor"]:
    """A job: y = factor x, in `ms` forward and twice that backward."""
    import torch

    from dualpipe_lab.world import context

    class Work(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: "Tensor") -> "Tensor":
            context.compute(ms)
            return x * factor

        @staticmethod
        def backward(ctx: Any, grad: "Tensor") -> "Tensor":
            context.compute(2 * ms)
            return grad * factor

    return lambda x: Work.apply(x)
