"""Exercises of "Asynchronous all-to-all": what hides, a wait in the wrong line.

Chapter: book/ep/async-all-to-all.  Judged on the virtual clock: results, bytes and model time are exact.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from dualpipe_course.comparison import Found, Limit, Numbers, Off, compare_on_ranks
from dualpipe_course.declared import Predict, Repair
from dualpipe_course.meter import Meter
from dualpipe_lab.launch.emulator import Link

if TYPE_CHECKING:
    from torch import Tensor


Table = tuple[tuple[int, int], tuple[int, int]]  # rows from rank r to rank j
NAMES = ("forward in turn", "forward overlapped", "backward overlapped", "saved per step")
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
TABLES: tuple[Table, ...] = (((1, 3), (2, 2)), ((0, 0), (3, 1)))  # every exchange takes as long as three rows
COLUMNS = 125
EXCHANGE_MS = 20


def _check_times(
    harness: Callable[..., Found],
    fn: Callable[..., Any],
    case: str,
    calls: int,
    columns: int,
    ms: Sequence[int],
    forward: str,
    backward: str,
) -> None:
    """Raise `Wrong` unless results, gradients, bytes, exchanges and the model time of rank 0 are right.

    Args:
        harness: calls the answer on a rank.
        fn: the answer.
        case: what is tried, in words.
        calls: exchanges that each rank takes part in.
        columns: numbers of a row that travels.
        ms: milliseconds of rank 0 that are enough, forward and backward.
        forward: the sentence if the forward takes too long.
        backward: the same of the backward.
    """
    sent = f"rank {{rank}} sent {{found}} bytes, {{most}} are {calls} exchanges of rows"
    made = "rank {rank} took part in {found} exchanges, {most} are needed"
    for table in TABLES:
        needed = calls // 2 * (table[0][1] + table[1][0]) * columns * 8
        compare_on_ranks(
            harness,
            2,
            fn,
            table,
            case=case if any(table[0]) else f"{case}, rank 0 without rows",
            why=_rows_in_words,
            limits=[
                Limit("bytes", needed, sent, needed, scope="each"),
                Limit("calls", calls, made, calls, scope="each"),
                Limit("forward", [ms[0], inf], forward, scope="each"),
                Limit("backward", [ms[1], inf], backward, scope="each"),
            ],
            tolerance=0,
            clock="virtual",
            link=Link(gbps=3 * columns * 8 * 8 / (EXCHANGE_MS * 1e6)),
        )


def _rows_in_words(off: Off) -> str:
    found = None if off.found is None else off.found.flat
    place = {"y": ": both experts' results, in their places", "weights": ": each weight comes with its row"}
    return f"{off.name} is {found}, should be {off.expected.flat}{place.get(off.name, '')}"


def _numbered(rank: int, table: Table, first: float = 1) -> "Tensor":
    """Rows of equal numbers: row i of a rank is 10 rank + first + i."""
    import torch

    column = 10.0 * rank + first + torch.arange(sum(table[rank])).double()
    return column.repeat(COLUMNS, 1).t().contiguous().requires_grad_()


def _experts_of(rank: int, table: Table) -> tuple["Tensor", "Tensor"]:
    """For each row the factor of the expert that it goes to, rank + 2, and the gradient of its result."""
    import torch

    factors = [2.0] * table[rank][0] + [3.0] * table[rank][1]
    return torch.tensor(factors, dtype=torch.float64), 1 + torch.arange(len(factors)).double()


def _splits_of(rank: int, table: Table) -> Any:
    from dualpipe_lab.ep.all_to_all import Splits

    return Splits(table[rank], (table[0][rank], table[1][rank]))


def _tensors(found: Any, of: str) -> None:
    import torch

    if not (isinstance(found, (tuple, list)) and len(found) == 2 and all(isinstance(y, torch.Tensor) for y in found)):
        raise TypeError(f"two tensors are needed, {of}, got {type(found).__name__}")


def _first(x: "Tensor | None") -> "Numbers | None":
    """The first column of rows, or the whole of a vector."""
    return None if x is None else Numbers.of(x[:, 0] if x.dim() > 1 else x)


def _in_two(rank: int, world_size: int, fn: Callable[..., Any], table: Table) -> Found:
    """The layer of two microbatches."""
    import torch

    xs = _numbered(rank, table), _numbered(rank, table, 5)
    meter = Meter()
    found = fn(*xs, _splits_of(rank, table), _worker(rank + 2.0, 10))
    _tensors(found, "the results of both microbatches")
    forward = meter.lap()
    factors, grad = _experts_of(rank, table)
    if all(y.requires_grad and y.shape == x.shape for x, y in zip(xs, found, strict=True)):
        torch.autograd.backward(list(found), [k * grad.unsqueeze(1).expand(-1, COLUMNS).contiguous() for k in (1, 2)])
    backward = meter.lap()
    names = {f"y of microbatch {k}": _first(y) for k, y in enumerate(found)}
    names |= {f"dx of microbatch {k}": _first(x.grad) for k, x in enumerate(xs)}
    expected = [Numbers.of(x.detach()[:, 0] * factors) for x in xs] + [Numbers.of(k * grad * factors) for k in (1, 2)]
    return Found(names, dict(zip(names, expected, strict=True)), costs={"forward": forward.ms, "backward": backward.ms})


def _worker(factor: float, ms: float) -> Callable[["Tensor"], "Tensor"]:
    """A job: y = factor x, in `ms` forward and twice that backward."""
    import torch

    from dualpipe_lab.launch import context

    class Worker(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: "Tensor") -> "Tensor":
            context.compute(ms)
            return x * factor

        @staticmethod
        def backward(ctx: Any, grad: "Tensor") -> "Tensor":
            context.compute(2 * ms)
            return grad * factor

    return lambda x: Worker.apply(x)


def _judge_layer(fn: Callable[..., Any]) -> str:
    forward, backward = (
        f"results are right, and the {way} takes {{found:.0f}} ms; {{most}} are enough. What runs between each "
        "issue and its wait?"
        for way in ("forward", "backward")
    )
    _check_times(_in_two, fn, "2 ranks, 2 microbatches", 8, COLUMNS, [80, 80], forward, backward)
    return "80 ms in both directions: the expert works on one microbatch while rows of the other travel"


numbers = Predict(
    "async_all_to_all-1",
    "The shorter of two",
    NAMES,
    lambda x, e, e_back, s, s_back: (
        2 * x + e + s,
        2 * x + e,
        x + e_back + max(x, s_back),
        min(x, s) + min(x, s_back),
    ),
    "An exchange takes {x} ms. The experts take {e} ms forward and {e_back} backward",
    "the shared expert {s} forward and {s_back} backward.",
    minutes=5,
    points=1,
    hints=(
        "In turn everything adds up: two exchanges, the experts, the shared expert.",
        "Beside each other, an exchange and a job take as long as the longer of the two.",
        "What a direction saves is the shorter of the two; the step saves both.",
    ),
    slips=_SLIPS,
    x=(12, 10, 11, 14),
    e=(5, 4, 6, 7),
    e_back=(10, 9, 12),
    s=(8, 6, 7, 9),
    s_back=(16, 15, 18),
    called={
        "x": "exchange",
        "e": "experts' forward",
        "e_back": "backward",
        "s": "shared expert's forward",
        "s_back": "backward",
    },
)


layer = Repair(
    "async_all_to_all-3",
    "Two microbatches, and nothing hides",
    "Repair a layer of two microbatches whose asynchronous exchanges hide nothing.",
    judge=_judge_layer,
    minutes=10,
    points=2,
    hints=(
        "All results are right. Write down when each line is done: an exchange takes 20 ms, the expert 10.",
        "What lies between an issue and its wait runs beside it. What lies there now?",
        "The second microbatch needs nothing of the first. Issue what can be issued before you wait for anything.",
    ),
)
