"""Orders of a MoE layer's operations in live cells: the reader edits the two rows and sees both streams play.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.  In: an `Order`.  Out: `Outcome`s: the two streams as
a timeline, the makespan beside that of the order as given, and whether the edited order is accepted.
"""

from collections.abc import Callable

from dualpipe_lab.ep.overlap.order import InvalidOrder, Order, ticks_of
from dualpipe_lab.ep.overlap.simulator import lower_bound, simulate
from dualpipe_lab.viz.live.pipeline import Outcome, ticks_text

TICKS = {"t_op": (1, 2, 6), "tau": (0, 2, 9)}  # of an operation, of an all-to-all
ACCEPTED = "The order is accepted: every operation runs once, and no stream waits forever."


def rows_of(order: Order) -> dict[str, str]:
    """Return the two rows of an order as the reader edits them."""
    return {"compute": " ".join(map(str, order.compute)), "comm": " ".join(map(str, order.comm))}


def order_outcome(given: Order) -> Callable[..., Outcome]:
    """Return the function of a live cell in which the reader edits the rows of an order.

    >>> from dualpipe_lab.ep.overlap.order import one_f_one_b_basic
    >>> order = one_f_one_b_basic(1)
    >>> order_outcome(order)(**rows_of(order), t_op=1, tau=1).numbers["makespan"]
    ('10 ticks', '10 ticks')
    """

    def outcome(compute: str, comm: str, t_op: int, tau: int) -> Outcome:
        order = Order.parse(given.name, compute, comm, given.forward, given.backward)
        _check_same_work(order, given)
        ticks = ticks_of(t_op, tau)
        streams, before = simulate(order, ticks), simulate(given, ticks)
        numbers = {
            "makespan": (ticks_text(streams.makespan), ticks_text(before.makespan)),
            "compute stream waits": (ticks_text(streams.idle), ticks_text(before.idle)),
            "the longer of the two sums": ticks_text(lower_bound(order, ticks)),
        }
        return Outcome(streams.timeline(order.name), numbers, ACCEPTED, beside="as given")

    return outcome


def _check_same_work(order: Order, given: Order) -> None:
    if missing := given.pieces - order.pieces:
        raise InvalidOrder(f"{min(missing)} is missing: every operation of the order runs once; write it into its row")
    if strange := order.pieces - given.pieces:
        raise InvalidOrder(f"{min(strange)} does not belong to this order, which has as many layers as before; drop it")
