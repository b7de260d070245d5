"""`fit`: overhead, rate and efficiency curve of one kind of work, from its seconds at some sizes.

In: seconds by size.  Out: numbers with which `overhead + size / (rate * efficiency)` is what was measured.
  overhead     where the line through the two smallest sizes meets size 0; of these seconds those count in which a
               larger size was done too, for what else the machine does only adds
  rate         the best of size / (seconds - overhead)
  efficiency   at each size its rate, over the best one; a size of which the overhead is more than 90% says nothing
The curve passes its sizes, so they test nothing: other sizes, other shapes and full layers do.
Elsewhere: LogP and alpha-beta models of messages, which have one rate.
Source: Hockney 1994, "The communication challenge for MPP": latency and half-performance size.
"""

from collections.abc import Mapping
from typing import NamedTuple

_LEAST_PART = 0.1  # of the seconds, that the work itself must take before its rate can be told


class Fitted(NamedTuple):
    """What `fit` has found.

    Attributes:
        overhead: seconds of work of size 0.
        rate: sizes per second, the best.
        points: (size, part of the rate), sizes ascending.
    """

    overhead: float
    rate: float
    points: tuple[tuple[float, float], ...]


def fit(seconds: Mapping[float, float], overhead: float | None = None) -> Fitted:
    """Return overhead, rate and curve of one kind of work.

    Args:
        seconds: by size, of at least two sizes.
        overhead: where it is known (default: fitted too).

    Raises:
        ValueError: fewer sizes, or a number that is not above 0.

    >>> fit({1024: 1.25, 2048: 1.5, 8192: 5.0})
    Fitted(overhead=1.0, rate=4096.0, points=((1024, 1.0), (2048, 1.0), (8192, 0.5)))
    """
    if len(seconds) < 2 or any(not value > 0 for pair in seconds.items() for value in pair):
        raise ValueError(f"a fit needs seconds above 0 of two sizes or more, got {dict(seconds)}; measure more sizes")
    sizes = sorted(seconds)
    offset = _intercept(sizes, seconds) if overhead is None else overhead
    told = [size for size in sizes if seconds[size] - offset >= _LEAST_PART * seconds[size]] or sizes[-1:]
    rates = {size: size / max(seconds[size] - offset, _LEAST_PART * seconds[size]) for size in told}
    best = max(rates.values())
    return Fitted(offset, best, tuple((size, rates[size] / best) for size in told))


def _intercept(sizes: list[float], seconds: Mapping[float, float]) -> float:
    """Return the seconds at size 0 of the line through the two smallest sizes, from 0 to those of the smallest."""
    small, large = sizes[:2]
    first, second = (min(seconds[size] for size in sizes[start:]) for start in (0, 1))
    return min(max(first - small * (second - first) / (large - small), 0.0), first)
