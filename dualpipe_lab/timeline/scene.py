"""The scene of every picture: shapes and words at places in px, written as one accessible <svg>.

In: elements of SVG by their names and attributes (`stroke_width` for stroke-width).  Out: text without script, fonts or
ids, so that pages and images can hold it.  Words and lines have the page's text colour (currentColor), and follow light
and dark with it.
"""

from collections.abc import Iterable
from fractions import Fraction
from html import escape
from math import ceil, floor
from typing import Any, NamedTuple

from dualpipe_lab.timeline.spans import Time
from dualpipe_lab.timeline.units import axis_step

SMALL: dict[str, Any] = {"font_size": 11}
NOTE: dict[str, Any] = {"font_size": 11, "opacity": ".75"}
_FUZZ = Fraction(1, 10**9)  # of a step: the float 0.3 has a tick of 0.1


class Axis(NamedTuple):
    """An axis: the values from `low` to `high` lie between the pixels `start` and `end`."""

    low: Time | float
    high: Time | float
    start: float
    end: float

    def at(self, value: Time | float) -> float:
        """Return the place of a value, in px."""
        return self.start + (self.end - self.start) * float((value - self.low) / (self.high - self.low))

    def ticks(self, most: int, is_fine: bool = False) -> list[Fraction]:
        """Return the multiples of a round step (`axis_step`) on the axis.

        >>> [str(tick) for tick in Axis(0.1, 0.95, 0, 100).ticks(most=5, is_fine=True)]
        ['1/5', '2/5', '3/5', '4/5']
        """
        low, high = Fraction(self.low), Fraction(self.high)
        step = axis_step(high - low, most, is_fine)
        return [k * step for k in range(ceil(low / step - _FUZZ), floor(high / step + _FUZZ) + 1)]


def svg(
    width: float, height: float, label: str, body: Iterable[str], text: str = "", scales: bool = True, role: str = "img"
) -> str:
    """Return the picture; `text` describes it to a screen reader, `scales`: on a narrow page it becomes narrower."""
    words = shape("title", escape(label)) + (shape("desc", escape(text)) if text else "")
    return shape(
        "svg",
        words + "".join(body),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {px(width)} {px(height)}",
        width=width,
        height=height,
        style="max-width:100%;height:auto" if scales else None,
        role=role,
        aria_label=label,
        fill="currentColor",
        font_family="system-ui,sans-serif",
        font_size=12,
    )


def shape(tag: str, content: str = "", /, **attributes: float | str | None) -> str:
    """Return one element around its content; a number is a length, and None leaves its attribute out."""
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    words = "".join(f' {name}="{escape(v) if isinstance(v, str) else px(v)}"' for name, v in given.items())
    return f"<{tag}{words}>{content}</{tag}>" if content else f"<{tag}{words}/>"


def text(x: float | str, y: float | str, words: str, **style: Any) -> str:
    """Return words that begin at x, on the line y; `text_anchor`: or end there, or have their middle there."""
    return shape("text", escape(words), x=x, y=y, **style)


def heading(words: str) -> str:
    """Return the title of a picture, at its top left."""
    return text(4, 16, words, font_weight=600)


def rect(x: float, y: float, width: float, height: float, **style: Any) -> str:
    """Return a rectangle."""
    return shape("rect", x=x, y=y, width=width, height=height, **style)


def swatches(entries: Iterable[tuple[str, str]], x: float, y: float, letter: float) -> str:
    """Return a line of coloured squares, each with its words; `letter`: the mean width of one, in px."""
    parts = []
    for colour, words in entries:
        parts.append(rect(x, y - 10, 11, 11, fill=colour) + text(x + 17, y, words))
        x += 33 + letter * len(words)
    return "".join(parts)


def focusable(name: str, words: str, body: Iterable[str]) -> str:
    """Return shapes as one group of the class `name`, which the keyboard reaches and a screen reader calls `words`."""
    title = shape("title", escape(words))
    return shape("g", title + "".join(body), class_=name, tabindex=0, role="img", aria_label=words)


def px(length: float) -> str:
    """Write a length with at most one digit after the point."""
    return f"{length:.1f}".removesuffix(".0")
