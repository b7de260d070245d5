"""Exercises of "All-to-all": the part `exchange`, and a round trip that only even blocks survive.

Chapter: book/ep/all-to-all.  Rows and gradients are told apart by number, bytes are counted by the ledger.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.comparison import Found, Limit, Numbers, Off, in_words
from dualpipe_course.declared import Repair
from dualpipe_course.meter import Meter
from dualpipe_course.own import rules
from dualpipe_course.own.part import OnRanks, Part
from dualpipe_course.start.ranks import all_waited_for
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor


Table = list[list[int]]  # rows from the rank at r to the rank at j
Row = tuple[int, ...]  # the shape of one
COLUMNS = 3
_MARK = 10_000.0
_SECOND = 50.0  # what the rows of another exchange, under way at the same time, have more
# even; uneven; row sums that equal column sums; ranks that send or receive nothing; one that does neither
TABLES: tuple[Table, ...] = (
    [[2]],
    [[1, 1], [1, 1]],
    [[2, 1], [0, 2]],
    [[1, 2, 0], [0, 1, 2], [2, 0, 1]],
    [[0, 3], [0, 0]],
    [[1, 0, 2], [0, 0, 0], [1, 0, 0]],
    [[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
)
# ranks, the group, the table, the shape of a row
ALONE: tuple[tuple[int, list[int], Table, Row], ...] = (
    (1, [0], [[2]], (3,)),
    (2, [0, 1], [[1, 2], [2, 0]], (3,)),
    (3, [0, 1, 2], [[1, 2, 0], [0, 1, 2], [2, 0, 1]], (3,)),
    (2, [0, 1], [[0, 3], [0, 0]], (3,)),
    (3, [2, 0, 1], [[2, 0, 1], [0, 0, 3], [1, 2, 0]], (2, 2)),
    (4, [3, 1], [[1, 2], [0, 1]], ()),
    (4, [0, 1, 2, 3], [[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], (3,)),
)
TOGETHER = ((2, [[1, 2], [2, 0]]), (3, [[0, 1, 2], [1, 1, 0], [2, 0, 1]]))  # symmetric: wrong rows have the right sizes


def _alone(rank: int, world_size: int, ranks: list[int], table: Table, row: Row) -> Found:
    """An exchange that is started and waited for, then one with its backward."""
    from mine.exchange import Exchange, start_exchange

    if rank not in ranks:
        return Found({}, costs=dict.fromkeys(("forward", "backward"), 0))
    sends, receives = _sizes(rank, ranks, table)
    x = _strided(_sent(rank, ranks, table), row)
    out, works = start_exchange(x.long(), sends, receives, ranks, 3)
    _all_posted(out, sum(received for peer, received in zip(ranks, receives, strict=True) if peer != rank))
    for work in works:
        work.wait()
    all_waited_for()
    x, meter = x.requires_grad_(), Meter()
    y = Exchange.apply(x, sends, receives, ranks)
    forward = meter.lap().bytes
    if list(y.shape) != [sum(receives), *row] or not y.requires_grad:
        words = f"y has shape {list(y.shape)}, this rank receives {[sum(receives), *row]}"
        raise ValueError(words if y.requires_grad else "y has no gradient: it does not reach x")
    meter.lap()
    y.backward(_rows(1000.0 * (ranks.index(rank) + 1) + _count(len(y)), row))  # expanded: strides of 0
    all_waited_for()
    return Found(
        {"out": Numbers.of(out), "y": Numbers.of(y), "dx": Numbers.of(x.grad)},
        costs={"forward": forward, "backward": meter.lap().bytes},
    )


def _one_process(rank: int, world_size: int, ranks: list[int], table: Table, row: Row) -> "dict[str, Tensor | None]":
    """Rows by the rank that they come from; gradients in the places from which the rows came."""
    import torch

    if rank not in ranks:
        return dict.fromkeys(("out", "y", "dx"))
    me, start = ranks.index(rank), [[sum(sends[:j]) for j in range(len(ranks))] for sends in table]
    rows = [100.0 * r + start[r][me] + i for r in range(len(ranks)) for i in range(table[r][me])]
    came = [[sum(table[i][j] for i in range(r)) for j in range(len(ranks))] for r in range(len(ranks))]
    grads = [1000.0 * (j + 1) + came[me][j] + i for j in range(len(ranks)) for i in range(table[me][j])]
    y, dx = (_rows(torch.tensor(of, dtype=torch.float64), row).contiguous() for of in (rows, grads))
    return {"out": y, "y": y, "dx": dx}


def _together(rank: int, world_size: int, table: Table) -> "dict[str, Tensor | None]":
    """Two exchanges under way at once, which ranks start and wait for in different orders."""
    from mine.exchange import Exchange, start_exchange

    ranks = list(range(world_size))
    sends, receives = _sizes(rank, ranks, table)
    first = _strided(_sent(rank, ranks, table), (COLUMNS,))
    second, is_odd = first + _SECOND, rank % 2 == 1
    found: dict[str, Tensor | None] = {}

    both = {tag: start_exchange(x, sends, receives, ranks, tag) for tag, x in _in_turn({3: first, 4: second}, is_odd)}
    for _, (_, works) in _in_turn(both, not is_odd):
        for work in works:
            work.wait()
    found |= {f"of tag {tag}, beside another": out for tag, (out, _) in sorted(both.items())}

    x = first.clone().requires_grad_()
    for direction, tag in (("forward", 2), ("backward", 1)):
        if not is_odd:
            other, works = start_exchange(second, sends, receives, ranks, tag)
        if direction == "forward":
            y = Exchange.apply(x, sends, receives, ranks)
        else:
            y.backward(y.detach())  # the same numbers go home
        if is_odd:
            other, works = start_exchange(second, sends, receives, ranks, tag)
        for work in works:
            work.wait()
        found |= {f"of a {direction}, beside an exchange of tag {tag}": y if direction == "forward" else x.grad}
        found |= {f"of tag {tag}, beside a {direction}": other}
    all_waited_for()
    return found


def _each_alone(rank: int, world_size: int, table: Table) -> "dict[str, Tensor | None]":
    ranks = list(range(world_size))
    y = _one_process(rank, world_size, ranks, table, (COLUMNS,))["y"]
    x = _rows(_sent(rank, ranks, table), (COLUMNS,)).contiguous()
    assert y is not None
    return {
        "of tag 3, beside another": y,
        "of tag 4, beside another": y + _SECOND,
        "of a forward, beside an exchange of tag 2": y,
        "of tag 2, beside a forward": y + _SECOND,
        "of a backward, beside an exchange of tag 1": x,
        "of tag 1, beside a backward": y + _SECOND,
    }


def _in_turn(of: dict[int, Any], is_turned: bool) -> list[tuple[int, Any]]:
    pairs = sorted(of.items(), key=lambda pair: pair[0])
    return pairs[::-1] if is_turned else pairs


def _sizes(rank: int, ranks: list[int], table: Table) -> tuple[list[int], list[int]]:
    me = ranks.index(rank)
    return list(table[me]), [sends[me] for sends in table]


def _sent(rank: int, ranks: list[int], table: Table) -> "Tensor":
    """The numbers of this rank's rows; hundreds say which rank of the group it is."""
    return 100.0 * ranks.index(rank) + _count(sum(table[ranks.index(rank)]))


def _count(number: int) -> "Tensor":
    import torch

    return torch.arange(number, dtype=torch.float64)


def _strided(numbers: "Tensor", row: Row) -> "Tensor":
    """Every second row of what lies in memory."""
    return _rows(numbers, row).repeat_interleave(2, 0)[::2]


def _all_posted(out: "Tensor", rows: int) -> None:
    """Raise unless receives of so many rows are under way."""
    from dualpipe_lab.launch.context import rank_context

    needed = rows * prod(out.shape[1:]) * out.element_size()
    posted = sum(getattr(work, "tensor_bytes", 0) for work in rank_context().in_flight.values() if _receives(work))
    if posted < needed:
        raise RuntimeError(
            f"start_exchange has returned, and receives of {posted} bytes are under way, of {needed} that come: post "
            "all sends and receives, wait for none, and return their works. With a receive that is posted later, two "
            "ranks that wait for different exchanges first stand still"
        )


def _receives(work: object) -> bool:
    return getattr(work, "sends", None) is False


def _bytes_of_rows(world_size: int, ranks: list[int], table: Table, row: Row) -> list[Limit]:
    size, num = 8 * prod(row), len(ranks)
    away = [[0] * world_size for _ in range(2)]
    for me, rank in enumerate(ranks):
        away[0][rank] = size * sum(table[me][j] for j in range(num) if j != me)
        away[1][rank] = size * sum(table[j][me] for j in range(num) if j != me)
    words = (
        "rank {rank} sent {found} bytes in the forward, its rows for others are {most}; rows of its own are copied",
        "rank {rank} sent {found} bytes in the backward, the gradients of others' rows are {most}",
    )
    return [
        Limit(of, most, text, scope="each") for of, most, text in zip(("forward", "backward"), away, words, strict=True)
    ]


def _why_not_exchanged(off: Off) -> str:
    if off.found is None or off.has_other_shape or not off.difference:
        return in_words(off)
    found, expected = off.found.flat[off.place], off.expected.flat[off.place]
    if off.name == "dx":
        return (
            f"number {off.place} of dx is the gradient {_gradient(found)}, and should be that {_gradient(expected)}. "
            "Backwards a rank sends what it has received, and receives what it has sent"
        )
    return (
        f"number {off.place} of {off.name} is {_row(found)}, should be {_row(expected)}: rows lie in the order of ranks"
    )


def _why_not_apart(off: Off) -> str:
    if off.found is None or off.has_other_shape or not off.difference:
        return f"the rows {in_words(off)}"
    return (
        f"the rows {off.name}, are those of the other one, or of other places: ranks may start two exchanges in "
        "different orders, and the tag tells them apart: 1 in a forward, 2 in a backward, else what start_exchange is "
        "given"
    )


def _row(number: float) -> str:
    rank, row = divmod(number, 100)
    return f"row {row:g} of the rank at {rank:g}" if 0 <= number < 1000 and number % 1 == 0 else f"{number:g}"


def _gradient(number: float) -> str:
    rank, row = divmod(number, 1000)
    is_one = number >= 1000 and number % 1 == 0
    return f"of what arrived as row {row:g} of the rank at {rank - 1:g}" if is_one else f"{number:g}"


class Returned(NamedTuple):
    """What one rank has after a round trip: shape of y, the number of each row of y and dx.

    A row whose numbers differ has none (NaN).  `has_learned` says whether a parameter of the work has a gradient.
    """

    y_shape: tuple[int, ...]
    y: list[float]
    dx: list[float] | None
    has_learned: bool


def _check_exchange(fn: Callable[..., Any], table: Table) -> None:
    """Raise `Wrong` unless every row comes back to where it was, and its gradient too.

    Args:
        fn: from the rows in the order of their destinations, this rank's line of the table and some work to the rows,
            marked by the rank that worked on them, and twice as long.
        table: the case.
    """
    case = f"{len(table)} rank(s), table {table}"
    results = _run(fn, table, case)
    names = {
        1000.0 * (rank + 1) + row: f"{rank}:{row}" for rank, sends in enumerate(table) for row in range(sum(sends))
    }
    for rank, found in enumerate(results):
        own = [f"{rank}:{row}" for row in range(sum(table[rank]))]
        _check_rows(f"{case}: rank {rank}", found, own, (2 * COLUMNS,))
        _check_workers(f"{case}: rank {rank}", found, table[rank])
        if found.dx is None:
            raise Wrong(f"{case}: rank {rank}: the rows arrive, and no gradient comes back to x")
        if (gradients := [names.get(number, "another number") for number in found.dx]) != own:
            raise Wrong(
                f"{case}: rank {rank}: its rows {_words(own)} got the gradients of rows {_words(gradients)}. "
                "A row's gradient returns to the place from which the row came"
            )
    if idle := [rank for rank, found in enumerate(results) if not found.has_learned]:
        raise Wrong(
            f"{case}: rank {idle[0]}: the rows are back, and a parameter of the work has the gradient None there. "
            "Call work without rows too: its parameters then have gradients of zeros, which an all-reduce needs"
        )


def _run(fn: Callable[..., Any], table: Table, case: str) -> list[Returned]:
    try:
        return list(on_ranks(_there_and_back, len(table), fn, table, (COLUMNS,), case=case))
    except Wrong as wrong:
        if "SIGABRT" not in wrong.message:
            raise
        why = "GLOO stops a rank that is sent more than it allocated: output_split_sizes are what the others send"
        raise Wrong(f"{wrong.message}\n  {why}") from None


def _check_rows(where: str, found: Returned, expected: Sequence[str], row: Row) -> None:
    if found.y_shape != (len(expected), *row):
        raise Wrong(f"{where}: got shape {list(found.y_shape)}, needs {[len(expected), *row]}")
    names = [_name(number) for number in found.y]
    if names != list(expected):
        raise Wrong(
            f"{where}: has rows {_words(names)}, should have {_words(expected)} (rank:row, in the order of "
            "the ranks they come from)"
        )


def _check_workers(where: str, found: Returned, sends: Sequence[int]) -> None:
    workers = [int(number // _MARK) - 1 for number in found.y]
    expected = [rank for rank, rows in enumerate(sends) for _ in range(rows)]
    if workers != expected:
        raise Wrong(
            f"{where}: the work on its rows was done by ranks {_words(list(map(str, workers)))}, "
            f"should be {_words(list(map(str, expected)))}"
        )


def _there_and_back(rank: int, world_size: int, fn: Callable[..., Any], table: Table, row: Row) -> Returned:
    import torch

    num_rows, learned = sum(table[rank]), torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def work(rows: "Tensor") -> "Tensor":
        """Rows that still tell who they are, and now also where the work was done; twice as long."""
        return (rows + _MARK * (rank + 1) + learned).repeat(1, 2)

    x = _rows(100.0 * rank + torch.arange(num_rows).double(), row).repeat_interleave(2, 0).requires_grad_()
    y = _needs_tensor(fn(x[::2], list(table[rank]), work))
    if y.requires_grad and y.shape == (num_rows, 2 * COLUMNS):
        gradient = _rows(torch.arange(num_rows).double() + 1000.0 * (rank + 1), row)
        y.backward(torch.cat([gradient, torch.zeros_like(gradient)], 1))
    dx = None if x.grad is None else _numbers(x.grad[::2])
    return Returned(tuple(y.shape), _numbers(y.detach()), dx, learned.grad is not None)


def _needs_tensor(value: Any) -> "Tensor":
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor is needed, got {type(value).__name__}")
    return value


def _rows(numbers: "Tensor", row: Row) -> "Tensor":
    return numbers.view(-1, *[1] * len(row)).expand(-1, *row)


def _numbers(rows: "Tensor") -> list[float]:
    found = rows.reshape(len(rows), -1).tolist() if rows.dim() > 0 and rows.numel() else []
    return [row[0] if len(set(row)) == 1 else float("nan") for row in found]


def _name(number: float) -> str:
    number %= _MARK
    if number != number:  # from memory that nothing was written to, perhaps
        return "nan"
    return f"{int(number) // 100}:{int(number) % 100}"


def _words(names: Sequence[str]) -> str:
    return " ".join(names) or "(none)"


exchange = Part(
    "all_to_all-4",
    "exchange",
    "Rows that are under way",
    "Write start_exchange, which starts an all-to-all of unequal blocks, and Exchange with its gradient.",
    names=("start_exchange", "Exchange"),
    off=rules.AUTOGRAD,
    trials=(
        OnRanks(
            _alone, ALONE, _one_process, "group {1} of {0} rank(s), table {2}, rows of shape {3}", _bytes_of_rows,
            _why_not_exchanged, tolerance=0,
        ),
        OnRanks(
            _together, TOGETHER, _each_alone, "{0} ranks, table {1}, two exchanges at once", why=_why_not_apart,
            tolerance=0,
        ),
    ),
    right=f"rows and gradients of {len(ALONE)} tables, a rank without rows among them, and two exchanges at once",
    minutes=40,
    points=4,
    hints=(
        "x.split(sends) are the blocks for the ranks, out.split(receives) the room for theirs, in the order of ranks. "
        "Both are views: an irecv into such a view fills out.",
        "For each peer but oneself: isend(block, peer, tag) if it has numbers, irecv(room, peer, tag) if it has. Keep "
        "the works in a list and wait for none of them. room.copy_(block) for oneself. x.contiguous() first.",
        "Exchange.forward keeps sends, receives and ranks on ctx, starts with tag 1, waits for all works and returns "
        "out. backward: start_exchange(dy, receives, sends, ranks, 2), wait, return dx, None, None, None.",
    ),
)  # fmt: skip

round_trip = Repair(
    "all_to_all-3",
    "It works with even blocks",
    "Repair a round trip of rows: there, some work, and back to their places, for any table.",
    cases=[(case,) for case in TABLES],
    judge=_check_exchange,
    right=f"every row comes back to its place for {len(TABLES)} tables, a rank without rows included",
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Print the rows that come back on 3 ranks with the table [[1, 2, 0], [0, 1, 2], [2, 0, 1]].",
        "The rows that a rank received are the ones it must send back. Which splits say how many those are?",
        "One rank has nothing to send. Who waits for it, and what else does it have to do in this function?",
    ),
)
