"""Which weights a rank holds, and with whom it sums their gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .row_messages import actions

Weights = dict[str, Any]  # tensors by name, and lists of them
SPLIT = {"up": 0, "down": 1}  # the dimension along which the group splits the MLP
EXPERTS = ("gates", "ups", "downs")


def holders(rows: Sequence[str]) -> dict[int, list[int]]:
    """By stage, the positions that run it, in order."""
    found: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        for stage in sorted({stage for token in row.split() for stage, _, _ in actions(token)}):
            found.setdefault(stage, []).append(position)
    return found


def part_of(w: Mapping[str, Any], member: int, size: int) -> Weights:
    """What a member of a group holds of a layer: its experts, its part of the MLP, all else; as leaves."""
    part: Weights = {}
    for name, value in w.items():
        if name in EXPERTS:
            here = len(value) // size
            part[name] = [_leaf(one) for one in value[member * here : (member + 1) * here]]
        elif name == "bias":
            part[name] = value.detach().clone()
        else:
            part[name] = _leaf(value.chunk(size, SPLIT[name])[member] if name in SPLIT else value)
    return part


def sums(
    ws: Sequence[Weights], positions: Sequence[int], member: int, size: int
) -> list[tuple[list[Tensor], list[int]]]:
    """Leaves with the ranks that add up to their gradients: the whole group's, and the same member's of each copy."""
    split: list[Tensor] = []
    common: list[Tensor] = []
    for w in ws:  # the names come in one order on all ranks
        for name, value in w.items():
            if name != "bias":
                (split if name in (*SPLIT, *EXPERTS) else common).extend(value if name in EXPERTS else [value])
    everybody = [position * size + one for position in positions for one in range(size)]
    return [(common, everybody), (split, [position * size + member for position in positions])]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()
