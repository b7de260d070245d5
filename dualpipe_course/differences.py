"""How numbers differ from those of one process: by how much, and whether one is a multiple of the other.

equal      max |a - b| <= 1e-12 max(1, max |b|)
close      |a - b| <= 1e-12 max(1, |b|) for each pair
apart      two numbers in words, with enough digits to differ, and what an error of float32's size may come from
"""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from dualpipe_lab.launch.causes import is_like_float32, multiple

TOLERANCE = 1e-12
CAUSE = "is something float32 inside (a quotient of two integer tensors is), or an epsilon missing?"


class Apart(NamedTuple):
    """Two numbers as text that differs, and how far apart they are where six digits do not show it."""

    found: str
    expected: str
    why: str

    def __str__(self) -> str:
        return f"is {self.found}, expected {self.expected}{self.why}"


class Difference(NamedTuple):
    """The largest error with the one allowed, the first number that is off, and the ratio if it is the same for all."""

    error: float
    allowed: float
    place: int
    ratio: float | None

    def __str__(self) -> str:
        cause = f"; {CAUSE}" if self.allowed and is_like_float32(self.error * TOLERANCE / self.allowed) else ""
        return f"differ from one process by up to {self.error:.2g}, allowed is {self.allowed:.0e}{cause}"


def apart(found: float, expected: float, allowed: float | None = None) -> Apart:
    """Put two numbers into words that differ; `allowed` is the largest error that passes (default: float64's).

    >>> print(apart(2.5, 2.0))
    is 2.5, expected 2
    >>> print(apart(0.2236068, 0.2236067))
    is 0.2236068, expected 0.2236067 (1e-07 apart, allowed is 1e-12; is something float32 inside (a quotient of two \
integer tensors is), or an epsilon missing?)
    """
    digits = next((n for n in range(6, 17) if f"{found:.{n}g}" != f"{expected:.{n}g}"), 17)
    texts = f"{found:.{digits}g}", f"{expected:.{digits}g}"
    error = abs(found - expected)
    if digits == 6 or error != error:
        return Apart(*texts, "")
    allowed = TOLERANCE * max(1.0, abs(expected)) if allowed is None else allowed
    cause = f"; {CAUSE}" if expected and is_like_float32(error / abs(expected)) else ""
    return Apart(*texts, f" ({error:.1g} apart, allowed is {allowed:.0e}{cause})")


def close(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether there are as many of ours as of theirs, each within float64's rounding of its own.

    >>> close([1.0, 2.0], [1.0, 2.0 + 1e-13]), close([1.0, float("nan")], [1.0, float("nan")])
    (True, False)
    """
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in pairs)


def difference(ours: Sequence[float], theirs: Sequence[float], tolerance: float = TOLERANCE) -> Difference | None:
    """Compare as many numbers of ours with theirs; None if they are equal within float64's rounding.

    Another tolerance is relative to the largest finite number; 0 compares every bit.

    >>> difference([3.0, 6.0], [1.0, 2.0]).ratio
    3.0
    >>> print(difference([1.0, 2.5], [1.0, 2.0]))
    differ from one process by up to 0.5, allowed is 2e-12
    """
    allowed = tolerance * max([1.0, *(abs(value) for value in theirs if isfinite(value))])
    errors = [0.0 if a == b else abs(a - b) for a, b in zip(ours, theirs, strict=True)]  # -inf is -inf
    if all(error <= allowed for error in errors):
        return None
    place = next(i for i, error in enumerate(errors) if not error <= allowed)  # nan is not equal either
    return Difference(max(errors), allowed, place, multiple(ours, theirs))


def shape(values: object) -> list[int]:
    """The lengths of nested lists, from the outermost.

    >>> shape([[1.0, 2.0]]), shape(3.0)
    ([1, 2], [])
    """
    return [len(values), *(shape(values[0]) if values else [])] if isinstance(values, list) else []
