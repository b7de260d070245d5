"""Controls: what the reader of a live cell may change, as data.

Chapter: book/pp/gpipe.  In: short forms, such as (1, 16).  Out: sliders, choices, boxes and texts, and fixed values.
Elsewhere: the abbreviations of `ipywidgets.interact`; here three numbers are a range around its start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Slider:
    """Whole numbers from `low` to `high`."""

    name: str
    low: int
    high: int
    start: int


@dataclass(frozen=True)
class Choice:
    """One of several values, by the words that the reader sees."""

    name: str
    options: dict[str, Any]
    start: Any


@dataclass(frozen=True)
class Toggle:
    """Yes or no."""

    name: str
    start: bool


@dataclass(frozen=True)
class Text:
    """A text, such as an order of operations."""

    name: str
    start: str


Control: TypeAlias = Slider | Choice | Toggle | Text


def split_controls(given: Mapping[str, Any], starts: Mapping[str, Any]) -> tuple[list[Control], dict[str, Any]]:
    """Return the controls that the short forms describe, and the values that stay fixed.

    (low, high) and (low, start, high): a slider.  A list, or a dictionary from words to values: a choice that starts
    with its first entry.  True or False: a box.  A text: a text.  Any other value is fixed.
    `starts`: where the slider of a pair starts, by name (default: at its lower end).
    Raises ValueError for an empty choice and for a range that is not in order.

    >>> split_controls({"num_ranks": (2, 8), "latency": 1}, {"num_ranks": 4})
    ([Slider(name='num_ranks', low=2, high=8, start=4)], {'latency': 1})
    """
    controls, fixed = [], {}
    for name, value in given.items():
        control = _control(name, value, starts)
        if control is None:
            fixed[name] = value
        else:
            controls.append(control)
    return controls, fixed


def _control(name: str, value: Any, starts: Mapping[str, Any]) -> Control | None:
    if isinstance(value, bool):
        return Toggle(name, value)
    if isinstance(value, str):
        return Text(name, value)
    if isinstance(value, list | dict):
        options = value if isinstance(value, dict) else {str(option): option for option in value}
        if not options:
            raise ValueError(f"{name}: a choice needs at least one entry, got {value!r}")
        return Choice(name, dict(options), next(iter(options.values())))
    return _slider(name, value, starts) if isinstance(value, tuple) else None


def _slider(name: str, value: tuple[Any, ...], starts: Mapping[str, Any]) -> Slider:
    numbers = value
    if len(value) == 2 and all(isinstance(number, int) for number in value):
        low, high = value
        numbers = (low, min(max(starts.get(name, low), low), high), high)
    if len(numbers) != 3 or not all(isinstance(number, int) for number in numbers) or list(numbers) != sorted(numbers):
        raise ValueError(f"{name}: a slider is (low, high) or (low, start, high) in whole numbers, got {value!r}")
    low, start, high = numbers
    return Slider(name, low, high, start)


def words_of(value: Any) -> str:
    """Return a number as a reader wants it: 0.2727 and 1/3 keep four digits.

    >>> words_of(0.272727), words_of(33), words_of(True)
    ('0.2727', '33', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or not isinstance(value, Real):
        return str(value)
    return f"{float(value):.4g}"
