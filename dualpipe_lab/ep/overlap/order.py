"""An order of one forward and one backward on two streams, as data: what computes after what, what travels after what.

Chapter: book/ep/one-f-one-b-overlap.  In: two rows of operations.  Out: an immutable `Order`, checked.
A stream works through its row and never overtakes: an operation starts when the one before it in its row and the one
that it needs are over.  What is needed and in neither row was done before: the input, the loss.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from dualpipe_lab.ep.overlap.operations import BACKWARD, FORWARD, Op, parse_ops


class InvalidOrder(ValueError):  # noqa: N818 - as InvalidProgram
    """An order that is incomplete, or that would never end."""


@dataclass(frozen=True)
class Order:
    """Operations of a forward and of a backward microbatch, for each stream in its order.

    Attributes:
        name: a title.
        compute, comm: the two rows.
        forward, backward: numbers of the microbatches; None where there is no such half.

    Raises:
        InvalidOrder: an all-to-all among the work or work among the all-to-alls, an operation that occurs twice, or
            one microbatch in both halves.

    >>> order = Order.parse("a layer forward", "A_F0 M_F0", "D_F0 C_F0", forward=0)
    >>> print(order)
    a layer forward
      compute  A_F0 M_F0
      comm     D_F0 C_F0
    """

    name: str
    compute: tuple[Op, ...]
    comm: tuple[Op, ...]
    forward: int | None = None
    backward: int | None = None

    def __post_init__(self) -> None:
        if self.forward is not None and self.forward == self.backward:
            raise InvalidOrder(
                f"microbatch {self.forward} cannot be paired with itself: its backward begins with the loss, and the "
                "loss waits for all of its forward; pair a forward with the backward of an earlier microbatch"
            )
        for row, is_comm in ((self.compute, False), (self.comm, True)):
            if misplaced := [op for op in row if op.is_comm != is_comm]:
                stream = "comm" if misplaced[0].is_comm else "compute"
                raise InvalidOrder(f"{misplaced[0]} runs on the {stream} stream; move it to that row")
        seen: set[Op] = set()
        for op in (*self.compute, *self.comm):
            if again := seen.intersection(op.pieces):
                raise InvalidOrder(f"{min(again)} occurs twice; every operation runs once")
            seen.update(op.pieces)

    @classmethod
    def parse(
        cls, name: str, compute: str, comm: str, forward: int | None = None, backward: int | None = None
    ) -> "Order":
        """Read the two rows from text.

        Raises:
            ValueError: as `parse_ops`; InvalidOrder as above.
        """
        return cls(name, parse_ops(compute), parse_ops(comm), forward, backward)

    @property
    def pieces(self) -> set[Op]:
        """All operations, unsplit ones as their two halves."""
        return {piece for op in (*self.compute, *self.comm) for piece in op.pieces}

    def makers(self) -> dict[Op, Op]:
        """For every piece, the operation of a row that makes it: `M_B1` may be a part of `M_BW1`."""
        return {piece: op for op in (*self.compute, *self.comm) for piece in op.pieces}

    def microbatch(self, op: Op) -> int | None:
        """Return the microbatch that an operation works on."""
        return self.forward if op.is_forward else self.backward

    def __str__(self) -> str:
        rows = (("compute", self.compute), ("comm", self.comm))
        return "\n".join([self.name, *(f"  {name:8} {' '.join(map(str, row))}".rstrip() for name, row in rows)])


def check_pair(order: Order, num_layers: int) -> None:
    """Refuse an order that is not the whole forward of one microbatch and the whole backward of another.

    Raises:
        InvalidOrder: naming the first operation that is missing, or does not belong.

    >>> check_pair(Order.parse("half", "A_F0 M_F0", "D_F0 C_F0"), 1)
    Traceback (most recent call last):
    dualpipe_lab.ep.overlap.order.InvalidOrder: half: a pair of 1 layers contains C_B0, this order does not
    """
    expected = every_op((*FORWARD, *BACKWARD), num_layers)
    found = order.pieces
    for op in expected:
        if op not in found:
            raise InvalidOrder(f"{order.name}: a pair of {num_layers} layers contains {op}, this order does not")
    if strange := found - set(expected):
        raise InvalidOrder(f"{order.name}: a pair of {num_layers} layers does not contain {min(strange)}")


def every_op(kinds: Iterable[str], num_layers: int) -> list[Op]:
    """Return the operations of these kinds for every layer."""
    return [Op(kind, layer) for layer in range(num_layers) for kind in kinds]
