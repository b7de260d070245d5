"""`Chart`: lines over a number, such as a weight over the steps of a training, and dots for counted values.

Chapter: book/dp/mixed-precision-adam.  In: points by label.  Out: an SVG that fits a narrow page, or a table as text.
Label, colour and dashes tell the lines apart.  matplotlib draws, the page's theme gives the colours (`viz.figure`).
Elsewhere: matplotlib `Axes.plot`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_lab.viz.drawing import Drawing
from dualpipe_lab.viz.figure import GRID, LINES, MUTED, TEXT, inline_svg, new_axes, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points: TypeAlias = Sequence[tuple[float, float]]

_DASHED = (3.5, 1.5), (1, 1.5), (4.5, 1.5, 1, 1.5), (2, 1), (6, 2)
_DASHES: tuple[Any, ...] = ("solid", *((0, dashes) for dashes in _DASHED))
_WIDTH, _HEIGHT, _ROW = 460, 230, 18  # px; rows of the legend follow below the height
_PLOT = (62, 44, 446, 194)  # left, top, right, bottom of the axes
_LETTER = 6.6  # px, mean width of a letter at font size 12


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
        if not 1 <= len(self.lines) <= len(LINES) or not all(self.lines.values()):
            raise ValueError(
                f"{title}: a chart has 1 to {len(LINES)} lines with points, "
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
        height = _HEIGHT + _ROW * (legend[-1][2] + 1)
        figure, axes = new_axes(_WIDTH, height, _PLOT)
        self._set_axes(axes)
        for index, (label, points) in enumerate(self.lines.items()):
            style: dict[str, Any] = {"color": LINES[index], "ls": _DASHES[index], "lw": 2}
            axes.plot(*self._at(points), drawstyle="steps-post" if self.stepped else "default", clip_on=False, **style)
            dots = self._at(self.dots.get(label, []))
            axes.plot(*dots, "o", ms=8, mfc=LINES[index], mec=TEXT, clip_on=False, zorder=3)
            name, x, row = legend[index]
            y = 1 - (_HEIGHT + _ROW * row + 4) / height
            axes.plot([x / _WIDTH, (x + 24) / _WIDTH], [y, y], transform=figure.transFigure, clip_on=False, **style)
            write(figure, x + 30, _HEIGHT + _ROW * row + 8, name)
        write(figure, 4, 16, self.title, fontweight="bold")
        write(figure, 4, 34, self.y, color=MUTED)
        write(figure, _PLOT[2], _HEIGHT - 6, self.x, color=MUTED, ha="right")
        return inline_svg(figure, f"{self.title}: {self.y} over {self.x}", str(self))

    def _set_axes(self, axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        if self.even:
            axes.set_xlim(-0.3, len(self._places) - 0.7)
            axes.set_xticks(range(len(self._places)), [f"{value:g}" for value in self._places])
        else:
            axes.set_xlim(*self._range(0, 0.0))
        axes.set_ylim(*self._range(1, 0.04))
        for axis in (axes.yaxis,) if self.even else (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
            axis.set_major_formatter(lambda value, _: f"{value:.6g}")
        axes.grid(axis="y", color=GRID, lw=1, clip_on=False)
        axes.spines["bottom"].set(visible=True, color=TEXT, lw=1)

    def _range(self, axis: int, margin: float) -> tuple[float, float]:
        """Return the range of x (0) or y (1) with a margin; values without extent get a range of 2."""
        values = [point[axis] for points in self._every() for point in points]
        low, high = min(values), max(values)
        extra = margin * (high - low) if low < high else 1
        return low - extra, high + extra

    def _at(self, points: Points) -> tuple[list[float], list[float]]:
        """Return the coordinates of points; with `even`, x is a number of the place."""
        xs = [float(self._places.index(x)) if self.even else x for x, _ in points]
        return xs, [y for _, y in points]

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
