"""Orders of 1F1B for MoE layers: serial, overlapped, and an unpaired forward or backward.

Chapters: book/ep/one-f-one-b-basic, book/ep/one-f-one-b-overlap.  In: layers, by number or kind.  Out: an `Order`.
  basic      one operation after the other: time = total compute + total communication
  overlap    per layer, compute M_B M_W M_F A_B A_W A_F beside comm D_F D_B C_F C_B: time = the larger total plus
             a short start or end
The compute of a microbatch falls into groups, each of which ends where an all-to-all takes its result.  The overlapped
order takes a group of the forward and a group of the backward in turn, whatever layers their stages have.
Elsewhere: DeepSeek-V3 figure 4 and its published trace; Megatron `combined_1f1b`,
switched on by `--overlap-moe-expert-parallel-comm`.
Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from dualpipe_lab.ep.overlap.order import PLAIN, Layers, Op, Order, letters_of


class Group(NamedTuple):
    """Compute operations, and the all-to-all that follows them, if any."""

    compute: list[Op]
    comm: list[Op]


def one_f_one_b_basic(layers: Layers, forward: int = 1, backward: int = 0) -> Order:
    """Return the forward of one microbatch, then the unsplit backward of another.

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
    if not first.comm:  # nothing of the backward is sent: it fills the first window of the forward
        first, down = Group([], []), [first]
    nothing = Group([], [])
    turns = [first, *(group for pair in zip_longest(up, down, fillvalue=nothing) for group in pair)]
    return _order("1F1B overlap", turns, forward, backward)


def forward_alone(layers: Layers, microbatch: int = 0) -> Order:
    """Return an unpaired forward: all of its communication is exposed, except beside a shared expert.

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
    """Return I of a stage: the backward without its weight gradients.

    >>> print(input_grads_alone(1))
    input gradients
      compute  M_B0 A_B0
      comm     C_B0 D_B0
    """
    return replace(without_weight_grads(backward_alone(layers, microbatch)), name="input gradients")


def weight_grads_alone(layers: Layers, microbatch: int = 0) -> Order:
    """Return W of a stage: weight gradients alone, without communication.

    >>> print(weight_grads_alone(1))
    weight gradients
      compute  M_W0 A_W0
      comm
    """
    full = backward_alone(layers, microbatch)
    compute = tuple(op for op in full.compute if op.kind.endswith("_W"))
    return Order("weight gradients", compute, (), backward=microbatch)


def without_weight_grads(order: Order) -> Order:
    """Return an order without its weight gradients, which come later: I in place of B."""
    return replace(order, compute=tuple(op for op in order.compute if not op.kind.endswith("_W")))


def _order(name: str, groups: Sequence[Group], forward: int | None = None, backward: int | None = None) -> Order:
    compute = tuple(op for group in groups for op in group.compute)
    return Order(name, compute, tuple(op for group in groups for op in group.comm), forward, backward)


def _forward_groups(layers: Sequence[str]) -> list[Group]:
    groups, before = [], list[Op]()  # the layers in one piece since the last all-to-all
    for layer, letters in enumerate(layers):
        if letters == PLAIN:
            before.append(Op("P_F", layer))
            continue
        shared = [Op("S_F", layer)] if "S" in letters else []  # while the dispatch is under way
        groups.append(Group([*before, Op("A_F", layer)], [Op("D_F", layer)]))
        groups.append(Group([*shared, Op("M_F", layer)], [Op("C_F", layer)]))
        before = []
    return [*groups, Group(before, [])]


def _backward_groups(layers: Sequence[str], split: bool) -> list[Group]:
    groups, before = [], list[Op]()
    for layer, letters in reversed(list(enumerate(layers))):
        if letters == PLAIN:
            before += _halves("P", layer, split)
            continue
        shared = _halves("S", layer, split) if "S" in letters else []
        groups.append(Group(before, [Op("C_B", layer)]))
        # S_B while C_B is under way, S_W while D_B is
        groups.append(Group([*shared[:1], *_halves("M", layer, split), *shared[1:]], [Op("D_B", layer)]))
        before = _halves("A", layer, split)
    return [*groups, Group(before, [])]


def _halves(part: str, layer: int, split: bool) -> list[Op]:
    return [Op(f"{part}_B", layer), Op(f"{part}_W", layer)] if split else [Op(f"{part}_BW", layer)]
