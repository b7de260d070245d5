"""Exercises of "1F1B overlap": times of a pair, the calls of a host, a better order, a wait in the wrong place.

Chapter: book/ep/one-f-one-b-overlap.  Orders and calls are judged by exact simulation, one host on the virtual clock.
"""

from collections.abc import Callable
from typing import Any

from dualpipe_course import check as checks
from dualpipe_course.ep.hosts import check_calls, check_time, needs_of, watched
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, check_ints, ended, needs_function, on_ranks, partial_score
from dualpipe_lab.ep.overlap import (
    InvalidOrder,
    Order,
    backward_alone,
    check_pair,
    forward_alone,
    host_calls,
    lower_bound,
    one_f_one_b_basic,
    one_f_one_b_overlap,
    simulate,
    ticks_of,
)
from dualpipe_lab.world.emulate.link import Link

NAMES = ("serial", "overlapped", "W not split", "overlapped on the slow link")
EXPECTED = (220, 121, 130, 160)
_SLIPS = (
    {120: "that is the work alone", 100: "that is the communication alone", 200: "work is 6 pieces per layer"},
    {
        120: "almost: the first M_B waits for C_B, and only A_F runs meanwhile",
        100: "work takes longer than that",
        220: "that is the serial order",
    },
    {
        121: "that is the split pair; unsplit, D_B leaves only after M_W, and M_F alone hides it",
        131: "the first wait is counted already: each layer has two journeys that stick out by 1 tick",
        125: "two journeys of each layer stick out, D_B and C_B",
    },
    {
        120: "communication is longer than work now",
        164: "the link never idles here: 8 is twice a piece of work",
        124: "communication is longer than work now",
    },
)
UNEVEN = ticks_of(comm=3, A_F=1, A_B=1, A_W=1, M_F=4, M_B=4, M_W=4)
V3_TICKS, TARGET, LAYERS = 36, 32, 2
_LIBRARY = ("dualpipe_lab.ep.overlap.host:host_calls", "dualpipe_lab.ep.overlap.host")


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("one_f_one_b_overlap"), exercise)


@exercise(
    "one_f_one_b_overlap-1",
    "Five layers",
    "predict",
    minutes=10,
    points=1,
    hints=(
        "Per layer there are 6 pieces of work of 4 ticks and 4 journeys of 5.",
        "Overlapped, look at the longer sum, then at what happens before the first M_B can start.",
        "Unsplit, two journeys of every layer have one piece of work to hide behind: 4 ticks of 5.",
    ),
)
def numbers(answer: object) -> str:
    """Predict how long a pair takes in four settings."""
    general = (
        "5 layers, 6 pieces of work and 4 journeys in each, one after the other",
        "the longer of the two sums, and what the beginning adds",
        "per layer the 6 pieces of work, and what sticks out of D_B and C_B",
        "the longer of the two sums, and what the beginning adds",
    )
    check_ints(answer, NAMES, EXPECTED, _SLIPS, general)
    return "220 ticks serial, 121 overlapped, 130 with W not split, 160 on the slow link"


@exercise(
    "one_f_one_b_overlap-2",
    "What the host calls",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "Walk through `compute`. Issue what is next in `comm` and ready, at first and after each piece of work.",
        "Before a piece of work that needs an all-to-all, wait for that one and for those before it in `comm`.",
        "At the end wait for what is left. An operation that `needs` does not contain is ready at once.",
    ),
)
def host(fn: Callable[..., Any]) -> str:
    """Write `host(compute, comm, needs)`: a list of calls for one thread, as early and as late as they can be."""
    needs_function(fn)
    orders = _orders()
    texts = [(list(map(str, o.compute)), list(map(str, o.comm)), needs_of(o)) for o in orders]
    for order, (fine, value) in zip(orders, call_each(Without(fn, *_LIBRARY), texts), strict=True):
        case = f"{order.name}, {len(order.compute)} pieces of work"
        if not fine:
            raise Wrong(ended(case, value))
        calls = check_calls(value, order, case)
        for ticks in (ticks_of(1, 1), ticks_of(2, 3), ticks_of(1, 3), ticks_of(4, 2), ticks_of(4, 3), UNEVEN):
            check_time(calls, order, ticks, case)
    return f"{len(orders)} orders: every call once, and no tick more than the two streams need"


@exercise(
    "one_f_one_b_overlap-3",
    "Short attention",
    "puzzle",
    minutes=20,
    points=3,
    hints=(
        "Print simulate(order, ticks).waits(). What could have run while A_B waited for D_B?",
        "A 4 is a long window: put M_F between M_B and M_W, and D_B has M_F and M_W.",
        "C_F is needed by A_F of the next layer. Let it travel behind M_W, and keep A_W for a gap that is left.",
    ),
)
def short_attention(answer: object) -> str:
    """Order the operations of a pair of two layers so that it ends by tick 32."""
    order = _pair(answer)
    streams = simulate(order, UNEVEN)
    if streams.makespan > TARGET:
        waits = ", ".join(f"{op} for {ticks}" for op, ticks in streams.waits())
        raise Wrong(
            f"a legal order of {streams.makespan} ticks, {TARGET} are wanted; DeepSeek's order takes {V3_TICKS}. "
            f"Work waits at {waits}",
            score=partial_score(int(streams.makespan), V3_TICKS, TARGET),
        )
    least = lower_bound(order, UNEVEN)
    return f"{streams.makespan} ticks; the longer sum is {least}, DeepSeek's order takes {V3_TICKS}"


@exercise(
    "one_f_one_b_overlap-4",
    "Asynchronous in name",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "Results are right. Add up the times of work and of all-to-alls: what does the host take?",
        "Keep what issue(op) returns. Who needs its rows, and when?",
        "Wait in front of do(op) for needs.get(op), if that was issued and not waited for. What is left at the end?",
    ),
)
def patient(fn: Callable[..., Any]) -> str:
    """Repair a host whose asynchronous all-to-alls hide nothing."""
    needs_function(fn)
    work = 10
    for num_layers, travel in ((1, 10), (3, 10), (1, 12), (1, 15)):
        link = Link(gbps=8 * 8 / (travel * 1e6))  # one number from each rank to the other
        order = one_f_one_b_overlap(num_layers)
        program = [str(op) for verb, op in host_calls(order) if verb != "wait"]
        case = f"{num_layers} layer(s), work of {work} ms, all-to-alls of {travel} ms"
        out = on_ranks(watched, 2, fn, program, needs_of(order), work, case=case, clock="virtual", link=link)
        expected = simulate(order, ticks_of(work, travel)).makespan
        _check_report(out[0], float(expected), case)
    return "60 ms for one layer and 180 for three, the work alone; with slower links no wait comes before its need"


def _check_report(report: str, expected: float, case: str) -> None:
    try:
        taken = float(report)
    except ValueError:
        raise Wrong(f"{case}: {report}") from None
    if taken > expected:
        raise Wrong(
            f"{case}: the host takes {taken:g} ms; {expected:g} are enough. "
            "Where does it wait for an all-to-all whose rows nobody needs yet?"
        )


def _orders() -> list[Order]:
    return [
        forward_alone(1),
        backward_alone(2),
        one_f_one_b_basic(2),
        *(one_f_one_b_overlap(n, split=split) for n in (1, 2, 4) for split in (True, False)),
        Order.parse(
            "late all-to-alls",
            "A_F0 M_B1 M_F0 A_B1 M_W1 A_F1 M_B0 M_F1 A_B0 M_W0 A_W1 A_W0",
            "C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1",
        ),
        Order.parse("two that become ready at once", "A_F0 M_B0 M_W0 M_F0 A_B0 A_W0", "C_B0 D_B0 D_F0 C_F0"),
    ]


def _pair(answer: object) -> Order:
    if not isinstance(answer, (list, tuple)) or [type(row) for row in answer] != [str, str]:
        raise Wrong("this check takes two rows of text: the operations of work, then the all-to-alls")
    try:
        order = Order.parse("yours", answer[0], answer[1], forward=1, backward=0)
        check_pair(order, LAYERS)
        host_calls(order)
    except InvalidOrder as error:
        raise Wrong(str(error).removeprefix("yours: ")) from None
    except ValueError as error:
        raise Wrong(str(error)) from None
    return order
