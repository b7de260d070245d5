"""`Efficiency`: the part of a peak that software reaches, one number or a curve over the size of the work.

In: a value, or points (size, part of the peak); whether they are measured, quoted or assumed.  Out: the part at a size.
  size       FLOPs of one matrix product, bytes of one message, or bytes that one elementwise kernel moves
  between    two points, linear in log(size): half of the way from 1 to 16 GFLOP is 4 GFLOP
  beyond     the first and the last point, constant: a curve says nothing of sizes that nobody has measured
Elsewhere: calculon's `gflops_efficiency` and `MB_efficiency`, which are steps; SimuMax's tables of shapes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log
from typing import Literal, TypeAlias

Origin: TypeAlias = Literal["measured", "quoted", "assumed"]
ORIGINS = ("measured", "quoted", "assumed")


def is_number(value: object) -> bool:
    """Return whether a value is a number, which True is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Efficiency:
    """The part of a peak that software reaches.

    Attributes:
        value: above 0, at most 1; of a curve that of its largest size, and then it may be left out.
        origin: whether it was measured, is quoted from a source, or is assumed.
        points: of a curve, (size, part of the peak), sizes ascending; none for one value at every size.
        source: where it was read, or on what it was measured.

    >>> print(Efficiency(0.65, "quoted"))
    65% (quoted)
    >>> curve = Efficiency(origin="measured", points=((1e9, 0.6), (16e9, 0.9)))
    >>> [round(curve.at(size), 2) for size in (1e6, 1e9, 4e9, 16e9, 1e12)]
    [0.6, 0.6, 0.75, 0.9, 0.9]
    >>> print(curve)
    60% to 90% (measured)

    Raises:
        ValueError: a part that is not above 0 and at most 1, sizes that do not ascend from above 0, another origin, or
            a value beside points that is not the last one's.
    """

    value: float = 1.0
    origin: Origin = "assumed"
    points: tuple[tuple[float, float], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        _check_part(self.value)
        if self.origin not in ORIGINS:
            raise ValueError(f"an efficiency is {', '.join(ORIGINS)}, got {self.origin!r}; use 'assumed'")
        object.__setattr__(self, "points", tuple(_point(point) for point in self.points))
        if self.points:
            self._check_points()
            object.__setattr__(self, "value", self.points[-1][1])

    def _check_points(self) -> None:
        sizes = [size for size, _ in self.points]
        wrong = next((pair for pair in pairwise(sizes) if pair[0] >= pair[1]), None)
        if wrong is not None:
            raise ValueError(
                f"an efficiency's points have ascending sizes, got {wrong[0]:g} before {wrong[1]:g}; sort them, and "
                "keep one of each size"
            )
        last = self.points[-1][1]
        if self.value not in (1.0, last):
            raise ValueError(
                f"an efficiency's value is that of its largest size, {last:g}, got {self.value:g}; leave value out"
            )

    def at(self, size: float) -> float:
        """Return the part of the peak that work of a size reaches.

        Args:
            size: FLOPs of one product, or bytes of one message or kernel.

        Raises:
            ValueError: a size that is not a number from 0.
        """
        if not is_number(size) or not size >= 0:
            raise ValueError(f"an efficiency needs a size from 0, got {size!r}; FLOPs of a product, or bytes")
        if not self.points:
            return self.value
        above = bisect_right(self.points, size, key=lambda point: point[0])
        if above in (0, len(self.points)):
            return self.points[min(above, len(self.points) - 1)][1]
        (low, first), (high, second) = self.points[above - 1 : above + 1]
        return first + (second - first) * (log(size / low) / log(high / low))

    def __str__(self) -> str:
        parts = [part for _, part in self.points] or [self.value]
        spread = f"{min(parts):.0%} to " if min(parts) < max(parts) else ""
        return f"{spread}{max(parts):.0%} ({self.origin})"


def _point(point: Sequence[float]) -> tuple[float, float]:
    """Return a checked point; a file has lists."""
    if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
        raise ValueError(f"an efficiency's point is (size, part of the peak), got {point!r}; such as (16e9, 0.9)")
    size, part = point
    if not is_number(size) or not 0 < size < inf:
        raise ValueError(f"an efficiency's point has a size above 0, got {size!r}; FLOPs of a product, or bytes")
    _check_part(part)
    return size, part


def _check_part(value: object) -> None:
    if not is_number(value) or not 0 < value <= 1:  # type: ignore[operator]
        raise ValueError(f"an efficiency is above 0 and at most 1, got {value!r}; 100% is 1.0")


FULL = Efficiency()  # all of the peak, where nobody says more
