"""Text of times: exact ticks, nanoseconds in a readable unit, and round steps of an axis.

In: exact times.  Out: divisors, numbers as text, distances of marks.
"""

from fractions import Fraction

from dualpipe_lab.timeline.spans import Time

_NS_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))


def scale_of(unit: str, makespan: Time) -> tuple[int, str]:
    """Return (divisor, name) of the largest unit in which the makespan is at least 1."""
    if unit != "ns":
        return 1, unit
    return next(((divisor, name) for divisor, name in _NS_UNITS if makespan >= divisor), (1, "ns"))


def number(time: Time, divisor: int = 1) -> str:
    """Return time / divisor as text: integers exactly, other numbers with up to 3 digits after the point."""
    value = Fraction(time) / divisor
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.3f}".rstrip("0").rstrip(".")


def axis_step(extent: Time, most: int, is_fine: bool = False) -> Fraction:
    """Return the smallest of 1, 2 or 5 times a power of ten of which at most `most` fit into the extent.

    Steps of times are not below 1/1000, and 1 rather than 1/2 or 1/5; `is_fine`: steps of other numbers are.
    """
    smallest = Fraction(extent) / max(most, 1)
    step = Fraction(1)
    while step >= smallest * (1 if is_fine else 10) and (is_fine or step > Fraction(1, 1000)):
        step /= 10
    factors = (2, Fraction(5, 2), 2)  # 1, 2, 5, 10
    turn = 0
    while step < smallest:
        step *= factors[turn % 3]
        turn += 1
    return step
