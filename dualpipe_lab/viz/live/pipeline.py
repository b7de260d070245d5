"""What live cells show: schedules at any size and cost; programs and orders that the reader writes; their controls.

Chapter: book/pp/gpipe, book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.
In: names, sizes, costs; or rows of actions, or of operations of a MoE layer.  Out: `Outcome`s: a timeline, its numbers
beside the closed forms or beside those of the order as given, and the validator's verdict.
The short forms of controls are those of `ipywidgets.interact`, but that three numbers are a range around its start.
  makespan, bubble fraction, peak live activations   simulated; the closed form of the schedule stands beside them
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from inspect import signature
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from dualpipe_lab.ep.overlap import simulator as streams
from dualpipe_lab.ep.overlap.order import InvalidOrder, Order, ticks_of
from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.ranking import stage_cost
from dualpipe_lab.pp.schedules.variants import Variant, variant
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.validation.rules import InvalidProgram
from dualpipe_lab.pp.validation.validator import validate
from dualpipe_lab.timeline import Time, Timeline
from dualpipe_lab.timeline.units import number

SIZES = {"num_ranks": (2, 4, 8), "num_microbatches": (1, 8, 16)}
COSTS = {"F": (1, 4), "I": (1, 4), "W": (1, 4), "latency": (0, 4)}
STARTS = {"num_ranks": 4, "num_microbatches": 8, "F": 1, "I": 1, "W": 1, "B": 2, "num_virtual_stages": 2}
ACCEPTED = "The validator accepts the program: every gradient is computed once, and no rank waits forever."
COST_NAMES = tuple(signature(Cost).parameters)
TICKS = {"t_op": (1, 2, 6), "tau": (0, 2, 9)}  # of an operation, of an all-to-all
ORDER_ACCEPTED = "The order is accepted: every operation runs once, and no stream waits forever."


class Slider(NamedTuple):
    """Whole numbers from `low` to `high`."""

    name: str
    low: int
    high: int
    start: int


class Choice(NamedTuple):
    """One of several values, by the words that the reader sees."""

    name: str
    options: dict[str, Any]
    start: Any


class Toggle(NamedTuple):
    """Yes or no."""

    name: str
    start: bool


class Text(NamedTuple):
    """A text, such as an order of operations."""

    name: str
    start: str


Control: TypeAlias = Slider | Choice | Toggle | Text


def split_controls(given: Mapping[str, Any], starts: Mapping[str, Any]) -> tuple[list[Control], dict[str, Any]]:
    """Return the controls that the short forms describe, and the values that stay fixed.

    (low, high) and (low, start, high): a slider.  A list, or a dictionary from words to values: a choice that starts
    with its first entry.  True or False: a box.  A text: a text.  Any other value is fixed.
    `starts`: where the slider of a pair starts, by name (default: at its lower end).
    Raises ValueError for an empty choice and for a range that is not in order.
    """
    controls, fixed = [], {}
    for name, value in given.items():
        control = _control(name, value, starts)
        if control is None:
            fixed[name] = value
        else:
            controls.append(control)
    return controls, fixed


def _control(name: str, value: Any, starts: Mapping[str, Any]) -> Control | None:
    if isinstance(value, bool):
        return Toggle(name, value)
    if isinstance(value, str):
        return Text(name, value)
    if isinstance(value, list | dict):
        options = value if isinstance(value, dict) else {str(option): option for option in value}
        if not options:
            raise ValueError(f"{name}: a choice needs at least one entry, got {value!r}")
        return Choice(name, dict(options), next(iter(options.values())))
    return _slider(name, value, starts) if isinstance(value, tuple) else None


def _slider(name: str, value: tuple[Any, ...], starts: Mapping[str, Any]) -> Slider:
    numbers = value
    if len(value) == 2 and all(isinstance(number, int) for number in value):
        low, high = value
        numbers = (low, min(max(starts.get(name, low), low), high), high)
    if len(numbers) != 3 or not all(isinstance(number, int) for number in numbers) or list(numbers) != sorted(numbers):
        raise ValueError(f"{name}: a slider is (low, high) or (low, start, high) in whole numbers, got {value!r}")
    low, start, high = numbers
    return Slider(name, low, high, start)


def words_of(value: Any) -> str:
    """Return a number as a reader wants it: 0.2727 and 1/3 keep four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or not isinstance(value, Real):
        return str(value)
    return f"{float(value):.4g}"


class Outcome(NamedTuple):
    """What a live cell shows; a number may be a pair: the value and what `beside` names."""

    drawing: Any
    numbers: Mapping[str, Any] = {}
    verdict: str = ""
    beside: str = "closed form"
    remark: str = ""


def schedule_outcome(
    schedule: str, num_ranks: int, num_microbatches: int, per_rank: bool = False, **rest: Any
) -> Outcome:
    """Build, validate and simulate a schedule; ValueError for a size or an option that it does not have.

    `rest`: costs, and options of the builder; an option that the schedule does not have is left out.
    `per_rank`: costs are those of a rank's share of the model, so that schedules with several stages per rank compare.
    """
    one = variant(schedule)
    one = one.with_options({name: value for name, value in rest.items() if name not in COST_NAMES and one.has(name)})
    cost = Cost(**{name: value for name, value in rest.items() if name in COST_NAMES})
    program = one.build(num_ranks, num_microbatches)
    cost = stage_cost(program, cost) if per_rank else cost
    timeline = simulate(validate(program), cost)
    makespan, peak, remark = _closed_forms(one, num_ranks, num_microbatches, cost)
    work = sum(timeline.busy_time(rank) for rank in range(num_ranks))
    derived = (
        ticks_text(makespan),
        "" if makespan is None else f"{float(1 - Fraction(work) / (num_ranks * makespan)):.1%}",
        "" if peak is None else str(peak),
    )
    simulated = numbers_of(timeline)
    numbers = dict(zip(simulated, zip(simulated.values(), derived, strict=True), strict=True))
    return Outcome(timeline, numbers, ACCEPTED, remark=remark)


def numbers_of(timeline: Timeline) -> dict[str, str]:
    """Return makespan, bubble fraction and peak live activations of a simulated timeline, as text."""
    return {
        "makespan": ticks_text(timeline.makespan),
        "bubble fraction": f"{timeline.bubble_fraction:.1%}",
        "peak live activations": _peak(timeline),
    }


def outcome_of(result: Any) -> Outcome:
    """Return what a reader's function returned; programs (and costs) are validated, timelines bring their numbers."""
    if isinstance(result, Outcome):
        return result
    parts = result if isinstance(result, tuple) else (result,)
    if isinstance(parts[0], Program):
        timeline = simulate(validate(parts[0]), *parts[1:])
        return Outcome(timeline, numbers_of(timeline), ACCEPTED)
    if isinstance(parts[0], Timeline) and len(parts) == 1 and parts[0].unit == "ticks":
        return Outcome(parts[0], numbers_of(parts[0]))
    return Outcome(*parts)


def program_outcome(given: Program) -> Callable[..., Outcome]:
    """Return the function of a live cell in which the reader edits the rows of a program."""
    start: dict[Cost, Timeline] = {}

    def outcome(order: str, **costs: Any) -> Outcome:
        cost = Cost(**costs)
        program = Program.parse(given.name, order)
        if program.num_ranks != given.num_ranks:
            raise ValueError(
                f"the order has {program.num_ranks} rows, {given.name} has {given.num_ranks} ranks; write one row each"
            )
        timeline = simulate(validate(given.with_ranks(program.ranks)), cost)
        if cost not in start:
            start[cost] = simulate(given, cost)
        now, before = numbers_of(timeline), numbers_of(start[cost])
        numbers = {name: (now[name], before[name]) for name in now}
        return Outcome(timeline, numbers, ACCEPTED, beside="as given")

    return outcome


def order_text(program: Program) -> str:
    """Return the rows of a program as the reader edits them."""
    return "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(program.rows()))


def sentence(error: Exception) -> str:
    """Return an error as one sentence: of an invalid program the first problem."""
    if isinstance(error, InvalidProgram):
        more = len(error.problems) - 1
        return error.problems[0] + (f" ({more} more problem{'s' * (more > 1)})" if more else "")
    words = " ".join(str(error).split())
    return words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"


def rows_of(order: Order) -> dict[str, str]:
    """Return the two rows of an order as the reader edits them."""
    return {"compute": " ".join(map(str, order.compute)), "comm": " ".join(map(str, order.comm))}


def order_outcome(given: Order) -> Callable[..., Outcome]:
    """Return the function of a live cell in which the reader edits the rows of an order."""

    def outcome(compute: str, comm: str, t_op: int, tau: int) -> Outcome:
        order = Order.parse(given.name, compute, comm, given.forward, given.backward)
        _check_same_work(order, given)
        ticks = ticks_of(t_op, tau)
        found, before = streams.simulate(order, ticks), streams.simulate(given, ticks)
        numbers = {
            "makespan": (ticks_text(found.makespan), ticks_text(before.makespan)),
            "compute stream waits": (ticks_text(found.idle), ticks_text(before.idle)),
            "the longer of the two sums": ticks_text(streams.lower_bound(order, ticks)),
        }
        return Outcome(found.timeline(order.name), numbers, ORDER_ACCEPTED, beside="as given")

    return outcome


def _check_same_work(order: Order, given: Order) -> None:
    if missing := given.pieces - order.pieces:
        raise InvalidOrder(f"{min(missing)} is missing: every operation of the order runs once; write it into its row")
    if strange := order.pieces - given.pieces:
        raise InvalidOrder(f"{min(strange)} does not belong to this order, which has as many layers as before; drop it")


def _closed_forms(
    one: Variant, num_ranks: int, num_microbatches: int, cost: Cost
) -> tuple[Time | None, int | None, str]:
    """Return makespan and most activations of a rank, None without a form, and why there is no makespan."""
    schedule = schedules.named(one.name)
    given = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "cost": cost} | one.options
    makespan, peak, remark = None, None, "There is no closed form of the makespan."
    if schedule.makespan:
        try:
            makespan, remark = schedule.value(schedule.makespan, **given), ""
        except ValueError as refusal:
            remark = f"No closed form here: {str(refusal).partition(';')[0]}."
    if schedule.peak:
        peak = max(int(schedule.value(schedule.peak, rank=rank, **given)) for rank in range(num_ranks))
    return makespan, peak, remark


def _peak(timeline: Timeline) -> str:
    held = [timeline.peak_activations(rank) for rank in range(timeline.num_ranks)]
    most = max(held)
    if held.count(most) == len(held):
        return f"{most} on every rank"
    return f"{most} on rank {held.index(most)}" if held.count(most) == 1 else f"{most} on {held.count(most)} ranks"


def ticks_text(time: Time | None) -> str:
    """Return a time in ticks as words; nothing for None."""
    return "" if time is None else f"{number(time)} tick{'s' * (time != 1)}"
