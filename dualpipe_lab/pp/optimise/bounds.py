"""Lower bounds: how long a step takes at least, whatever the order, with the stages where they are.

Chapter: book/pp/explorer.  In: the placement of a program, costs per stage, room for activations.  Out: a `Bound`.
For every rank, with room for K activations:
  work      until its first backward a rank runs only forwards, at most K of them; then it has all its other work to do;
            after its last backward it runs only W, at most K of them, while the gradient goes down to stage 0
  memory    an activation is held from the start of F until its gradient is back and B, or W, has ended; K at a time
Both hold for whole and split backwards and for overlapped pairs.  They leave out that other ranks are busy, so the true
minimum may lie higher.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import B, F, I, Program, W
from dualpipe_lab.pp.routes import Route, routes
from dualpipe_lab.timeline import Time


class Bound(NamedTuple):
    """The least ticks of a step, and the rank and the reason ("work" or "memory") that ask for them."""

    ticks: Time
    reason: str
    rank: int


class _Cell(NamedTuple):
    """A stage on one route, of so many microbatches; every time is the least that it can be."""

    number: int
    head: Time  # until F can start
    back: Time  # from the end of F until the gradient is there
    tail: Time  # from the end of the backward until stage 0 has ended its own
    work: "_Work"


class _Work(NamedTuple):
    """The ticks of one stage.  `released`: until a forward's, a backward's result, all memory can be there."""

    forward: Time
    whole: Time
    weights: Time
    released: tuple[Time, Time, Time]


def lower_bound(program: Program, cost: Cost, in_flight: int | Sequence[int] | None = None) -> Bound:
    """Return the largest bound of all ranks; `in_flight` is the room for activations, as `validate` takes it.

    Raises ValueError for costs of pairs that are a function.

    >>> from dualpipe_lab.pp.schedules import one_f_one_b
    >>> lower_bound(one_f_one_b(4, 8), Cost()), lower_bound(one_f_one_b(4, 8), Cost(), in_flight=2)
    (Bound(ticks=27, reason='work', rank=3), Bound(ticks=36, reason='memory', rank=0))
    """
    if callable(cost.overlap):
        raise ValueError("a bound needs Cost.overlap to be one number for all pairs, got a function; give a number")
    limits = in_flight if isinstance(in_flight, Sequence) else [in_flight] * program.num_ranks
    found = []
    for rank, cells in enumerate(_cells(program, cost)):
        num_cells = sum(cell.number for cell in cells)
        limit = limits[rank]
        room = num_cells if limit is None else min(limit, num_cells)
        found += [Bound(_work(cells, room, cost.overlap), "work", rank), Bound(_memory(cells, room), "memory", rank)]
    best = max(found, key=lambda bound: bound.ticks)
    is_whole = all(isinstance(time, int) for cells in _cells(program, cost) for cell in cells for time in _times(cell))
    return best._replace(ticks=ceil(best.ticks)) if is_whole else best


def _work(cells: Sequence[_Cell], room: int, overlap: Time | None) -> Time:
    """Forwards before the first backward, all other work after it, and the way down after the last one."""
    num_cells = sum(cell.number for cell in cells)
    start = min(cell.head for cell in cells)
    first_back = min(cell.head + cell.work.released[0] + cell.back for cell in cells)
    longest = max(cell.work.forward for cell in cells)
    total = sum(cell.number * (cell.work.forward + cell.work.whole) for cell in cells)
    gain: Time = 0 if overlap is None else max(longest + max(cell.work.whole for cell in cells) - overlap, 0)
    fitting = int((first_back - start) / longest) if longest else 0
    # More forwards before the first backward leave less work for later, and fewer forwards to overlap.
    remaining = min(
        total - min(early * longest, first_back - start) - gain * (num_cells - early)
        for early in (0, min(fitting, room), min(fitting + 1, room))
    )
    tail = min(cell.tail for cell in cells) - room * max(cell.work.weights for cell in cells)
    return first_back + remaining + max(tail, 0)


def _memory(cells: Sequence[_Cell], room: int) -> Time:
    held = sum(cell.number * (cell.work.released[0] + cell.back + cell.work.released[2]) for cell in cells)
    return min(cell.head for cell in cells) + Fraction(held) / room


def _times(cell: _Cell) -> tuple[Time, ...]:
    return (cell.head, cell.back, cell.tail, *cell.work[:3], *cell.work.released)


def _cells(program: Program, cost: Cost) -> list[list[_Cell]]:
    """Return, for every rank, the stages that it holds, once for each route."""
    work = [_work_of(stage, cost, program.num_stages) for stage in range(program.num_stages)]
    cells: list[list[_Cell]] = [[] for _ in program.ranks]
    for route, number in Counter(routes(program)).items():
        for rank, cell in zip(route, _along(route, number, work, cost), strict=True):
            cells[rank].append(cell)
    return cells


def _work_of(stage: int, cost: Cost, num_stages: int) -> _Work:
    ticks = {kind: values[stage] for kind, values in cost.per_stage(num_stages).items()}
    whole = min(ticks[B], ticks[I] + ticks[W])
    released = (ticks[F], min(ticks[B], ticks[I]), whole)
    if cost.overlap is not None and not callable(cost.overlap):  # a pair may be shorter than its parts
        pair = cost.overlap
        released = (min(released[0], pair), min(released[1], pair), min(released[2], pair))
    return _Work(ticks[F], whole, ticks[W], released)


def _along(route: Route, number: int, work: Sequence[_Work], cost: Cost) -> Iterator[_Cell]:
    """Yield the cells of a route, stage by stage."""
    lags = [0 if near == far else cost.latency + cost.transfer for near, far in pairwise(route)]
    forwards, backwards, ends = zip(*(one.released for one in work), strict=True)
    for stage, own in enumerate(work):
        head = sum(forwards[:stage]) + sum(lags[:stage])
        back = sum(forwards[stage + 1 :]) + sum(backwards[stage + 1 :]) + 2 * sum(lags[stage:])
        tail = sum(backwards[1:stage]) + sum(lags[:stage]) + ends[0] if stage else 0
        yield _Cell(number, head, back, tail, own)
