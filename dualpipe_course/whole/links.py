"""Exercises of "Which axis on which link": six numbers of a grid, bytes that cross.

Chapter: book/whole/links.  Bytes are whole numbers.
"""

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, TypeAlias

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended
from dualpipe_course.wrong import Wrong

NAMES = (
    "S along tp",
    "S along dp",
    "S along pp",
    "S with cut tokens",
    "S between nodes",
    "S between nodes, dp outside",
)
_SLIPS = (
    {
        256: "of an all-reduce, a rank sends 2 (t - 1) / t of its size",
        768: "a stage has 4 of the 16 layers",
        24: "that is one microbatch",
        96: "an all-reduce sends every byte about twice",
        48: "a layer has four all-reduces",
    },
    {
        12: "a rank sends 2 (N - 1) / N of its gradients, and N is 2",
        24: "tp cuts the gradients of a stage",
        96: "a rank has a quarter of the layers, and a quarter of their matrices",
        3: "an all-reduce of two ranks sends the size once",
        48: "the gradients are summed once per step, not once per microbatch",
    },
    {
        8: "a stage in the middle has two neighbours: activations go on, gradients go back",
        32: "a rank sends one activation and one gradient per microbatch; it receives as many",
        2: "that is one microbatch",
    },
    {
        192: "the second gather is missing",
        288: "each pair gathers once more, not twice",
        384: "a half sends half of what an all-reduce sends",
        216: "both pairs of a layer gather once more",
    },
    {
        512: "four stages have three borders: no stage follows the last one",
        192: "activations cross one way, their gradients the other",
        48: "there are 8 pipelines side by side, one for each place in dp and tp",
        128: "that is one border",
    },
    {
        192: "a node holds two of the four stages: one border of each pipeline crosses as well",
        576: "only the border between the second and the third stage crosses, not all three",
        448: "of two directions and three borders, one border crosses: the others lie inside a node",
        128: "that is pp; along dp every rank sends to another node",
        256: "activations cross one way, their gradients the other",
    },
)

Axes: TypeAlias = list[tuple[str, int]]


def crossing_of(
    axes: Axes, sent: dict[str, int], lines: Iterable[str], node: int, skips_last: bool = False
) -> dict[str, int]:
    """Bytes between nodes by axis.

    >>> crossing_of([("pp", 2), ("tp", 2)], {"pp": 3, "tp": 5}, ["pp"], 2)
    {'pp': 6, 'tp': 0}
    """
    found, world = {}, prod(size for _, size in axes)
    for place, (name, size) in enumerate(axes):
        stride = prod(size for _, size in axes[place + 1 :])
        hops = 0
        for rank in range(world):
            is_last = rank // stride % size == size - 1
            following = rank - (size - 1) * stride if is_last else rank + stride
            if not (is_last and (name in lines or skips_last)):
                hops += rank // node != following // node
        found[name] = hops * sent[name]
    return found


def _why(case: Any, name: str, found: Any) -> str:
    axes, sent, lines, node = case
    every = [axis for axis, _ in axes]
    slips = {
        "; the ring closes: the last rank sends to the first": crossing_of(axes, sent, lines, node, skips_last=True),
        "; a line ends: no rank follows the last one": crossing_of(axes, sent, [], node),
        "; the LAST axis of the list is innermost": crossing_of(axes[::-1], sent, lines, node),
        "; this axis is a ring": crossing_of(axes, sent, every, node),
        "; whole nodes are not enough: count each hop": {
            axis: sent[axis] * prod(s for _, s in axes) * (prod(s for _, s in axes[place:]) > node)
            for place, (axis, _) in enumerate(axes)
        },
    }
    return next((words for words, value in slips.items() if value[name] == found), "")


def _cases() -> Iterable[tuple[Axes, dict[str, int], list[str], int]]:
    sent = {"tp": 1_000_003, "dp": 10_007, "pp": 101, "cp": 7_001}
    grids: list[tuple[Axes, list[str], int]] = [
        ([("dp", 2)], [], 1),
        ([("dp", 2)], [], 2),
        ([("pp", 3)], ["pp"], 1),
        ([("pp", 2), ("tp", 2)], ["pp"], 2),
        ([("tp", 2), ("pp", 2)], ["pp"], 2),
        ([("pp", 4), ("dp", 2), ("tp", 4)], ["pp"], 8),
        ([("dp", 2), ("pp", 4), ("tp", 4)], ["pp"], 8),
        ([("dp", 3), ("pp", 2), ("tp", 2)], ["pp"], 4),
        ([("dp", 4), ("tp", 3)], [], 4),
        ([("dp", 2), ("cp", 4), ("tp", 2)], [], 4),
        ([("pp", 3), ("cp", 2), ("dp", 1), ("tp", 4)], ["pp", "cp"], 6),
        ([("dp", 5), ("tp", 3)], ["tp", "dp"], 2),
    ]
    return [(axes, {name: sent[name] for name, _ in axes}, lines, node) for axes, lines, node in grids]


def _judge_crossing(fn: Callable[..., Any]) -> str:
    cases = list(_cases())
    for case, (fine, value) in zip(cases, call_each(fn, cases), strict=True):
        axes, sent, lines, node = case
        grid = " x ".join(f"{name} {size}" for name, size in axes)
        where = f"{grid}, lines {sorted(lines) or 'none'}, {node} rank(s) per node"
        if not fine:
            raise Wrong(ended(where, value))
        expected = crossing_of(axes, sent, lines, node)
        found = {name: plain(x) for name, x in value.items()} if isinstance(value, dict) else None
        if found is None or set(found) != set(expected):
            raise Wrong(f"{where}: return a dict with the bytes of each axis")
        for name, size in axes:
            if type(found[name]) is not int or found[name] != expected[name]:
                why = _why(case, name, found[name])
                raise Wrong(f"{where}: {name} {size}: got {found[name]}, expected {expected[name]} bytes{why}")
    return f"right to the byte on {len(cases)} grids, rings, lines and odd nodes among them"


numbers = Predict(
    "links-1",
    "Six numbers of a grid",
    NAMES,
    lambda layers, m: (1.5 * layers * m, 3 / 8 * layers, 2 * m, 15 / 8 * layers * m, 48 * m, 16 * m + 12 * layers),
    "{layers} layers train on",
    "with {m} microbatches per step",
    minutes=12,
    points=2,
    hints=(
        "The table of the page has a row for each axis; put L / p = 4, m = 8, t = 4 and N = 2 into them.",
        "An all-reduce is a reduce-scatter and an all-gather. How many of these halves has a layer with cut tokens?",
        "A node holds the axes to the right, as far as their product is 8. Which hops of the next axis stay inside?",
    ),
    slips=_SLIPS,
    layers=(16, 8, 24, 32),
    m=(8, 4, 6, 10, 12, 16),
    called={"m": "microbatches"},
)

crossing = Implement(
    "links-2",
    "Bytes that cross",
    "Write `crossing(axes, sent, lines, ranks_per_node)`: bytes between nodes, by axis.",
    judge=_judge_crossing,
    minutes=20,
    points=3,
    hints=(
        "The stride of an axis is the product of the sizes to its right. What is a rank's coordinate along it?",
        "One hop on from rank r: r + stride. At the end a ring goes back by (size - 1) strides, a line ends.",
        "r // ranks_per_node is the node. Add the bytes of a hop for every r whose next rank is on another node.",
    ),
)
