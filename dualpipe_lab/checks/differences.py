"""How numbers differ from those of one process: by how much, and whether one is a multiple of the other.

equal      max |a - b| <= 1e-12 max(1, max |b|)
close      |a - b| <= 1e-12 max(1, |b|) for each pair
multiple   a = ratio b within 1e-9 of the largest: a lost 1/M, a sum that is missing, one that is taken twice
"""

from collections.abc import Sequence
from typing import NamedTuple

TOLERANCE = 1e-12


class Difference(NamedTuple):
    """The largest error with the one allowed, the first number that is off, and the ratio if it is the same for all."""

    error: float
    allowed: float
    place: int
    ratio: float | None

    def __str__(self) -> str:
        return f"differ from one process by up to {self.error:.2g}, allowed is {self.allowed:.0e}"


def close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether there are as many of ours as of theirs, each within float64's rounding of its own.

    >>> close([1.0, 2.0], [1.0, 2.0 + 1e-13]), close([1.0, float("nan")], [1.0, float("nan")])
    (True, False)
    """
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in pairs)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """Compare as many numbers of ours with theirs; None if they are equal within float64's rounding.

    >>> difference([3.0, 6.0], [1.0, 2.0]).ratio
    3.0
    >>> print(difference([1.0, 2.5], [1.0, 2.0]))
    differ from one process by up to 0.5, allowed is 2e-12
    """
    scale = max([1.0, *map(abs, theirs)])
    errors = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    if all(error <= TOLERANCE * scale for error in errors):
        return None
    place = next(i for i, error in enumerate(errors) if not error <= TOLERANCE * scale)  # nan is not equal either
    largest = max(range(len(theirs)), key=lambda i: abs(theirs[i]))
    ratio = ours[largest] / theirs[largest] if theirs[largest] else None
    if ratio is not None and not all(abs(a - ratio * b) <= 1e-9 * scale for a, b in zip(ours, theirs, strict=True)):
        ratio = None
    return Difference(max(errors), TOLERANCE * scale, place, ratio)


def shape(values: object) -> list[int]:
    """The lengths of nested lists, from the outermost.

    >>> shape([[1.0, 2.0]]), shape(3.0)
    ([1, 2], [])
    """
    return [len(values), *(shape(values[0]) if values else [])] if isinstance(values, list) else []
