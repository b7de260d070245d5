"""`Chart`: lines over a number, such as a weight over the steps of a training, and dots for counted values.

Chapter: book/dp/mixed-precision-adam.  In: points by label.  Out: an SVG that fits a narrow page, or a table as text.
Label, colour and dashes tell the lines apart; the page's theme may give other colours (`--dp-line-1` to 5).
Elsewhere: matplotlib `Axes.plot`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from math import isfinite
from typing import Any, TypeAlias

from dualpipe_lab.timeline.scene import Axis, heading, px, shape, svg, text
from dualpipe_lab.viz.drawing import Drawing

Point: TypeAlias = tuple[float, float]
Points: TypeAlias = Sequence[Point]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # Okabe and Ito 2008
_LINES = ("currentColor", *(f"var(--dp-line-{number}, {colour})" for number, colour in enumerate(_COLOURS, 1)))
_DASHES = (None, "7 3", "2 3", "9 3 2 3", "4 2", "12 4")
_WIDTH, _HEIGHT, _ROW = 460, 230, 18  # px; rows of the legend follow below the height
_PLOT = (62, 44, 446, 194)  # left, top, right, bottom of the axes
_LETTER = 6.6  # px, mean width of a letter at font size 12
_MOST_TICKS = 6


class Chart(Drawing):
    """Lines over one axis; prints as a table, displays as SVG.

    Args:
        title: the conclusion, short.
        lines: points (x, y) by label, at most six lines, each in the order of x.
        x, y: the quantities on the axes, with units.
        stepped: draw values that are valid until the next point, such as a loss scale.
        dots: counted or measured points, by the label of the line with the expected values.
        even: place the values of x at equal distances: 1, 2, 4, 8 ranks.

    Raises:
        ValueError: no line, an empty line, more than six lines, or dots without a line of their label.

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
        if not 1 <= len(self.lines) <= len(_LINES) or not all(self.lines.values()):
            raise ValueError(
                f"{title}: a chart has 1 to {len(_LINES)} lines with points, "
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

    def to_svg(self) -> str:
        """Draw one accessible SVG element."""
        legend = list(self._legend())
        left, top, right, bottom = _PLOT
        x_axis, y_axis = Axis(*self._x_range, left, right), Axis(*self._range(1, 0.04), bottom, top)
        body = [heading(self.title), text(4, 34, self.y, opacity=".75")]
        body += [text(right, _HEIGHT - 6, self.x, opacity=".75", text_anchor="end"), *self._ticks(x_axis, y_axis)]
        for index, points in enumerate(self.lines.values()):
            name, x, row = legend[index]
            y = _HEIGHT + _ROW * row + 4
            style: dict[str, Any] = {
                "style": f"stroke:{_LINES[index]}",
                "stroke_width": 2,
                "stroke_dasharray": _DASHES[index],
            }
            line = self._line([(x_axis.at(self._x(a)), y_axis.at(b)) for a, b in points])
            for places in (line, [(x, y), (x + 24, y)]):
                body.append(shape("path", d=_path(places), fill="none", stroke_linejoin="round", **style))
            body.append(text(x + 30, y + 4, name))
        for colour, label in zip(_LINES, self.lines, strict=False):
            for a, b in self.dots.get(label, []):
                place = {"cx": x_axis.at(self._x(a)), "cy": y_axis.at(b)}
                body.append(shape("circle", **place, r=4, style=f"fill:{colour}", stroke="currentColor"))
        height = _HEIGHT + _ROW * (legend[-1][2] + 1)
        return svg(_WIDTH, height, f"{self.title}: {self.y} over {self.x}", body, str(self))

    def _ticks(self, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
        """Yield the numbers of both axes, the lines of y's, and the axis of x."""
        left, _, right, bottom = _PLOT
        for value in self._places if self.even else map(float, x_axis.ticks(_MOST_TICKS, is_fine=True)):
            place = x_axis.at(self._x(value)), bottom + 14.4
            yield text(*place, f"{value:.6g}", font_size=11, text_anchor="middle")
        for value in map(float, y_axis.ticks(_MOST_TICKS, is_fine=True)):
            y = y_axis.at(value)
            yield shape("path", d=f"M{left} {px(y)}H{right}", stroke="currentColor", stroke_opacity=".2")
            yield text(left - 6, y + 4.2, f"{value:.6g}", font_size=11, text_anchor="end")
        yield shape("path", d=f"M{left} {bottom}H{right}", stroke="currentColor")

    def _x(self, value: float) -> float:
        return self._places.index(value) if self.even else value

    @property
    def _x_range(self) -> tuple[float, float]:
        return (-0.3, len(self._places) - 0.7) if self.even else self._range(0, 0.0)

    def _range(self, axis: int, margin: float) -> tuple[float, float]:
        """Return the range of x (0) or y (1) with a margin; values without extent get a range of 2."""
        values = [point[axis] for points in self._every() for point in points if isfinite(point[axis])] or [0.0]
        low, high = min(values), max(values)
        extra = margin * (high - low) if low < high else 1
        return low - extra, high + extra

    def _line(self, places: Points) -> Points:
        """Return the corners of a line through its places, with those of its steps."""
        if not self.stepped:
            return places
        steps = [((x, before), (x, y)) for (_, before), (x, y) in pairwise(places)]
        return [*places[:1], *chain.from_iterable(steps)]

    def _every(self) -> list[Points]:
        return [*self.lines.values(), *self.dots.values()]

    def _legend(self) -> Iterator[tuple[str, float, int]]:
        """Yield each label with its distance from the left, in px, and its row."""
        x, row = 4.0, 0
        for name in self.lines:
            width = 30 + _LETTER * len(name) + 18
            if x > 4 and x + width > _WIDTH:
                x, row = 4.0, row + 1
            yield name, x, row
            x += width


def _path(places: Points) -> str:
    """Return the data of a line; where a loss is NaN or infinite there is a gap."""
    runs = [list(run) for is_drawn, run in groupby(places, lambda place: isfinite(place[1])) if is_drawn]
    return "".join("M" + "L".join(f"{px(x)} {px(y)}" for x, y in run) for run in runs)
