"""Exercises of "1F1B overlap": times of a pair, the calls of a host, a better order, a wait in the wrong place.

Chapter: book/ep/one-f-one-b-overlap.  Orders and calls are judged by exact simulation, one host on the virtual clock.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import call_each, ended, on_ranks, partial_score
from dualpipe_course.variants import Known
from dualpipe_course.wrong import Wrong
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
from dualpipe_lab.ep.overlap.closed_forms import overlap_makespan
from dualpipe_lab.ep.overlap.order import Op, Ticks, parse_ops
from dualpipe_lab.launch.emulator import Link
from dualpipe_lab.timeline import Time

NAMES = ("serial", "overlapped", "W not split", "overlapped on the slow link")
UNEVEN = ticks_of(comm=3, A_F=1, A_B=1, A_W=1, M_F=4, M_B=4, M_W=4)
V3_TICKS, TARGET, LAYERS = 36, 32, 2
_LIBRARY = tuple(f"dualpipe_lab.ep.overlap.simulator:{name}" for name in ("host_calls", "_Host", "Call"))
VERBS = ("run", "issue", "wait")


def _four_settings(work: int, travel: int, slow: int) -> Sequence[Time] | None:
    if not work < travel < 1.5 * work < slow:
        return None
    unsplit = overlap_makespan(5, work, travel, split=False)
    return 30 * work + 20 * travel, overlap_makespan(5, work, travel), unsplit, overlap_makespan(5, work, slow)


def _slips(work: int, travel: int, slow: int) -> Known:
    answers = _four_settings(work, travel, slow)
    assert answers is not None
    serial, overlapped, _, slowest = map(int, answers)
    out, longer = travel - work, "communication is longer than work now"
    twice = f": {slow} is twice a piece of work" if slow == 2 * work else ""
    always_busy = [(slowest + slow - work, f"the link never idles here{twice}")] if slowest == 20 * slow else []
    return (
        (
            (30 * work, "that is the work alone"),
            (20 * travel, "that is the communication alone"),
            (25 * work + 20 * travel, "work is 6 pieces per layer"),
        ),
        (
            (30 * work, "almost: the first M_B waits for C_B, and only A_F runs meanwhile"),
            (20 * travel, "work takes longer than that"),
            (serial, "that is the serial order"),
        ),
        (
            (overlapped, "that is the split pair; unsplit, D_B leaves only after M_W, and M_F alone hides it"),
            (
                overlapped + 10 * out,
                f"the first wait is counted already: "
                f"each layer has two all-to-alls that stick out by {out} tick{'s' if out > 1 else ''}",
            ),
            (30 * work + 5 * out, "two all-to-alls of each layer stick out, D_B and C_B"),
        ),
        (
            (30 * work, longer),
            *always_busy,
            (30 * work + slow - work, longer),
        ),
    )


def _check_report(report: str, expected: float, case: str) -> None:
    try:
        taken = float(report)
    except ValueError:
        raise Wrong(f"{case}: {report}") from None
    if taken > expected:
        raise Wrong(
            f"{case}: the host takes {taken:g} ms; {expected:g} are enough. "
            "Where does it wait for an all-to-all whose rows are not needed yet?"
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


def _needs_of(order: Order) -> dict[str, str]:
    """For each operation the one of this order that it takes the result of, as text."""
    makers = order.makers()
    ops = (*order.compute, *order.comm)
    return {str(op): str(makers[op.needs]) for op in ops if op.needs in makers}


def _check_calls(answer: object, order: Order, case: str) -> list[tuple[str, Op]]:
    """Return the calls of an answer if they carry out an order; raise `Wrong` with the first that does not."""
    calls = [_read(call, case) for call in _listed(answer, case)]
    rows: dict[str, Sequence[Op]] = {"run": order.compute, "issue": order.comm, "wait": order.comm}
    needs, seen = _needs_of(order), dict.fromkeys(VERBS, 0)
    over: set[str] = set()
    for verb, op in calls:
        done = seen[verb]
        expected = rows[verb][done] if done < len(rows[verb]) else None
        if op != expected:
            due = f"next in that row is {expected}" if expected else "that row is over"
            raise Wrong(f"{case}: {verb} {op}, but {due}")
        if verb == "wait" and done >= seen["issue"]:
            raise Wrong(f"{case}: wait {op} comes before its issue: the host would wait for ever")
        needed = needs.get(str(op))
        if verb != "wait" and needed is not None and needed not in over:
            missing = "was not waited for" if parse_ops(needed)[0].is_comm else "has not run"
            raise Wrong(f"{case}: {verb} {op} takes what {needed} makes, and {needed} {missing}")
        seen[verb] += 1
        if verb != "issue":
            over.add(str(op))
    for verb, row in rows.items():
        if seen[verb] < len(row):
            raise Wrong(f"{case}: there is no {verb} {row[seen[verb]]}")
    return calls


def _time_of(calls: Sequence[tuple[str, Op]], ticks: Ticks) -> Time:
    """Return when a host with these calls is done: work takes its time, an issue none, a wait until the rows are there.

    >>> _time_of([("issue", Op("D_F", 0)), ("run", Op("M_B", 0)), ("wait", Op("D_F", 0))], {"D_F": 3, "M_B": 2})
    3
    """
    now: Time = 0
    free: Time = 0
    ends: dict[Op, Time] = {}
    for verb, op in calls:
        if verb == "run":
            now += ticks[op.kind]
        elif verb == "issue":
            ends[op] = free = max(free, now) + ticks[op.kind]
        else:
            now = max(now, ends[op])
    return now


def _check_time(calls: Sequence[tuple[str, Op]], order: Order, ticks: Ticks, case: str) -> None:
    """Raise `Wrong` if the calls take longer than the two streams need."""
    taken, needed = _time_of(calls, ticks), simulate(order, ticks).makespan
    if taken > needed:
        raise Wrong(
            f"{case}: the calls are legal and take {taken} ticks; the two streams need {needed}, the longer of their "
            f"sums is {lower_bound(order, ticks)}. Which wait comes before it has to, or which issue later than it "
            "could?"
        )


def _watched(
    rank: int, world_size: int, fn: Callable[..., Any], program: Sequence[str], needs: Mapping[str, str], ms: float
) -> str:
    """Let a host work on this rank; return what it did wrong, or its time in milliseconds."""
    import dualpipe_lab as lab

    done = _Done(dict(needs), ms)
    try:
        fn(list(program), done.do, done.issue, dict(needs))
    except LookupError as error:
        return str(error)
    is_comm = {op: parse_ops(op)[0].is_comm for op in program}
    if [op for op in program if not is_comm[op]] != done.ran or [op for op in program if is_comm[op]] != done.issued:
        return "not every operation ran once, in the order of the program"
    if unwaited := [op for op in done.issued if op not in done.waited]:
        return f"{unwaited[0]} was never waited for: its rows may not have come when the function returns"
    return f"{lab.now() / 1e6:g}"


class _Done:
    """What a host has done, and the functions that it is given."""

    def __init__(self, needs: Mapping[str, str], ms: float) -> None:
        self._needs, self._ms = needs, ms
        self.ran: list[str] = []
        self.issued: list[str] = []
        self.waited: set[str] = set()

    def do(self, op: str) -> None:
        import dualpipe_lab as lab

        self._check(op)
        lab.compute(self._ms)
        self.ran.append(op)

    def issue(self, op: str) -> "_Journey":
        self._check(op)
        self.issued.append(op)
        return _Journey(op, self.waited)

    def _check(self, op: str) -> None:
        needed = self._needs.get(op)
        if needed is not None and needed not in self.waited and needed not in self.ran:
            raise LookupError(f"{op} takes what {needed} makes, and {needed} is not over")


class _Journey:
    """An all-to-all under way."""

    def __init__(self, op: str, waited: set[str]) -> None:
        import torch

        from dualpipe_lab import comm

        rows = torch.zeros(comm.get_world_size(), dtype=torch.float64)
        self._op, self._waited = op, waited
        self._work = comm.all_to_all_single(rows, rows + 1, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._waited.add(self._op)


def _listed(answer: object, case: str) -> list[Any]:
    if not isinstance(answer, (list, tuple)):
        raise Wrong(f"{case}: expected a list of calls, got {type(answer).__name__}")
    return list(answer)


def _read(call: object, case: str) -> tuple[str, Op]:
    parts = list(call) if isinstance(call, (list, tuple)) else []
    try:
        verb, (op,) = parts[0], parse_ops(" ".join(map(str, parts[1:])))
    except (IndexError, ValueError):
        raise Wrong(f'{case}: {call!r} is not a call; write ("issue", "D_F0")') from None
    if type(verb) is not str or verb not in VERBS:
        raise Wrong(f"{case}: {verb!r} is not one of run, issue, wait")
    if op.is_comm == (verb == "run"):
        raise Wrong(f"{case}: {verb} {op}; work is run, an all-to-all is issued and waited for")
    return verb, op


def _judge_host(fn: Callable[..., Any]) -> str:
    orders = _orders()
    texts = [(list(map(str, o.compute)), list(map(str, o.comm)), _needs_of(o)) for o in orders]
    for order, (fine, value) in zip(orders, call_each(Without(fn, *_LIBRARY), texts), strict=True):
        case = f"{order.name}, {len(order.compute)} pieces of work"
        if not fine:
            raise Wrong(ended(case, value))
        calls = _check_calls(value, order, case)
        for ticks in (ticks_of(1, 1), ticks_of(2, 3), ticks_of(1, 3), ticks_of(4, 2), ticks_of(4, 3), UNEVEN):
            _check_time(calls, order, ticks, case)
    return f"{len(orders)} orders: every call once, and no tick more than the two streams need"


def _judge_short_attention(answer: object) -> str:
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


def _judge_patient(fn: Callable[..., Any]) -> str:
    work = 10
    for num_layers, travel in ((1, 10), (3, 10), (1, 12), (1, 15)):
        link = Link(gbps=8 * 8 / (travel * 1e6))  # one number from each rank to the other
        order = one_f_one_b_overlap(num_layers)
        program = [str(op) for verb, op in host_calls(order) if verb != "wait"]
        case = f"{num_layers} layer(s), work of {work} ms, all-to-alls of {travel} ms"
        out = on_ranks(_watched, 2, fn, program, _needs_of(order), work, case=case, clock="virtual", link=link)
        expected = simulate(order, ticks_of(work, travel)).makespan
        _check_report(out[0], float(expected), case)
    return "60 ms for one layer and 180 for three, the work alone; with slower links no wait comes before its need"


numbers = Predict(
    "one_f_one_b_overlap-1",
    "Five layers",
    NAMES,
    _four_settings,
    "every piece of work takes {work} ticks, every all-to-all {travel}.",
    "takes {slow} ticks?",
    minutes=10,
    points=1,
    trail=True,
    hints=(
        "Per layer there are 6 pieces of work of 4 ticks and 4 all-to-alls of 5.",
        "Overlapped, look at the longer sum, then at what happens before the first M_B can start.",
        "Unsplit, two all-to-alls of every layer have one piece of work to hide behind: 4 ticks of 5.",
    ),
    slips=_slips,
    work=(4, 6, 8, 10),
    travel=(5, 7, 9, 11, 13),
    slow=(8, 10, 12, 14, 16, 18, 20),
    called={"work": "work", "travel": "all-to-all", "slow": "on the slow link"},
)

host = Implement(
    "one_f_one_b_overlap-2",
    "What the host calls",
    "Write `host(compute, comm, needs)`: a list of calls for one thread, as early and as late as they can be.",
    judge=_judge_host,
    minutes=15,
    points=3,
    hints=(
        "Walk through `compute`. Issue what is next in `comm` and ready, at first and after each piece of work.",
        "Before a piece of work that needs an all-to-all, wait for that one and for those before it in `comm`.",
        "At the end wait for what is left. An operation that `needs` does not contain is ready at once.",
    ),
)

short_attention = Puzzle(
    "one_f_one_b_overlap-3",
    "Short attention",
    "Order the operations of a pair of two layers so that it ends by tick 32.",
    judge=_judge_short_attention,
    minutes=20,
    points=3,
    hints=(
        "Print simulate(order, ticks).waits(). What could have run while A_B waited for D_B?",
        "A 4 is a long window: put M_F between M_B and M_W, and D_B has M_F and M_W.",
        "C_F is needed by A_F of the next layer. Let it travel behind M_W, and keep A_W for a gap that is left.",
    ),
)

patient = Repair(
    "one_f_one_b_overlap-4",
    "Asynchronous in name",
    "Repair a host whose asynchronous all-to-alls hide nothing.",
    judge=_judge_patient,
    minutes=10,
    points=2,
    trail=True,
    hints=(
        "Results are right. Add up the times of work and of all-to-alls: what does the host take?",
        "Keep what issue(op) returns. Who needs its rows, and when?",
        "Wait in front of do(op) for needs.get(op), if that was issued and not waited for. What is left at the end?",
    ),
)
