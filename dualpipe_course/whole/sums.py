"""Exercises of "Who sums what with whom": groups to predict, the sums to write.

Chapter: book/whole/sums.  The sums are compared on real ranks with closed values.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from dualpipe_course.comparison import Numbers
from dualpipe_course.declared import Predict

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("ranks of the attention's sum", "ranks of an expert's sum", "copies of a router", "groups that sum experts")
_SLIPS: tuple[dict[int, str], ...] = (
    {
        24: "mirrors add before, and along tp no rank adds: the other rank of tp has another part of the matrix",
        3: "ranks along ep have other sentences too",
        4: "ranks along dp have other sentences too",
        48: "these are all ranks; only those with the same shard and other sentences add",
    },
    {
        12: "ranks along ep hold other experts; added, they would mix gradients of different weights",
        6: "ranks along tp hold the same experts and see the same tokens",
        1: "ranks along dp hold the same experts and have other sentences",
    },
    {
        12: "these are the ranks that sum it; ranks along tp, and mirrors, hold it too",
        24: "two axes beside dp and ep hold it too: tp, and under DualPipe both ranks of pp",
    },
    {4: "these are the groups of the router's sum", 8: "ranks along tp and both ranks of pp have groups of their own"},
)
Axes: TypeAlias = list[tuple[str, int]]
_DATA = ("dp", "ep", "cp")


# what each of the parameters says: the axes along which it is cut, and whether ranks of tp know parts of its gradient
_SAID: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("tp",), False),
    ((), False),
    (("ep",), False),
    ((), True),
    (("tp",), False),
    (("ep",), True),
)
_SHAPES = ((2, 3), (4,), (3, 2, 2), (4,), (5,), (2, 2))


def _slips(
    number: int, axes: Axes, here: Mapping[str, int], own: tuple[str, ...], places: int
) -> dict[str, Numbers | None]:
    """What typical mistakes make of a gradient."""
    total = _total(number, axes, here, own)
    names = [name for name, _ in axes]
    data = tuple(name for name in names if name in _DATA)
    members = prod(size for name, size in axes if name in own)
    made = {
        "this is the sum of the ranks' means and not their mean": total,
        "it is divided by the ranks that summed it; the loss of each rank is a mean over 1 / "
        f"{places} of the tokens, whichever ranks hold the weight": total / members,
        "each rank of tp knows a part of it, and these parts are not added": _total(
            number, axes, here, tuple(name for name in own if name != "tp")
        )
        / places,
        "no rank has summed it": _total(number, axes, here, ()) / places,
        "it is summed over all data ranks, also over those with other weights": _total(number, axes, here, data)
        / places,
        "it is summed along tp, where every rank has the full gradient already": _total(
            number, axes, here, tuple(name for name in names if name in own or name == "tp")
        )
        / places,
        "it is summed over the whole world, stages included": _total(number, axes, here, tuple(names)) / places,
    }
    return {words: Numbers.of(value) for words, value in made.items()}


def _is_idle(number: int, here: Mapping[str, int]) -> bool:
    """The experts of one place have got no token on the last data rank."""
    return number == 2 and here.get("dp", 0) == 1 and here.get("ep", 0) == 0


def _summand(number: int, axes: Axes, here: Mapping[str, int]) -> "Tensor":
    """The gradient on the rank at these coordinates; the same wherever nothing makes a difference."""
    import torch

    cut, is_partial = _SAID[number]
    matters = [n for n, _ in axes if n in (*cut, *_DATA, "pp") or (n == "tp" and is_partial)]
    seed = 1000 * number + sum(10**place * (1 + here[name]) for place, name in enumerate(matters))
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(_SHAPES[number], dtype=torch.float64, generator=generator)
    return torch.zeros_like(value) if _is_idle(number, here) else value


def _total(number: int, axes: Axes, here: Mapping[str, int], over: Sequence[str]) -> "Tensor":
    sizes = dict(axes)
    places = product(*(range(sizes[name]) for name in over))
    summands = [_summand(number, axes, {**here, **dict(zip(over, place, strict=True))}) for place in places]
    total = summands[0].clone()
    for other in summands[1:]:
        total += other
    return total


groups = Predict(
    "sums-1",
    "Four groups",
    NAMES,
    lambda dp, ep, tp, ranks: (dp * ep, dp, ranks, ranks / dp),
    "x dp {dp} x ep {ep} x tp {tp}",
    ", on {ranks} ranks.",
    minutes=8,
    points=1,
    hints=(
        "For each parameter: along which axes is it the same, and along which of those do ranks see other tokens?",
        "DualPipe on two ranks of pp: each of the two holds both stages.",
        "Groups that are alike: all ranks over the ranks of one group.",
    ),
    slips=_SLIPS,
    dp=(3, 2, 4, 5, 6),
    ep=(4, 2, 8),
    tp=(2, 4),
    ranks=lambda dp, ep, tp: 2 * dp * ep * tp,
)
