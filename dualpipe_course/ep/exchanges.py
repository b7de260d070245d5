"""Exchanges of rows, for checks: which row arrived where, whose gradient returned to it, and what was sent.

Every row of a case is a number of its own, and so is the gradient of every row that arrives: an answer that moves one
of them elsewhere is told which.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_course.exercise import Wrong
from dualpipe_course.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor

Table = list[list[int]]  # rows from rank r to rank j
Row = tuple[int, ...]  # the shape of one
COLUMNS = 3
_MARK = 10_000.0
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


class Found(NamedTuple):
    """What one rank has after an exchange: shape of y, the number of each row of y and dx, all bytes it sent.

    A row whose numbers differ has none (NaN).  `has_learned` says whether a parameter of the work has a gradient.
    """

    y_shape: tuple[int, ...]
    y: list[float]
    dx: list[float] | None
    sent: int
    has_learned: bool


def arrivals(table: Table, rank: int) -> list[str]:
    """Names of the rows for a rank, in the order of their sources: `0:2` is row 2 of rank 0."""
    found = []
    for source, sends in enumerate(table):
        first = sum(sends[:rank])
        found += [f"{source}:{first + row}" for row in range(sends[rank])]
    return found


def check_exchange(fn: Callable[..., Any], table: Table, returns: bool = False, row: Row = (COLUMNS,)) -> None:
    """Raise `Wrong` unless every row arrives, every gradient returns, and no byte too many is sent.

    Args:
        fn: from this rank's rows, in mixed order, and the rank that each is for, to the rows for this rank; or, if they
            return, from the rows in the order of their destinations, this rank's row of the table and some work.
        table: the case.
        returns: the rows come back to where they were, marked by the rank that worked on them, and twice as long.
        row: the shape of a row.
    """
    case = _case(table, row)
    results = _run(fn, table, returns, case, row)
    for rank, found in enumerate(results):
        own = [f"{rank}:{row}" for row in range(sum(table[rank]))]
        expected = own if returns else arrivals(table, rank)
        _check_rows(f"{case}: rank {rank}", found, expected, (2 * COLUMNS,) if returns else row)
        if returns:
            _check_workers(f"{case}: rank {rank}", found, table[rank])
        if found.dx is None:
            raise Wrong(f"{case}: rank {rank}: the rows arrive, and no gradient comes back to x")
        gradients = [_names_of_gradients(table, returns).get(number, "another number") for number in found.dx]
        if gradients != own:
            raise Wrong(
                f"{case}: rank {rank}: its rows {_words(own)} got the gradients of rows {_words(gradients)}. "
                "A row's gradient returns to the place from which the row came"
            )
    if returns and (idle := [rank for rank, found in enumerate(results) if not found.has_learned]):
        raise Wrong(
            f"{case}: rank {idle[0]}: the rows are back, and a parameter of the work has the gradient None there. "
            "Call work without rows too: its parameters then have gradients of zeros, which an all-reduce needs"
        )


def check_bytes(fn: Callable[..., Any], table: Table) -> None:
    """Raise `Wrong` unless a rank sends its counts, its rows for others, and the gradients of others' rows."""
    size, case = len(table), _case(table, (COLUMNS,))
    for rank, found in enumerate(_run(fn, table, False, case, (COLUMNS,))):
        rows = sum(table[rank]) + sum(sends[rank] for sends in table) - 2 * table[rank][rank]
        least, most = 8 * COLUMNS * rows, 8 * (size - 1) + 8 * COLUMNS * rows  # counts may be narrower
        if not least <= found.sent <= most:
            raise Wrong(
                f"{case}: rank {rank} sent {found.sent} bytes through comm, {most} will do: "
                f"{8 * (size - 1)} of counts, and {rows} rows of {8 * COLUMNS} in the two directions"
            )


def _case(table: Table, row: Row) -> str:
    shape = "" if row == (COLUMNS,) else f", rows of shape {list(row)}"
    return f"{len(table)} rank(s), table {table}{shape}"


def _run(fn: Callable[..., Any], table: Table, returns: bool, case: str, row: Row) -> list[Found]:
    try:
        return list(on_ranks(_there_and_back if returns else _there, len(table), fn, table, row, case=case))
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


def _there(rank: int, world_size: int, fn: Callable[..., Any], table: Table, row: Row) -> Found:
    """Rows that lie in mixed order: the first ones for every rank, then the second ones."""
    import torch

    sends = table[rank]
    places = sorted((number, to, sum(sends[:to]) + number) for to in range(world_size) for number in range(sends[to]))
    order = torch.tensor([place for _, _, place in places], dtype=torch.int64)
    to = torch.tensor([to for _, to, _ in places], dtype=torch.int64)
    x = _rows(100.0 * rank + order.double(), row).repeat_interleave(2, 0).requires_grad_()
    y = _needs_tensor(fn(x[::2], to))  # strided
    num_expected = sum(sends[rank] for sends in table)
    if y.requires_grad and y.shape == (num_expected, *row):
        y.backward(_rows(torch.arange(num_expected).double() + 1000.0 * (rank + 1), row))  # expanded: one number a row
    dx = None if x.grad is None else _numbers(x.grad[::2][order.argsort()])
    return Found(tuple(y.shape), _numbers(y.detach()), dx, _sent(), True)


def _there_and_back(rank: int, world_size: int, fn: Callable[..., Any], table: Table, row: Row) -> Found:
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
    return Found(tuple(y.shape), _numbers(y.detach()), dx, _sent(), learned.grad is not None)


def _needs_tensor(value: Any) -> "Tensor":
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor is needed, got {type(value).__name__}")
    return value


def _sent() -> int:
    from dualpipe_lab.world.context import rank_context

    return sum(entry.sent for entry in rank_context().ledger.entries.values())


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


def _names_of_gradients(table: Table, returns: bool) -> dict[float, str]:
    ranks = range(len(table))
    ends = [[f"{r}:{i}" for i in range(sum(table[r]))] if returns else arrivals(table, r) for r in ranks]
    return {1000.0 * (rank + 1) + row: name for rank, names in enumerate(ends) for row, name in enumerate(names)}


def _words(names: Sequence[str]) -> str:
    return " ".join(names) or "(none)"
