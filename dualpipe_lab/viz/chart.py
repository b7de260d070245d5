"""`Chart`: lines over a number, such as a weight over the steps of a training; dots for what a run has counted.

Chapter: book/dp/mixed-precision-adam.  In: points by label.  Out: an SVG that fits a narrow page, or a table as text.
A line is told by its label, its colour and its dashes; axes and text take the page's text colour.
Elsewhere: matplotlib, whose pictures are white rectangles on a dark page.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import TypeAlias

Points: TypeAlias = Sequence[tuple[float, float]]

# Okabe and Ito 2008; those that can be read on white and on black
_COLOURS = ("currentColor", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM, _ROW = 460, 230, 62, 14, 44, 36, 18  # px
_LETTER = 6.6  # px, mean width of a letter at font size 12


class Chart:
    """Lines over one axis; prints as a table, displays as SVG.

    Args:
        title: the conclusion, short.
        lines: points (x, y) by label, at most six lines, each in the order of x.
        x, y: what the axes are, with units.
        stepped: draw values that hold until the next point, as a loss scale does.
        dots: what was counted or measured, by the label of the line that says what it should be.
        even: give each place on the x axis the same distance from the next: 1, 2, 4, 8 ranks.

    Raises:
        ValueError: no line, an empty one, or more than six; dots of no line.

    >>> print(Chart("a weight", {"fp32": [(0, 1), (1, 0.999)], "bf16": [(0, 1), (1, 1)]}, x="step", y="weight"))
    a weight
    step   fp32  bf16
       0      1     1
       1  0.999     1
    """

    def __init__(
        self,
        title: str,
        lines: Mapping[str, Points],
        x: str,
        y: str,
        stepped: bool = False,
        dots: Mapping[str, Points] | None = None,
        even: bool = False,
    ) -> None:
        self.title, self.x, self.y, self.stepped, self.even = title, x, y, stepped, even
        self.lines = {label: [(float(a), float(b)) for a, b in points] for label, points in lines.items()}
        if not 1 <= len(self.lines) <= len(_COLOURS) or not all(self.lines.values()):
            raise ValueError(
                f"{title}: a chart has 1 to {len(_COLOURS)} lines with points, "
                f"got { {label: len(points) for label, points in self.lines.items()} }"
            )
        self.dots = {label: [(float(a), float(b)) for a, b in points] for label, points in (dots or {}).items()}
        if unknown := set(self.dots) - set(self.lines):
            raise ValueError(f"{title}: dots belong to a line; there is none named {min(unknown)!r}")
        self._places = sorted({place for points in self._every() for place, _ in points})

    def __str__(self) -> str:
        by_x = [dict(points) for points in self._every()]
        rows = [[self.x, *self.lines, *(f"{label}, dots" for label in self.dots)]]
        rows += [[f"{x:g}", *(f"{points[x]:.6g}" if x in points else "" for points in by_x)] for x in self._places]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self.title, *(line.rstrip() for line in text)])

    def __repr__(self) -> str:
        return f"<Chart {self.title!r}: {', '.join(self.lines)}>"

    def _repr_html_(self) -> str:
        return f'<div style="max-width:100%">{self.to_svg()}</div>'

    def to_svg(self) -> str:
        """Draw one accessible SVG element."""
        legend = list(self._legend())
        height = _HEIGHT + _ROW * (legend[-1][2] + 1)
        label = f"{self.title}: {self.y} over {self.x}"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" style="max-width:100%;height:auto" role="img" aria-label="{escape(label, quote=True)}" '
            f'fill="currentColor" font-family="system-ui,sans-serif" font-size="12"><title>{escape(label)}</title>'
            f"<desc>{escape(str(self))}</desc>",
            f'<text x="4" y="16" font-weight="600">{escape(self.title)}</text>',
            f'<text x="4" y="34" opacity=".75">{escape(self.y)}</text>',
            *self._axes(),
            *(self._line(index, points) for index, points in enumerate(self.lines.values())),
            *(self._dots(index, self.dots.get(label, ())) for index, label in enumerate(self.lines)),
        ]
        for index, (name, x, row) in enumerate(legend):
            y = _HEIGHT + _ROW * row + 8
            parts.append(f'<path d="M{x:.0f} {y - 4}h24" {_stroke(index)}/>')
            parts.append(f'<text x="{x + 30:.0f}" y="{y}">{escape(name)}</text>')
        return "".join([*parts, "</svg>"])

    def _axes(self) -> Iterator[str]:
        for value in self._ticks(1):
            y = self._at(value, 1)
            yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity=".2"/>'
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{value:.6g}</text>'
        for value in self._places if self.even else self._ticks(0):
            x = self._at(value, 0)
            yield f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle" font-size="11">{value:g}</text>'
        yield f'<path d="M{_LEFT} {_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" stroke="currentColor"/>'
        yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end" opacity=".75">{escape(self.x)}</text>'

    def _line(self, index: int, points: Points) -> str:
        places = [f"{self._at(x, 0):.1f} {self._at(y, 1):.1f}" for x, y in points]
        if self.stepped:
            corners = (f"{after.split()[0]} {before.split()[1]} {after}" for before, after in pairwise(places))
            places = [places[0], *corners]
        return f'<path d="M{" L".join(places)}" fill="none" {_stroke(index)}/>'

    def _dots(self, index: int, points: Points) -> str:
        places = ((self._at(x, 0), self._at(y, 1)) for x, y in points)
        style = f'r="4" fill="{_COLOURS[index]}" stroke="currentColor"'
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" {style}/>' for x, y in places)

    def _every(self) -> list[Points]:
        return [*self.lines.values(), *self.dots.values()]

    def _at(self, value: float, axis: int) -> float:
        """Where a value lies on the x axis (0) or the y axis (1), in pixels."""
        low, high = self._range(axis)
        share = (value - low) / (high - low)
        if axis == 0 and self.even:
            share = (self._places.index(value) + 0.3) / (len(self._places) - 0.4)
        if axis == 0:
            return _LEFT + share * (_WIDTH - _RIGHT - _LEFT)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    def _range(self, axis: int) -> tuple[float, float]:
        values = [point[axis] for points in self._every() for point in points]
        low, high = min(values), max(values)
        if low == high:
            return low - 1, high + 1
        return (low, high) if axis == 0 else (low - 0.04 * (high - low), high + 0.04 * (high - low))

    def _ticks(self, axis: int) -> list[float]:
        low, high = self._range(axis)
        unit = 10.0 ** floor(log10((high - low) / 5))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= (high - low) / 5)
        return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]

    def _legend(self) -> Iterator[tuple[str, float, int]]:
        """Each label with its place from the left and its row."""
        x, row = 4.0, 0
        for name in self.lines:
            width = 30 + _LETTER * len(name) + 18
            if x > 4 and x + width > _WIDTH:
                x, row = 4.0, row + 1
            yield name, x, row
            x += width


def _stroke(index: int) -> str:
    dashes = f' stroke-dasharray="{_DASHES[index]}"' if _DASHES[index] else ""
    return f'stroke="{_COLOURS[index]}" stroke-width="2" stroke-linejoin="round"{dashes}'
