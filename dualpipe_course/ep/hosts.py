"""Judging what a host does: every operation once and in order, and the time that its calls take.

Chapter: book/ep/one-f-one-b-overlap.  In: calls, (verb, operation).  Out: nothing, or `Wrong` with the first bad call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dualpipe_course.exercise import Wrong
from dualpipe_lab.ep.overlap import Order, lower_bound, simulate
from dualpipe_lab.ep.overlap.order import Op, Ticks, parse_ops
from dualpipe_lab.timeline import Time

VERBS = ("run", "issue", "wait")


def needs_of(order: Order) -> dict[str, str]:
    """For each operation the one of this order that it takes the result of, as text."""
    makers = order.makers()
    ops = (*order.compute, *order.comm)
    return {str(op): str(makers[op.needs]) for op in ops if op.needs in makers}


def check_calls(answer: object, order: Order, case: str) -> list[tuple[str, Op]]:
    """Return the calls of an answer if they carry out an order; raise `Wrong` with the first that does not."""
    calls = [_read(call, case) for call in _listed(answer, case)]
    rows: dict[str, Sequence[Op]] = {"run": order.compute, "issue": order.comm, "wait": order.comm}
    needs, seen = needs_of(order), dict.fromkeys(VERBS, 0)
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


def time_of(calls: Sequence[tuple[str, Op]], ticks: Ticks) -> Time:
    """Return when a host with these calls is done: work takes its time, an issue none, a wait until the rows are there.

    >>> time_of([("issue", Op("D_F", 0)), ("run", Op("M_B", 0)), ("wait", Op("D_F", 0))], {"D_F": 3, "M_B": 2})
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


def check_time(calls: Sequence[tuple[str, Op]], order: Order, ticks: Ticks, case: str) -> None:
    """Raise `Wrong` if the calls take longer than the two streams need."""
    taken, needed = time_of(calls, ticks), simulate(order, ticks).makespan
    if taken > needed:
        raise Wrong(
            f"{case}: the calls are legal and take {taken} ticks; the two streams need {needed}, the longer of their "
            f"sums is {lower_bound(order, ticks)}. Which wait comes before it has to, or which issue later than it "
            "could?"
        )


def watched(
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
        return f"nobody waited for {unwaited[0]}: its rows may not have come when the function returns"
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
