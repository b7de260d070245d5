"""Arithmetic of a puzzle: what a training step sends between the nodes, for any grid of 64 ranks.

Chapter: book/dp/topology.  In: axes, outermost first.  Out: what crosses the nodes, in activations of one microbatch.
  tp   a ring, 8 (L/p) m (t-1)/t from each rank to the next     four all-reduces per layer and microbatch
  dp   a ring, 2 (N-1)/N * 12 L/(p t)                           the gradients once per step
  pp   a line, 2 m between neighbours                           an activation one way, its gradient the other
with L layers of 12 activations' size each and m = 64 / N microbatches.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from dualpipe_course.exercise import Wrong
from dualpipe_course.plain import plain
from dualpipe_lab.topology import Topology

Axes: TypeAlias = list[tuple[str, int]]

RANKS, NODE, LAYERS, MICROBATCHES, LAYER = 64, 8, 16, 64, 12  # LAYER: a layer's weights, in activations
HELD, BUBBLE = 12, Fraction(1, 5)  # the limits: weights per rank, in activations; idle time over all time


def parse(answer: object) -> Axes:
    """Return an answer as axes of 64 ranks; raise `Wrong` for anything else."""
    found = plain(answer)
    given: list[Any] = found if isinstance(found, list) else [found]
    if not all(isinstance(axis, (list, tuple)) and len(axis) == 2 and type(axis[1]) is int for axis in given):
        raise Wrong('this check takes a list of axes, outermost first, such as [("tp", 8), ("pp", 2), ("dp", 4)]')
    axes = [(str(name), size) for name, size in given]
    if not {name for name, _ in axes} <= {"tp", "pp", "dp"}:
        raise Wrong("use the axes tp, pp and dp")
    try:
        Topology(axes, world_size=RANKS)
    except ValueError as error:
        raise Wrong(str(error)) from None
    return axes


def check_limits(axes: Axes) -> None:
    """Raise `Wrong` for a grid whose weights do not fit, or whose pipelines are idle for too long."""
    t, p, n = _sizes(axes)
    held = Fraction(LAYERS * LAYER, t * p)
    if held > HELD:
        raise Wrong(f"a rank would hold weights of {float(held):g} S, it has room for {HELD} S: tp * pp is 16 or more")
    num_microbatches = Fraction(MICROBATCHES, n)
    bubble = (p - 1) / (num_microbatches + p - 1)
    if bubble > BUBBLE:
        raise Wrong(
            f"{p} stages and {num_microbatches} microbatches: bubble fraction {float(bubble):.3f}, "
            f"the limit is {float(BUBBLE):g}"
        )


def _sizes(axes: Axes) -> tuple[int, int, int]:
    sizes = dict(axes)
    return sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("dp", 1)


def crossing_bytes(axes: Axes) -> dict[str, Fraction]:
    """What crosses the nodes in a step, by axis, in activations of one microbatch."""
    grid = Topology(axes, world_size=RANKS)
    t, p, n = _sizes(axes)
    num_microbatches = Fraction(MICROBATCHES, n)
    hop = {
        "tp": 8 * Fraction(LAYERS, p) * num_microbatches * Fraction(t - 1, t),
        "dp": 2 * Fraction(n - 1, n) * Fraction(LAYER * LAYERS, p * t),
        "pp": 2 * num_microbatches,  # an activation one way, its gradient the other
    }
    found = {}
    for axis in grid.names:
        pairs = [pair for group in grid.groups(axis) for pair in _hops(group, is_ring=axis != "pp")]
        found[axis] = sum(a // NODE != b // NODE for a, b in pairs) * hop[axis]
    return found


def _hops(group: Sequence[int], is_ring: bool) -> list[tuple[int, int]]:
    following = [*group[1:], group[0]] if is_ring else group[1:]
    return list(zip(group, following, strict=False))
