"""`StackedBars`: the load of every rank as stacked bars, with the mean of all ranks.

Chapter: book/ep/eplb.  In: for each row its pieces, each with a label and a size.  Out: an SVG that fits a narrow page,
or text.  All pieces of one label light up when the pointer or the focus is on one of them.  The heaviest row has an
outline; a dashed line is the mean of the rows, or a limit.
Elsewhere: matplotlib `Axes.barh(left=...)`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from dualpipe_lab.timeline.scene import NOTE, Axis, focusable, heading, px, rect, shape, svg, text
from dualpipe_lab.viz.drawing import Drawing

Pieces: TypeAlias = Sequence[tuple[str, float]]  # label and size

_WIDTH, _TOP, _ROW, _AXIS = 460, 44, 26, 6  # px
_LEFT, _RIGHT = 52, 404  # px, ends of the longest row; long names move the first
_LETTER = 7.0  # px, mean width of a letter at font size 11
# Two blues, so that neighbours differ; each with the ink of its label.
_COLOURS = (("var(--dp-bar-1, #0072b2)", "#fff"), ("var(--dp-bar-2, #56b4e9)", "#000"))
_STYLE = (  # what is below the pointer, or has the focus
    ".dp-piece{cursor:pointer;outline:none}.dp-piece~*{pointer-events:none}"
    ".dp-piece:hover rect,.dp-piece:focus rect{fill:var(--dp-bar-lit,#e69f00)!important}"
    ".dp-piece:hover text,.dp-piece:focus text{fill:#000;font-weight:700}"
)


class StackedBars(Drawing):
    """Rows of pieces; prints as a table, displays as SVG.

    Args:
        title: the conclusion, short.
        rows: the pieces of each row, by its name; sizes are not negative.
        what: the kind of thing that a label names, such as "expert".
        unit: the unit of the sizes.
        limit: what a row may have at most, with its name; None for the mean.  A row above it has the outline.

    Raises:
        ValueError: no rows, no size above 0, a negative size, or a limit that is not above 0.

    >>> print(StackedBars("two ranks", {"rank 0": [("0", 4.5), ("2", 1)], "rank 1": [("0", 4.5), ("1", 2)]}))
    two ranks: heaviest 6.5 tokens, mean 6, max/mean 1.083
    rank 0  0: 4.5, 2: 1  = 5.5
    rank 1  0: 4.5, 1: 2  = 6.5
    """

    def __init__(
        self,
        title: str,
        rows: Mapping[str, Pieces],
        what: str = "expert",
        unit: str = "tokens",
        limit: tuple[str, float] | None = None,
    ) -> None:
        self.title, self.what, self.unit, self.limit = title, what, unit, limit
        self.rows = {name: [(str(label), float(size)) for label, size in pieces] for name, pieces in rows.items()}
        self.totals = {name: sum(size for _, size in pieces) for name, pieces in self.rows.items()}
        if not any(self.totals.values()) or any(size < 0 for pieces in self.rows.values() for _, size in pieces):
            raise ValueError(f"{title}: stacks need rows whose pieces have sizes above 0, got {self.rows}")
        if limit is not None and not limit[1] > 0:
            raise ValueError(f"{title}: a limit is above 0, got {limit}")
        self.heaviest, self.mean = max(self.totals.values()), sum(self.totals.values()) / len(self.rows)

    @property
    def summary(self) -> str:
        """The heaviest row, the mean, and their ratio; or the largest row and the limit."""
        if self.limit is not None:
            return f"largest {self.heaviest:.4g} {self.unit}; {self.limit[0]}: {self.limit[1]:g} {self.unit}"
        ratio = self.heaviest / self.mean
        return f"heaviest {self.heaviest:.5g} {self.unit}, mean {self.mean:.4g}, max/mean {ratio:.4g}"

    def __str__(self) -> str:
        width = max(map(len, self.rows))
        lines = [
            f"{name:{width}}  " + ", ".join(f"{label}: {size:.4g}" for label, size in pieces) + f"  = {total:.4g}"
            for (name, pieces), total in zip(self.rows.items(), self.totals.values(), strict=True)
        ]
        return "\n".join([f"{self.title}: {self.summary}", *lines])

    def __repr__(self) -> str:
        return f"<StackedBars {self.title!r}: {self.summary}>"

    def to_svg(self) -> str:
        """Draw one accessible SVG element."""
        axis = Axis(0, self._end, self._left, _RIGHT)
        body = [shape("style", _STYLE), *self._pieces(axis), heading(self.title), text(4, 34, self.summary, **NOTE)]
        for row, (name, total) in enumerate(self.totals.items()):
            has_outline = total >= self.heaviest * (1 - 1e-12) if self.limit is None else total > self.limit[1]
            style: dict[str, Any] = {"font_size": 11, "font_weight": 700} if has_outline else NOTE
            top = _TOP + row * _ROW
            body += [
                text(4, top + 17, name, **style),
                text(self._total_at(total, axis), top + 17, f"{total:.5g}", **style),
            ]
            if has_outline:
                size = axis.start, top + 1, axis.at(total) - axis.start, _ROW - 2
                body.append(rect(*size, fill="none", stroke="currentColor", stroke_width=2))
        bottom = _TOP + _ROW * len(self.rows)
        line = f"M{px(axis.at(self._line))} {_TOP - 4}V{bottom}"
        body.append(shape("path", d=line, stroke="currentColor", stroke_width=2, stroke_dasharray="5 3"))
        return svg(_WIDTH, bottom + _AXIS, f"{self.title}: {self.summary}", body, str(self), role="group")

    def _pieces(self, axis: Axis) -> Iterator[str]:
        """Yield the pieces of every label as one group."""
        drawn: defaultdict[str, list[str]] = defaultdict(list)
        holders: defaultdict[str, list[str]] = defaultdict(list)
        for row, (name, pieces) in enumerate(self.rows.items()):
            left, top = 0.0, _TOP + row * _ROW + 3
            for number, (label, size) in enumerate(pieces):
                holders[label].append(f"{size:.4g} on {name}")
                colour, ink = _COLOURS[number % 2]
                x, width = axis.at(left), max(axis.at(size) - axis.start - 1, 0.5)  # 1 px between neighbours
                drawn[label].append(rect(x, top, width, _ROW - 6, style=f"fill:{colour}"))
                if len(label) * _LETTER <= width:
                    place = x + width / 2, top + 14.2
                    drawn[label].append(text(*place, label, font_size=11, text_anchor="middle", fill=ink))
                left += size
        for label, shapes in drawn.items():
            yield focusable("dp-piece", f"{self.what} {label}: {', '.join(holders[label])}", shapes)

    def _total_at(self, total: float, axis: Axis) -> float:
        """Return where a row's total stands, in px: behind its bar, and not across the dashed line."""
        x, line = axis.at(total), axis.at(self._line)
        return line + 6 if x + 4 < line < x + 6 + _LETTER * len(f"{total:.5g}") else x + 6

    @property
    def _line(self) -> float:
        return self.mean if self.limit is None else self.limit[1]

    @property
    def _end(self) -> float:
        return max(self.heaviest, self._line)

    @property
    def _left(self) -> float:
        return max(_LEFT, 12 + 6.4 * max(map(len, self.rows)))
