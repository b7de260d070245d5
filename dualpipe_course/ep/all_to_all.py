"""Exercises of "All-to-all": what travels, an exchange with refusals, a round trip that only even blocks survive.

Chapter: book/ep/all-to-all.  Rows and gradients are told apart by number, messages counted by the ledger.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.meter import Meter
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor


NAMES = ("rows received", "bytes forward", "bytes backward", "bytes of counts")
Table = list[list[int]]  # rows from rank r to rank j
Row = tuple[int, ...]  # the shape of one
COLUMNS = 3
_MARK = 10_000.0
_REFUSED = "(0)"  # the gradient of a row that is not taken
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
# rows that each rank of a table takes: all, some of a source, none
ROOMS = ([1], [1, 2], [9, 2], [2, 4, 1], [4, 2], [1, 5, 0], [2, 3, 0, 1])


def _slips(h: int) -> Known:
    return (
        (
            (8, "that is what rank 1 sends: its row of the table; it receives a column"),
            (4, "the block for oneself is part of the output, though it does not travel"),
        ),
        (
            (32 * h, "the 3 rows for rank 1 itself stay where they are"),
            (80 * h, f"a row has {h} numbers of 4 bytes, {4 * h} in all"),
            (16 * h, "that is what rank 1 receives; it sends along its row of the table"),
        ),
        (
            (20 * h, "that is the forward; gradients go back to the ranks that the rows came from"),
            (28 * h, "the gradients of its own 3 rows stay where they are"),
            (32 * h, "backwards a rank sends as many rows as it received, its own left out"),
        ),
        (
            (24, "the number for oneself does not travel"),
            (8, "one number of 8 bytes to each of the 2 others"),
            (4, "a count is a number of 8 bytes, and there are 2 others"),
        ),
    )


class Found(NamedTuple):
    """What one rank has after an exchange: shape of y, the number of each row of y and dx, all bytes it sent.

    A row whose numbers differ has none (NaN).  `has_learned` says whether a parameter of the work has a gradient.
    """

    y_shape: tuple[int, ...]
    y: list[float]
    dx: list[float] | None
    sent: int
    has_learned: bool


def _arrivals(table: Table, rank: int, rooms: Sequence[int]) -> list[str]:
    """Names of the rows that a rank takes, in the order of their sources: `0:2` is row 2 of rank 0."""
    found = []
    for source, sends in enumerate(table):
        first = sum(sends[:rank])
        found += [f"{source}:{first + row}" for row in range(sends[rank])]
    return found[: rooms[rank]]


def _check_exchange(
    fn: Callable[..., Any], table: Table, rooms: Sequence[int] | None = None, row: Row = (COLUMNS,)
) -> None:
    """Raise `Wrong` unless every row arrives that is taken, and every gradient returns.

    Args:
        fn: from this rank's rows, in mixed order, and the rank that each is for, to the rows for this rank; or, if they
            return, from the rows in the order of their destinations, this rank's row of the table and some work.
        table: the case.
        rooms: how many rows each rank takes; None: all, and they return to where they were, marked by the rank that
            worked on them, and twice as long.
        row: the shape of a row.
    """
    case, returns = _case(table, row, rooms), rooms is None
    results = _run(fn, table, rooms, case, row)
    names = _names_of_gradients(table, rooms)
    for rank, found in enumerate(results):
        own = [f"{rank}:{row}" for row in range(sum(table[rank]))]
        expected = own if rooms is None else _arrivals(table, rank, rooms)
        _check_rows(f"{case}: rank {rank}", found, expected, (2 * COLUMNS,) if returns else row)
        if returns:
            _check_workers(f"{case}: rank {rank}", found, table[rank])
        if found.dx is None:
            raise Wrong(f"{case}: rank {rank}: the rows arrive, and no gradient comes back to x")
        gradients = [names.get(number, "another number") for number in found.dx]
        right = [name if name in names.values() else _REFUSED for name in own]
        if gradients != right:
            raise Wrong(
                f"{case}: rank {rank}: its rows {_words(own)} got the gradients of rows {_words(gradients)}. "
                "A row's gradient returns to the place from which the row came, and a refused row's is 0"
            )
    if returns and (idle := [rank for rank, found in enumerate(results) if not found.has_learned]):
        raise Wrong(
            f"{case}: rank {idle[0]}: the rows are back, and a parameter of the work has the gradient None there. "
            "Call work without rows too: its parameters then have gradients of zeros, which an all-reduce needs"
        )


def _check_bytes(fn: Callable[..., Any], table: Table, rooms: Sequence[int]) -> None:
    """Raise `Wrong` unless a rank sends two counts, its rows that others take, and the gradients of others' rows."""
    size, case = len(table), _case(table, (COLUMNS,), rooms)
    moved = [(int(name.split(":")[0]), to) for to in range(size) for name in _arrivals(table, to, rooms)]
    for rank, found in enumerate(_run(fn, table, rooms, case, (COLUMNS,))):
        rows = sum(rank in pair for pair in moved if pair[0] != pair[1])
        least, most = 8 * COLUMNS * rows, 16 * (size - 1) + 8 * COLUMNS * rows  # counts may be narrower
        if not least <= found.sent <= most:
            raise Wrong(
                f"{case}: rank {rank} sent {found.sent} bytes through comm, {most} will do: "
                f"{16 * (size - 1)} of counts, and {rows} rows of {8 * COLUMNS} in the two directions. "
                "A refused row does not travel"
            )


def _case(table: Table, row: Row, rooms: Sequence[int] | None) -> str:
    shape = "" if row == (COLUMNS,) else f", rows of shape {list(row)}"
    room = "" if rooms is None else f", room for {list(rooms)}"
    return f"{len(table)} rank(s), table {table}{room}{shape}"


def _run(fn: Callable[..., Any], table: Table, rooms: Sequence[int] | None, case: str, row: Row) -> list[Found]:
    try:
        if rooms is None:
            return list(on_ranks(_there_and_back, len(table), fn, table, row, case=case))
        return list(on_ranks(_there, len(table), fn, table, rooms, row, case=case))
    except Wrong as wrong:
        if "SIGABRT" not in wrong.message:
            raise
        why = "GLOO stops a rank that is sent more than it allocated: output_split_sizes are what the others send"
        raise Wrong(f"{wrong.message}\n  {why}") from None


def _check_rows(where: str, found: Found, expected: Sequence[str], row: Row) -> None:
    if found.y_shape != (len(expected), *row):
        raise Wrong(f"{where}: got shape {list(found.y_shape)}, needs {[len(expected), *row]}")
    names = [_name(number) for number in found.y]
    if names != list(expected):
        raise Wrong(
            f"{where}: has rows {_words(names)}, should have {_words(expected)} (rank:row, in the order of "
            "the ranks they come from)"
        )


def _check_workers(where: str, found: Found, sends: Sequence[int]) -> None:
    workers = [int(number // _MARK) - 1 for number in found.y]
    expected = [rank for rank, rows in enumerate(sends) for _ in range(rows)]
    if workers != expected:
        raise Wrong(
            f"{where}: the work on its rows was done by ranks {_words(list(map(str, workers)))}, "
            f"should be {_words(list(map(str, expected)))}"
        )


def _there(rank: int, world_size: int, fn: Callable[..., Any], table: Table, rooms: Sequence[int], row: Row) -> Found:
    """Rows that lie in mixed order: the first ones for every rank, then the second ones."""
    import torch

    sends = table[rank]
    places = sorted((number, to, sum(sends[:to]) + number) for to in range(world_size) for number in range(sends[to]))
    order = torch.tensor([place for _, _, place in places], dtype=torch.int64)
    to = torch.tensor([to for _, to, _ in places], dtype=torch.int64)
    x = _rows(100.0 * rank + order.double(), row).repeat_interleave(2, 0).requires_grad_()
    meter = Meter()
    y = _needs_tensor(fn(x[::2], to, rooms[rank]))  # strided
    if y.requires_grad:  # also of a wrong shape: the others wait for the gradients
        has_rows = y.dim() > 0 and y.shape[1:] == row
        numbered = _rows(torch.arange(len(y)).double() + 1000.0 * (rank + 1), row) if has_rows else torch.zeros_like(y)
        y.backward(numbered)  # expanded: one number a row
    dx = None if x.grad is None else _numbers(x.grad[::2][order.argsort()])
    return Found(tuple(y.shape), _numbers(y.detach()), dx, meter.lap().bytes, True)


def _there_and_back(rank: int, world_size: int, fn: Callable[..., Any], table: Table, row: Row) -> Found:
    import torch

    num_rows, learned = sum(table[rank]), torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def work(rows: "Tensor") -> "Tensor":
        """Rows that still tell who they are, and now also where the work was done; twice as long."""
        return (rows + _MARK * (rank + 1) + learned).repeat(1, 2)

    x = _rows(100.0 * rank + torch.arange(num_rows).double(), row).repeat_interleave(2, 0).requires_grad_()
    meter = Meter()
    y = _needs_tensor(fn(x[::2], list(table[rank]), work))
    if y.requires_grad and y.shape == (num_rows, 2 * COLUMNS):
        gradient = _rows(torch.arange(num_rows).double() + 1000.0 * (rank + 1), row)
        y.backward(torch.cat([gradient, torch.zeros_like(gradient)], 1))
    dx = None if x.grad is None else _numbers(x.grad[::2])
    return Found(tuple(y.shape), _numbers(y.detach()), dx, meter.lap().bytes, learned.grad is not None)


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


def _names_of_gradients(table: Table, rooms: Sequence[int] | None) -> dict[float, str]:
    ranks = range(len(table))
    own = [[f"{r}:{i}" for i in range(sum(table[r]))] for r in ranks]
    ends = own if rooms is None else [_arrivals(table, r, rooms) for r in ranks]
    named = {1000.0 * (rank + 1) + row: name for rank, names in enumerate(ends) for row, name in enumerate(names)}
    return named | {0.0: _REFUSED}


def _words(names: Sequence[str]) -> str:
    return " ".join(names) or "(none)"


def _judge_exchange(fn: Callable[..., Any]) -> str:
    own = Without(fn, "dualpipe_lab.ep.all_to_all")
    for table, rooms in zip(TABLES, ROOMS, strict=True):
        _check_exchange(own, table, rooms)
    _check_exchange(own, TABLES[-1], [99] * 4)
    for row in ((), (2, 2)):
        _check_exchange(own, TABLES[3], ROOMS[3], row=row)
    _check_bytes(own, TABLES[3], ROOMS[3])
    _check_bytes(own, TABLES[-1], ROOMS[-1])
    return f"taken rows and all gradients are in their places for {len(TABLES)} tables, and refused rows stay at home"


numbers = Predict(
    "all_to_all-1",
    "Rank 1 of three",
    NAMES,
    lambda h: (7, 20 * h, 16 * h, 16),
    "rows of {h} float32 numbers",
    minutes=5,
    points=1,
    trail=True,
    hints=(
        "Rank 1 sends row 1 of the table and receives column 1; its own block is in both.",
        "What stays at home is not sent: in the forward that leaves one block, in the backward as well.",
        "A row is 4 float32, so 16 bytes. A count is an int64, and each other rank gets one.",
    ),
    slips=_slips,
    h=(4, *range(5, 26)),
    called={"h": "numbers of a row"},
)

exchange = Implement(
    "all_to_all-2",
    "As many as there is room for",
    "Write `dispatch(x, to, room)`: as many rows as this rank has room for, by source, with gradients.",
    judge=_judge_exchange,
    minutes=20,
    points=3,
    hints=(
        "A rank that has been told what is offered knows what it takes of each source. Who has to be told that?",
        "Rows of earlier sources fill the room first: a cumulative sum of what is offered, without the source's own.",
        "Two exchanges of N counts, then the rows. The first n rows for a rank: (to == rank).nonzero()[:n]. A row that "
        "is not among those has the gradient 0 by itself.",
    ),
)

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
