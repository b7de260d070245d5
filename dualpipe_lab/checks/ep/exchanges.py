"""Exchanges of rows, for checks: which row arrived where, whose gradient returned to it, and what was sent.

Every row of a case is a number of its own, and so is the gradient of every row that arrives: an answer that moves one
of them elsewhere is told which.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dualpipe_lab.checks.exercise import Wrong
from dualpipe_lab.checks.trial import on_ranks

if TYPE_CHECKING:
    from torch import Tensor

Table = list[list[int]]  # rows from rank r to rank j
COLUMNS = 3
_MARK = 10_000.0
# even; uneven; row sums that equal column sums; ranks that send or receive nothing
TABLES: tuple[Table, ...] = (
    [[2]],
    [[1, 1], [1, 1]],
    [[2, 1], [0, 2]],
    [[1, 2, 0], [0, 1, 2], [2, 0, 1]],
    [[0, 3], [0, 0]],
    [[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
)


class Found(NamedTuple):
    """What one rank has after an exchange: shape and first numbers of y and dx, and all bytes it sent."""

    y_shape: tuple[int, ...]
    y: list[float]
    dx: list[float] | None
    sent: int


def arrivals(table: Table, rank: int) -> list[str]:
    """Names of the rows for a rank, in the order of their sources: `0:2` is row 2 of rank 0."""
    found = []
    for source, sends in enumerate(table):
        first = sum(sends[:rank])
        found += [f"{source}:{first + row}" for row in range(sends[rank])]
    return found


def check_exchange(fn: Callable[..., Any], table: Table, returns: bool = False) -> None:
    """Raise `Wrong` unless every row arrives, every gradient returns, and no byte too many is sent.

    Args:
        fn: from this rank's rows and its row of the table to the rows for this rank.
        table: the case.
        returns: the rows come back to where they were, marked by the rank that worked on them.
    """
    case = f"{len(table)} rank(s), table {table}"
    for rank, found in enumerate(_run(fn, table, returns, case)):
        own = [f"{rank}:{row}" for row in range(sum(table[rank]))]
        expected = own if returns else arrivals(table, rank)
        _check_rows(f"{case}: rank {rank}", found, expected)
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


def check_bytes(fn: Callable[..., Any], table: Table) -> None:
    """Raise `Wrong` unless a rank sends its counts, its rows for others, and the gradients of others' rows."""
    size, case = len(table), f"{len(table)} rank(s), table {table}"
    for rank, found in enumerate(_run(fn, table, False, case)):
        rows = sum(table[rank]) + sum(sends[rank] for sends in table) - 2 * table[rank][rank]
        needed = 8 * (size - 1) + 8 * COLUMNS * rows
        if found.sent != needed:
            raise Wrong(
                f"{case}: rank {rank} sent {found.sent} bytes through comm, {needed} are needed: "
                f"{8 * (size - 1)} of counts, and {rows} rows of {8 * COLUMNS} in the two directions"
            )


def _run(fn: Callable[..., Any], table: Table, returns: bool, case: str) -> list[Found]:
    try:
        return list(on_ranks(_step, len(table), fn, table, returns, case=case))
    except Wrong as wrong:
        if "SIGABRT" not in wrong.message:
            raise
        why = "GLOO stops a rank that is sent more than it allocated: output_split_sizes are what the others send"
        raise Wrong(f"{wrong.message}\n  {why}") from None


def _check_rows(where: str, found: Found, expected: Sequence[str]) -> None:
    if found.y_shape != (len(expected), COLUMNS):
        raise Wrong(f"{where}: got shape {list(found.y_shape)}, needs {[len(expected), COLUMNS]}")
    names = [_name(number) for number in found.y]
    if names != list(expected):
        raise Wrong(
            f"{where}: has rows {_words(names)}, should have {_words(expected)} (rank:row, in the order of "
            "the ranks they come from)"
        )


def mark(rows: "Tensor") -> "Tensor":
    """The work of a round trip: rows that still tell who they are, and now also where the work was done."""
    from dualpipe_lab.world import comm

    return rows + _MARK * (comm.get_rank() + 1)


def _check_workers(where: str, found: Found, sends: Sequence[int]) -> None:
    workers = [int(number // _MARK) - 1 for number in found.y]
    expected = [rank for rank, rows in enumerate(sends) for _ in range(rows)]
    if workers != expected:
        raise Wrong(
            f"{where}: the work on its rows was done by ranks {_words(list(map(str, workers)))}, "
            f"should be {_words(list(map(str, expected)))}"
        )


def _step(rank: int, world_size: int, fn: Callable[..., Any], table: Table, returns: bool) -> Found:
    import torch

    from dualpipe_lab.world.context import current

    num_rows = sum(table[rank])
    x = torch.stack([_row(100.0 * rank + row) for row in range(num_rows)]) if num_rows else torch.empty(0, COLUMNS)
    x = x.double().repeat_interleave(2, 0).requires_grad_()
    y = fn(x[::2], list(table[rank]))  # strided
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"a tensor is needed, got {type(y).__name__}")
    expected = num_rows if returns else sum(sends[rank] for sends in table)
    if y.requires_grad and y.shape == (expected, COLUMNS):
        rows = torch.arange(expected).double() + 1000.0 * (rank + 1)
        y.backward(rows.unsqueeze(1).expand(-1, COLUMNS))  # expanded: all columns are one
    sent = sum(entry.sent for entry in current().ledger.entries.values())
    dx = None if x.grad is None else x.grad[::2, 0].tolist()
    return Found(tuple(y.shape), y.detach()[:, 0].tolist() if y.dim() > 1 and y.shape[1] else [], dx, sent)


def _row(number: float) -> "Tensor":
    import torch

    return torch.full((COLUMNS,), number, dtype=torch.float64)


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
