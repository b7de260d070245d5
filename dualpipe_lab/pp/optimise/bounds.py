"""Lower bounds on the time of a step, for any order of the actions with the stages on the same ranks.

Chapter: book/pp/explorer.  In: the placement of a program, costs per stage, a limit of activations.  Out: a `Bound`.
For every rank, with n forwards and n backwards (B, or I and W), and at most K activations held:
  work      the rank cannot start its first backward before its gradient can arrive, and the step cannot end before
            stage 0 has the gradient of the rank's last backward; between the two the rank runs all its other work
  memory    an activation is held from the start of F until its gradient is back and B, or W, has ended; K at a time
The bounds ignore the work of other ranks meanwhile: the true minimum may be higher.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import B, F, I, Program, W
from dualpipe_lab.pp.validation.rules import Route, routes
from dualpipe_lab.timeline import Time


class Bound(NamedTuple):
    """A lower bound on the ticks of a step, with its reason ("work" or "memory") and the rank that gives it."""

    ticks: Time
    reason: str
    rank: int


class _Cell(NamedTuple):
    """A stage on one route of `number` microbatches; every time is a lower bound."""

    number: int
    head: Time  # until F can start
    back: Time  # from the end of F until the gradient arrives
    ends: Time  # from the arrival of the gradient until stage 0 has ended its backward
    tail: Time  # the part of `ends` after this stage's backward
    work: "_Work"


class _Work(NamedTuple):
    """The ticks of one stage.  `released`: until a forward's result, a backward's result, all memory is available."""

    forward: Time
    backward: Time
    inputs: Time
    weights: Time
    released: tuple[Time, Time, Time]


def lower_bound(program: Program, cost: Cost, in_flight: int | Sequence[int] | None = None) -> Bound:
    """Return the largest bound of all ranks; `in_flight` is the limit of activations, as for `validate`.

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
        if not (num_cells := sum(cell.number for cell in cells)):
            continue  # a rank without stages bounds nothing
        limit = limits[rank]
        limit = num_cells if limit is None else min(limit, num_cells)
        found += [Bound(_work(cells, limit, cost.overlap), "work", rank), Bound(_memory(cells, limit), "memory", rank)]
    best = max(found, key=lambda bound: bound.ticks)
    times = [time for cells in _cells(program, cost) for cell in cells for time in _times(cell)]
    is_integer = all(isinstance(time, int) for time in [*times, cost.overlap or 0])
    return best._replace(ticks=ceil(best.ticks)) if is_integer else best


def _work(cells: Sequence[_Cell], limit: int, overlap: Time | None) -> Time:
    """The smallest value over k, here `apart`: how many forwards, or backwards, cannot be in a pair.

    Let the first backward start at t, and let e forwards have run before: in steps of their own, nothing else, and all
    of them are held, so e <= K.  Let l backwards start after the last step with a forward has ended, and q of the
    earlier ones have their W still to come: l + q activations are held, so l + q <= K, and l is at least 1.  Let k be
    the larger of e and l + q.

    A pair takes a forward that is not of those e.  Among the backwards that are not of those l + q it takes at most
    n - k, and saves at most g = t_F + t_B - t_F&B each time.  A pair with one of the q saves h = t_F + t_I - t_F&B, if
    that is more than 0.  So from t on the rank works at least R = total - min(t - its first start, k t_F) - g (n - k)
    - h (k - 1), and since R + t does not fall with t, t may be taken as the moment at which a gradient can be back.

    If k < n, some step with a forward ends after t.  When the last one does, no more than k t_B (or k t_W) of R is
    left, and the gradient of that forward needs D to come back and to go down to stage 0.  If k = n, take D for 0.
    When the last backward ends, at most K W are left, and its gradient goes down to stage 0.

    A step takes at least t + R + max(0, D - k t_B, way down - K t_W) for some k from 1 to K, so it takes at least the
    smallest of these.  Where stages differ, each time is their longest or shortest, whichever makes the bound smaller.
    """
    num_cells = sum(cell.number for cell in cells)
    start = min(cell.head for cell in cells)
    back = min(cell.head + cell.work.released[0] + cell.back for cell in cells)
    works = [cell.work for cell in cells]
    forward, backward = max(work.forward for work in works), max(work.backward for work in works)
    inputs, weights = max(work.inputs for work in works), max(work.weights for work in works)
    gain: Time = 0 if overlap is None else max(forward + backward - overlap, 0)
    part: Time = 0 if overlap is None else max(forward + inputs - overlap, 0)
    total = sum(cell.number * (cell.work.forward + cell.work.backward) for cell in cells)
    round_trip = min(cell.back + cell.ends for cell in cells)
    way_down = min(cell.tail for cell in cells)
    return back + min(
        total
        - min(back - start, apart * forward)
        - gain * (num_cells - apart)
        - part * (apart - 1)
        + max(0, (apart < num_cells) * (round_trip - apart * max(backward, weights)), way_down - limit * weights)
        for apart in range(1, limit + 1)
    )


def _memory(cells: Sequence[_Cell], limit: int) -> Time:
    held = sum(cell.number * (cell.work.released[0] + cell.back + cell.work.released[2]) for cell in cells)
    return min(cell.head for cell in cells) + Fraction(held) / limit


def _times(cell: _Cell) -> tuple[Time, ...]:
    return (cell.head, cell.back, cell.tail, *cell.work[:4], *cell.work.released)


def _cells(program: Program, cost: Cost) -> list[list[_Cell]]:
    work = [_work_of(stage, cost, program.num_stages) for stage in range(program.num_stages)]
    cells: list[list[_Cell]] = [[] for _ in program.ranks]
    for route, number in Counter(routes(program)).items():
        for rank, cell in zip(route, _along(route, number, work, cost), strict=True):
            cells[rank].append(cell)
    return cells


def _work_of(stage: int, cost: Cost, num_stages: int) -> _Work:
    ticks = {kind: values[stage] for kind, values in cost.per_stage(num_stages).items()}
    backward = min(ticks[B], ticks[I] + ticks[W])
    released = (ticks[F], min(ticks[B], ticks[I]), backward)
    if cost.overlap is not None and not callable(cost.overlap):  # a pair may be shorter than its parts
        pair = cost.overlap
        released = (min(released[0], pair), min(released[1], pair), min(released[2], pair))
    return _Work(ticks[F], backward, ticks[I], ticks[W], released)


def _along(route: Route, number: int, work: Sequence[_Work], cost: Cost) -> Iterator[_Cell]:
    lags = [0 if near == far else cost.latency + cost.transfer for near, far in pairwise(route)]
    forwards, backwards, ends = zip(*(one.released for one in work), strict=True)
    for stage, ticks in enumerate(work):
        head = sum(forwards[:stage]) + sum(lags[:stage])
        back = sum(forwards[stage + 1 :]) + sum(backwards[stage + 1 :]) + 2 * sum(lags[stage:])
        tail = sum(backwards[1:stage]) + sum(lags[:stage]) + ends[0] if stage else 0
        ends_at = backwards[stage] + tail if stage else ends[0]
        yield _Cell(number, head, back, ends_at, tail, ticks)
