"""An answer as plain numbers and lists: whatever type a learner's arithmetic left it in.

In: ints, floats, fractions, numpy's scalars and arrays, tensors, tuples, ranges, nested.  Out: ints and lists of them
where that is what the values are.  A bool is no number, and an object that says it equals everything stays what it is.
"""

from fractions import Fraction
from math import isclose, isfinite
from typing import Any

ROUNDING = 8 * 2**-53  # relative: what a formula of a few operations may be off a whole number


def plain(answer: Any) -> Any:
    """Return lists for tuples, ranges, arrays and tensors, and an int for each whole number; the rest as it is.

    >>> plain((48 / 8, Fraction(12, 4), (2 / 3) * 6000, 2.5, True, range(2)))
    [6, 3, 4000, 2.5, True, [0, 1]]
    """
    if isinstance(answer, (list, tuple, range)):
        return [plain(value) for value in answer]
    if hasattr(answer, "tolist") and not isinstance(answer, type):  # numpy and torch, scalars too
        found = answer.tolist()
        return plain(found) if type(found) is list else _whole(found)
    return _whole(answer)


def _whole(value: Any) -> Any:
    if type(value) is Fraction and value.denominator == 1:
        return int(value)
    if type(value) is float and isfinite(value) and isclose(value, round(value), rel_tol=ROUNDING):
        return round(value)
    return value
