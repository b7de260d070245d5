"""The calls of the host thread: run compute, issue an all-to-all, wait for one.

Chapter: book/ep/one-f-one-b-overlap.  In: an `Order`.  Out: all `Call`s of one thread, in order.
  issue   as soon as the operation whose result it sends has run: the all-to-all proceeds while the host goes on
  wait    right before the operation that takes its result, no earlier
The comm stream runs in order, so the wait for an all-to-all comes after the waits for those before it.
Elsewhere: `dist.all_to_all_single(..., async_op=True)` and `work.wait()`; on a GPU two streams and events.
"""

from collections.abc import Iterator
from typing import NamedTuple

from dualpipe_lab.ep.overlap.order import InvalidOrder, Op, Order

RUN, ISSUE, WAIT = "run", "issue", "wait"


class Call(NamedTuple):
    """One call of the host: run, issue or wait, and the operation.

    >>> str(Call("issue", Op("D_F", 0)))
    'issue D_F0'
    """

    verb: str
    op: Op

    def __str__(self) -> str:
        return f"{self.verb} {self.op}"


def host_calls(order: Order) -> list[Call]:
    """Return the calls that execute an order.

    Raises:
        InvalidOrder: the host would wait for ever; the message names the operation.

    >>> from dualpipe_lab.ep.overlap.builders import forward_alone
    >>> ", ".join(map(str, host_calls(forward_alone(1))))
    'run A_F0, issue D_F0, wait D_F0, run M_F0, issue C_F0, wait C_F0'
    """
    return list(_Host(order).calls())


class _Host:
    def __init__(self, order: Order) -> None:
        self.order, self.makers = order, order.makers()
        self.done: set[Op] = set()  # work that has run, all-to-alls that were waited for
        self.issued = self.waited = 0  # numbers of operations of the comm row

    def calls(self) -> Iterator[Call]:
        yield from self.issue()
        for op in self.order.compute:
            for needed in self.missing(op):
                yield from self.wait_for(op, needed)
            yield Call(RUN, op)
            self.done.add(op)
            yield from self.issue()
        if self.issued < len(self.order.comm):
            self.stuck(self.order.comm[self.issued], "the end")
        yield from self.wait(len(self.order.comm))

    def issue(self) -> Iterator[Call]:
        """Issue the next operations of the comm row while their operands are ready."""
        while self.issued < len(self.order.comm):
            op = self.order.comm[self.issued]
            if self.missing(op):
                return
            self.issued += 1
            yield Call(ISSUE, op)

    def missing(self, op: Op) -> list[Op]:
        """Return the operations whose results an operation takes, and which have not ended."""
        return [needed for needed in self.order.operands(op, self.makers) if needed not in self.done]

    def wait_for(self, op: Op, needed: Op) -> Iterator[Call]:
        if not needed.is_comm:
            raise InvalidOrder(f"{self.order.name}: {op} comes before {needed}, whose result it takes")
        position = self.order.comm.index(needed)
        if position >= self.issued:
            self.stuck(self.order.comm[self.issued], str(op))
        yield from self.wait(position + 1)

    def wait(self, until: int) -> Iterator[Call]:
        for op in self.order.comm[self.waited : until]:
            self.done.add(op)
            yield Call(WAIT, op)
        self.waited = max(self.waited, until)

    def stuck(self, next_comm: Op, before: str) -> None:
        needed = (*self.missing(next_comm), next_comm.needs)[0]
        raise InvalidOrder(
            f"{self.order.name}: nothing goes on before {before}: next on the comm stream is {next_comm}, which needs "
            f"{needed}, and that has not run"
        )
