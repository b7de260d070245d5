"""`StackedBars`: the load of every rank as stacked bars, with the mean of all ranks.

Chapter: book/ep/eplb.  In: for each row its pieces, each with a label and a size.  Out: an SVG that fits a narrow page,
or text.  All pieces of one label light up when the pointer or the focus is on one of them.  The heaviest row has an
outline; a dashed line is the mean of the rows, or a limit.  matplotlib draws, the theme gives colours (`viz.figure`).
Elsewhere: matplotlib `Axes.barh(left=...)`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_lab.viz.drawing import Drawing
from dualpipe_lab.viz.figure import BARS, MUTED, TEXT, inline_svg, new_axes, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Pieces: TypeAlias = Sequence[tuple[str, float]]  # label and size

_WIDTH, _TOP, _ROW, _AXIS = 460, 44, 26, 6  # px
_LEFT, _RIGHT = 52, 404  # px, ends of the longest row; long names move the first
_LETTER = 7.0  # px, mean width of a letter at font size 11
_CENTRED: Any = {"ha": "center", "va": "center_baseline", "fontsize": 11, "parse_math": False}  # labels
_INKS = ("#ffffff", "#000001")  # of the labels on the two blues; matplotlib leaves pure black out
_STYLE = (  # what is below the pointer, or has the focus
    ".dp-piece{cursor:pointer;outline:none}.dp-piece~path{pointer-events:none}"
    ".dp-piece:hover path,.dp-piece:focus path{fill:var(--dp-bar-lit,#e69f00)!important}"
    ".dp-piece:hover text,.dp-piece:focus text{fill:#000!important;font-weight:700}"
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
        bottom = _TOP + _ROW * len(self.rows)
        figure, axes = new_axes(_WIDTH, bottom + _AXIS, (self._left, _TOP, _RIGHT, bottom))
        axes.set(xlim=(0, self._end), ylim=(len(self.rows) - 0.5, -0.5), xticks=[], yticks=[])
        write(figure, 4, 16, self.title, fontweight="bold")
        write(figure, 4, 34, self.summary, color=MUTED, fontsize=11)
        for row, (name, total) in enumerate(self.totals.items()):
            has_outline = total >= self.heaviest * (1 - 1e-12) if self.limit is None else total > self.limit[1]
            weight, colour = ("bold", TEXT) if has_outline else ("normal", MUTED)
            y = _TOP + row * _ROW + 17
            write(figure, 4, y, name, color=colour, fontweight=weight, fontsize=11)
            write(figure, self._total_at(total), y, f"{total:.5g}", color=colour, fontweight=weight, fontsize=11)
            if has_outline:
                axes.barh(row, total, 24 / _ROW, color="none", edgecolor=TEXT, lw=2, clip_on=False)
        axes.vlines(
            self._line, -0.65, len(self.rows) - 0.5, color=TEXT, lw=2, ls=(0, (2.5, 1.5)), clip_on=False, zorder=4
        )
        groups = self._draw_pieces(axes)
        return inline_svg(figure, f"{self.title}: {self.summary}", str(self), groups, _STYLE)

    def _draw_pieces(self, axes: "Axes") -> dict[str, str]:
        """Draw all pieces; return the words of each label by the gid of its pieces."""
        gids: dict[str, str] = {}
        holders: dict[str, list[str]] = {}
        pixel = self._end / (_RIGHT - self._left)
        for row, (name, pieces) in enumerate(self.rows.items()):
            left = 0.0
            for number, (label, size) in enumerate(pieces):
                gid = gids.setdefault(label, f"piece {len(gids)}")
                holders.setdefault(label, []).append(f"{size:.4g} on {name}")
                width = max(size - pixel, pixel / 2)  # a gap of 1 px between neighbours
                (bar,) = axes.barh(row, width, 20 / _ROW, left=left, color=BARS[number % 2], lw=0, clip_on=False)
                bar.set_gid(gid)
                if len(label) * _LETTER <= width / pixel:
                    place = left + width / 2, row
                    axes.text(*place, label, color=_INKS[number % 2], gid=gid, **_CENTRED)
                left += size
        return {gid: f"{self.what} {label}: {', '.join(holders[label])}" for label, gid in gids.items()}

    def _total_at(self, total: float) -> float:
        """Return where a row's total stands, in px: behind its bar, and not across the dashed line."""
        x, line = (self._left + size / self._end * (_RIGHT - self._left) for size in (total, self._line))
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
