"""The ten operations into which one MoE layer is cut, and what each of them waits for.

Chapter: book/ep/one-f-one-b-basic.  In: text such as `M_F2`, experts forward of layer 2.  Out: operations, as data.
  forward    A_F attention and router    D_F dispatch         M_F experts (the MLP)   C_F combine
  backward   C_B gradient of combine     M_B, M_W experts: inputs, weights
             D_B gradient of dispatch    A_B, A_W attention: inputs, weights
  unsplit    M_BW is M_B and M_W in one piece, A_BW is A_B and A_W: nobody gets the first half before the second is done
D and C are all-to-alls and run on the communication stream, everything else on the compute stream.
Elsewhere: DeepSeek-V3 figure 4 (ATTN, DISPATCH, MLP, COMBINE; B and W); Megatron `TransformerLayerNode`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from dualpipe_lab.timeline import Time

FORWARD = ("A_F", "D_F", "M_F", "C_F")
BACKWARD = ("C_B", "M_B", "M_W", "D_B", "A_B", "A_W")
WHOLE = {"M_BW": ("M_B", "M_W"), "A_BW": ("A_B", "A_W")}
COMM = ("D_F", "C_F", "C_B", "D_B")
COMPUTE = ("A_F", "M_F", "M_B", "M_W", "A_B", "A_W")

Ticks: TypeAlias = Mapping[str, Time]  # by kind
# what a kind waits for: another kind of the same layer, and of the layer before (-1) or behind it (+1)
_NEEDS = {
    "A_F": ("C_F", -1), "D_F": ("A_F", 0), "M_F": ("D_F", 0), "C_F": ("M_F", 0),
    "C_B": ("A_B", 1), "M_B": ("C_B", 0), "M_W": ("M_B", 0), "D_B": ("M_B", 0), "A_B": ("D_B", 0), "A_W": ("A_B", 0),
    "M_BW": ("C_B", 0), "A_BW": ("D_B", 0),
}  # fmt: skip
_OP = re.compile(r"(A_F|D_F|M_F|C_F|C_B|M_BW|M_B|M_W|D_B|A_BW|A_B|A_W)([0-9]+)")


class Op(NamedTuple):
    """One operation of one layer.

    >>> str(Op("M_F", 2)), Op("D_B", 0).is_comm
    ('M_F2', True)
    """

    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"

    @property
    def is_comm(self) -> bool:
        """Whether it is an all-to-all."""
        return self.kind in COMM

    @property
    def is_forward(self) -> bool:
        """Whether it belongs to the forward microbatch of a pair."""
        return self.kind in FORWARD

    @property
    def pieces(self) -> tuple["Op", ...]:
        """What it is made of: two operations for an unsplit backward, itself otherwise.

        >>> [str(op) for op in Op("M_BW", 1).pieces]
        ['M_B1', 'M_W1']
        """
        return tuple(Op(kind, self.layer) for kind in WHOLE.get(self.kind, (self.kind,)))

    @property
    def needs(self) -> "Op":
        """The operation whose result it takes; that of layer 0 or of the last one may lie outside of an order.

        >>> str(Op("A_F", 2).needs), str(Op("C_B", 2).needs), str(Op("D_B", 2).needs)
        ('C_F1', 'A_B3', 'M_B2')
        """
        kind, step = _NEEDS[self.kind]
        return Op(kind, self.layer + step)


def parse_ops(text: str) -> tuple[Op, ...]:
    """Read a row of operations.

    Raises:
        ValueError: for a word that is no operation, naming it.

    >>> parse_ops("A_F0 M_BW1")
    (Op(kind='A_F', layer=0), Op(kind='M_BW', layer=1))
    """
    found = []
    for place, word in enumerate(text.split()):
        match = _OP.fullmatch(word)
        if match is None:
            raise ValueError(
                f"position {place}: {word!r} is not an operation; write a kind and a layer, such as M_F2, with a kind "
                f"of {' '.join((*FORWARD, *BACKWARD, *WHOLE))}"
            )
        found.append(Op(match[1], int(match[2])))
    return tuple(found)


def ticks_of(compute: Time = 1, comm: Time = 1, **others: Time) -> dict[str, Time]:
    """Return the ticks of every kind: one number for work, one for all-to-alls, and exceptions by kind.

    An unsplit backward takes the sum of its halves unless it is given.

    Raises:
        ValueError: for floats, which are not exact, for negative numbers and unknown kinds.

    >>> ticks = ticks_of(compute=2, comm=3, M_W=1)
    >>> ticks["M_B"], ticks["M_BW"], ticks["D_F"]
    (2, 3, 3)
    """
    ticks: dict[str, Time] = dict.fromkeys(COMPUTE, compute) | dict.fromkeys(COMM, comm)
    if unknown := set(others) - set(ticks) - set(WHOLE):
        raise ValueError(f"there is no operation {min(unknown)!r}; use {', '.join((*ticks, *WHOLE))}")
    ticks |= others
    for kind, halves in WHOLE.items():
        ticks[kind] = others.get(kind, sum((ticks[half] for half in halves), 0))
    for kind, value in ticks.items():
        if isinstance(value, float) or value < 0:
            raise ValueError(f"{kind} takes a whole number or a Fraction of ticks from 0, got {value!r}")
    return ticks


def total(ops: Iterable[Op], ticks: Ticks) -> Time:
    """Return how long operations take one after the other."""
    return sum((ticks[op.kind] for op in ops), 0)
