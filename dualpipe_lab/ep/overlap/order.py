"""`Order`: the operations of one forward and one backward through MoE layers, on two streams, as data; its builders.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.  In: layers, by number or kind, or text such as
`M_F2`, experts forward of layer 2.  Out: two rows of operations, immutable and checked.
A layer is named by the letters of its forward: ADMC, ASDMC with a shared expert, P.
Elsewhere: DeepSeek-V3 figure 4 (ATTN, DISPATCH, MLP, COMBINE; B and W) and its published trace; Megatron
`TransformerLayerNode` and `combined_1f1b`, switched on by `--overlap-moe-expert-parallel-comm`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple, TypeAlias

from dualpipe_lab.timeline import Time

# A: attention and router, D: dispatch, M: experts (the MLP), C: combine; _B: gradient of the inputs, _W: of the weights
FORWARD = ("A_F", "D_F", "M_F", "C_F")
BACKWARD = ("C_B", "M_B", "M_W", "D_B", "A_B", "A_W")
# both gradients in one piece: that of the inputs is ready after both halves
UNSPLIT = {f"{part}_BW": (f"{part}_B", f"{part}_W") for part in "MASP"}
# the all-to-alls, on the communication stream; all others run on the compute stream
COMM = ("D_F", "C_F", "C_B", "D_B")
# S: a shared expert, beside the dispatch and beside the gradient of combine
# P: a layer without all-to-alls in one piece: embedding, dense layer, head
COMPUTE = ("A_F", "M_F", "M_B", "M_W", "A_B", "A_W", "S_F", "S_B", "S_W", "P_F", "P_B", "P_W")
ROUTED, SHARED, PLAIN = "ADMC", "ASDMC", "P"  # layers, by the letters of their forward
Ticks: TypeAlias = Mapping[str, Time]  # by kind
Layers: TypeAlias = int | Sequence[str]  # a number of routed layers, or the letters of each layer
Group: TypeAlias = tuple[list["Op"], list["Op"]]  # compute operations, and the all-to-all that follows them, if any
# the operands of a kind: for each, the operations that may make it, their kind and their layer relative to this one
_INPUT = ((("C_F", -1), ("P_F", -1)), (("S_F", -1),))
_OUTPUT_GRAD = ((("A_B", 1), ("P_B", 1)),)
_NEEDS: dict[str, tuple[tuple[tuple[str, int], ...], ...]] = {
    "A_F": _INPUT, "P_F": _INPUT,
    **{kind: (((maker, 0),),) for kind, maker in {
        "D_F": "A_F", "S_F": "A_F", "M_F": "D_F", "C_F": "M_F",
        "M_B": "C_B", "M_W": "M_B", "D_B": "M_B", "A_W": "A_B", "S_W": "S_B", "P_W": "P_B", "M_BW": "C_B",
    }.items()},
    **dict.fromkeys(("C_B", "S_B", "P_B", "S_BW", "P_BW"), _OUTPUT_GRAD),
    **dict.fromkeys(("A_B", "A_BW"), ((("D_B", 0),), (("S_B", 0),))),
}  # fmt: skip
_OP = re.compile(r"(D_F|C_F|C_B|D_B|[AMSP]_(?:F|BW|B|W))([0-9]+)")


class Op(NamedTuple):
    """One operation of one layer, such as `M_F2`."""

    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"

    @property
    def is_comm(self) -> bool:
        return self.kind in COMM

    @property
    def is_forward(self) -> bool:
        return self.kind.endswith("_F")

    @property
    def pieces(self) -> tuple["Op", ...]:
        """The parts of the operation: two for an unsplit backward, itself otherwise."""
        return tuple(Op(kind, self.layer) for kind in UNSPLIT.get(self.kind, (self.kind,)))

    @property
    def needs(self) -> "Op":
        """The operation whose result this one takes between routed layers, within the order or not."""
        kind, step = _NEEDS[self.kind][0][0]
        return Op(kind, self.layer + step)


def parse_ops(text: str) -> tuple[Op, ...]:
    """Parse a row of operations.

    Raises:
        ValueError: naming a word that is not an operation.

    >>> parse_ops("A_F0 M_BW1")
    (Op(kind='A_F', layer=0), Op(kind='M_BW', layer=1))
    """
    found = []
    for position, word in enumerate(text.split()):
        match = _OP.fullmatch(word)
        if match is None:
            raise ValueError(
                f"position {position}: {word!r} is not an operation; write a kind and a layer, such as M_F2, with a "
                f"kind of {' '.join((*COMM, *COMPUTE, *UNSPLIT))}"
            )
        found.append(Op(match[1], int(match[2])))
    return tuple(found)


def ticks_of(compute: Time = 1, comm: Time = 1, **others: Time) -> dict[str, Time]:
    """Return the ticks of every kind: one number for compute, one for all-to-alls, and exceptions by kind.

    An unsplit backward takes the sum of its halves unless it is given.

    Raises:
        ValueError: for floats, which are not exact, for negative numbers and unknown kinds.

    >>> ticks = ticks_of(compute=2, comm=3, M_W=1)
    >>> ticks["M_B"], ticks["M_BW"], ticks["D_F"]
    (2, 3, 3)
    """
    ticks: dict[str, Time] = dict.fromkeys(COMPUTE, compute) | dict.fromkeys(COMM, comm)
    if unknown := set(others) - set(ticks) - set(UNSPLIT):
        raise ValueError(f"there is no operation {min(unknown)!r}; use {', '.join((*ticks, *UNSPLIT))}")
    ticks |= others
    for kind, halves in UNSPLIT.items():
        ticks[kind] = others.get(kind, sum((ticks[half] for half in halves), 0))
    for kind, value in ticks.items():
        if isinstance(value, float) or value < 0:
            raise ValueError(f"{kind} takes a whole number or a Fraction of ticks from 0, got {value!r}")
    return ticks


class InvalidOrder(ValueError):  # noqa: N818 - as InvalidProgram
    """An order that is incomplete, or that would deadlock."""


@dataclass(frozen=True)
class Order:
    """The operations of a forward and a backward microbatch on two streams, each row in execution order.

    An operation starts when the one before it in its row and those whose results it takes have ended.  What neither row
    computes was computed before: the input, the loss.

    Attributes:
        name: a title.
        compute, comm: the rows of the two streams.
        forward, backward: numbers of the microbatches; None for a half that the order does not have.

    Raises:
        InvalidOrder: an operation in the wrong row, or twice, or one microbatch in both halves.

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
        count = Counter(piece for op in (*self.compute, *self.comm) for piece in op.pieces)
        if again := [piece for piece, times in count.items() if times > 1]:
            raise InvalidOrder(f"{min(again)} occurs twice; every operation runs once")

    @classmethod
    def parse(
        cls, name: str, compute: str, comm: str, forward: int | None = None, backward: int | None = None
    ) -> "Order":
        """Parse the two rows from text; raises ValueError as `parse_ops`."""
        return cls(name, parse_ops(compute), parse_ops(comm), forward, backward)

    @property
    def pieces(self) -> set[Op]:
        """All operations, unsplit ones as their two halves."""
        return set(self._makers)

    def makers(self) -> dict[Op, Op]:
        """Map every piece to the operation of a row that contains it: `M_B1` may be a part of `M_BW1`."""
        return dict(self._makers)

    @cached_property
    def _makers(self) -> dict[Op, Op]:
        return {piece: op for op in (*self.compute, *self.comm) for piece in op.pieces}

    def operands(self, op: Op) -> list[Op]:
        """Return the operations of the rows whose results an operation takes."""
        found = []
        for alternatives in _NEEDS[op.kind]:
            wanted = (Op(kind, op.layer + step) for kind, step in alternatives)
            found += [self._makers[piece] for piece in wanted if piece in self._makers][:1]
        return found

    def microbatch(self, op: Op) -> int | None:
        return self.forward if op.is_forward else self.backward

    def __str__(self) -> str:
        rows = (("compute", self.compute), ("comm", self.comm))
        return "\n".join([self.name, *(f"  {name:8} {' '.join(map(str, row))}".rstrip() for name, row in rows)])


def check_pair(order: Order, layers: Layers, backward_layers: Layers | None = None) -> None:
    """Refuse an order that is not one full forward and one full backward.

    Args:
        order: any order.
        layers: of the forward, as in `one_f_one_b_overlap`.
        backward_layers: of the backward, if they differ.

    Raises:
        InvalidOrder: naming the first operation that is missing or extra.

    >>> check_pair(Order.parse("half", "A_F0 M_F0", "D_F0 C_F0"), 1)
    Traceback (most recent call last):
    dualpipe_lab.ep.overlap.order.InvalidOrder: half: a pair of 1 layers contains C_B0, this order does not
    """
    up, down = letters_of(layers), letters_of(layers if backward_layers is None else backward_layers)
    forward, backward = ops_of_layers(up, True), ops_of_layers(down, False)
    found, size = order.pieces, f"{len(up)}" if len(up) == len(down) else f"{len(up)} and {len(down)}"
    for op in sorted([*forward, *backward], key=lambda op: op.layer):
        if op not in found:
            raise InvalidOrder(f"{order.name}: a pair of {size} layers contains {op}, this order does not")
    if strange := found - {*forward, *backward}:
        raise InvalidOrder(f"{order.name}: a pair of {size} layers does not contain {min(strange)}")


def letters_of(layers: Layers) -> tuple[str, ...]:
    """Return the letters of each layer; ValueError if there is no layer, or letters that no layer has."""
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        if not layers or not set(layers) <= {ROUTED, SHARED, PLAIN}:
            raise ValueError(
                f"an order needs one layer or more, each {ROUTED}, {SHARED} or {PLAIN}, got {list(layers)}"
            )
        return tuple(layers)
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ValueError(f"an order needs a whole number of layers from 1, got {layers!r}")
    return (ROUTED,) * layers


def ops_of_layers(letters: Sequence[str], is_forward: bool) -> list[Op]:
    """Return the operations of the forward or of the backward through layers, layer by layer."""
    kinds = (*FORWARD, "S_F", "P_F") if is_forward else (*BACKWARD, "S_B", "S_W", "P_B", "P_W")
    return [Op(kind, layer) for layer, each in enumerate(letters) for kind in kinds if kind[0] in each]


def one_f_one_b_basic(layers: Layers, forward: int = 1, backward: int = 0) -> Order:
    """Return the forward of one microbatch, then the unsplit backward of another.

    One operation runs after the other: the time is total compute + total communication.

    >>> print(one_f_one_b_basic(1))
    1F1B basic
      compute  A_F0 M_F0 M_BW0 A_BW0
      comm     D_F0 C_F0 C_B0 D_B0
    """
    first, second = forward_alone(layers, forward), backward_alone(layers, backward, split=False)
    return Order("1F1B basic", first.compute + second.compute, first.comm + second.comm, forward, backward)


def one_f_one_b_overlap(
    layers: Layers,
    forward: int = 1,
    backward: int = 0,
    split: bool = True,
    backward_layers: Layers | None = None,
) -> Order:
    """Return the overlapped pair: forward layer i runs beside backward layer L - 1 - i.

    A group of the forward and a group of the backward take turns, whatever layers their stages have; a group ends where
    an all-to-all takes its result.  The time is the larger of compute and communication, plus a short start or end.

    Args:
        layers: of the forward: a number of routed layers, or the letters of each.
        forward: its microbatch.
        backward: the microbatch of the backward.
        split: whether weight gradients are separate operations, which fill the windows.
        backward_layers: of the backward, if its stage has others; the longer half continues alone.

    >>> print(one_f_one_b_overlap(2))
    1F1B overlap
      compute  A_F0 M_B1 M_W1 M_F0 A_B1 A_W1 A_F1 M_B0 M_W0 M_F1 A_B0 A_W0
      comm     C_B1 D_F0 D_B1 C_F0 C_B0 D_F1 D_B0 C_F1
    >>> print(one_f_one_b_overlap(["P", "ASDMC"], backward_layers=["P"]))
    1F1B overlap
      compute  P_F0 A_F1 P_B0 P_W0 S_F1 M_F1
      comm     D_F1 C_F1
    """
    up = _forward_groups(letters_of(layers))
    first, *down = _backward_groups(letters_of(layers if backward_layers is None else backward_layers), split)
    nothing: Group = [], []
    if not first[1]:  # nothing of the backward is sent: it fills the first window of the forward
        first, down = nothing, [first]
    turns = [first, *(group for pair in zip_longest(up, down, fillvalue=nothing) for group in pair)]
    return _order("1F1B overlap", turns, forward, backward)


def forward_alone(layers: Layers, microbatch: int = 0) -> Order:
    """Return an unpaired forward: all its communication is exposed, except beside a shared expert.

    >>> print(forward_alone(1))
    forward
      compute  A_F0 M_F0
      comm     D_F0 C_F0
    """
    return _order("forward", _forward_groups(letters_of(layers)), forward=microbatch)


def backward_alone(layers: Layers, microbatch: int = 0, split: bool = True) -> Order:
    """Return an unpaired backward; if it is split, its own weight gradients overlap communication.

    >>> print(backward_alone(2))
    backward
      compute  M_B1 M_W1 A_B1 A_W1 M_B0 M_W0 A_B0 A_W0
      comm     C_B1 D_B1 C_B0 D_B0
    """
    return _order("backward", _backward_groups(letters_of(layers), split), backward=microbatch)


def input_grads_alone(layers: Layers, microbatch: int = 0) -> Order:
    """Return I of a stage: the backward without its weight gradients."""
    return replace(without_weight_grads(backward_alone(layers, microbatch)), name="input gradients")


def weight_grads_alone(layers: Layers, microbatch: int = 0) -> Order:
    """Return W of a stage: weight gradients alone, without communication."""
    full = backward_alone(layers, microbatch)
    compute = tuple(op for op in full.compute if op.kind.endswith("_W"))
    return Order("weight gradients", compute, (), backward=microbatch)


def without_weight_grads(order: Order) -> Order:
    """Return an order without its weight gradients, which come later: I in place of B."""
    return replace(order, compute=tuple(op for op in order.compute if not op.kind.endswith("_W")))


def _order(name: str, groups: Sequence[Group], forward: int | None = None, backward: int | None = None) -> Order:
    compute, comm = (tuple(chain(*rows)) for rows in zip(*groups, strict=True))
    return Order(name, compute, comm, forward, backward)


def _forward_groups(layers: Sequence[str]) -> list[Group]:
    groups, before = list[Group](), list[Op]()  # before: the layers in one piece since the last all-to-all
    for layer, letters in enumerate(layers):
        if letters == PLAIN:
            before.append(Op("P_F", layer))
            continue
        shared = [Op("S_F", layer)] if "S" in letters else []  # while the dispatch is under way
        groups.append(([*before, Op("A_F", layer)], [Op("D_F", layer)]))
        groups.append(([*shared, Op("M_F", layer)], [Op("C_F", layer)]))
        before = []
    return [*groups, (before, [])]


def _backward_groups(layers: Sequence[str], split: bool) -> list[Group]:
    groups, before = list[Group](), list[Op]()
    for layer, letters in reversed(list(enumerate(layers))):
        if letters == PLAIN:
            before += _halves("P", layer, split)
            continue
        shared = _halves("S", layer, split) if "S" in letters else []
        groups.append((before, [Op("C_B", layer)]))
        # S_B while C_B is under way, S_W while D_B is
        groups.append(([*shared[:1], *_halves("M", layer, split), *shared[1:]], [Op("D_B", layer)]))
        before = _halves("A", layer, split)
    return [*groups, (before, [])]


def _halves(part: str, layer: int, split: bool) -> list[Op]:
    return [Op(f"{part}_B", layer), Op(f"{part}_W", layer)] if split else [Op(f"{part}_BW", layer)]
