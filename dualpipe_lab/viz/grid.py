"""`RankGrid`: the grid of ranks with one group highlighted, as text and as an SVG that fits a narrow page.

Chapter: book/dp/topology.  In: a topology, an axis, a rank.  Out: a drawing.
A group lights up when the pointer or the focus is on one of its ranks.
The last axis runs to the right, the second last downwards; each position along the other axes has its own panel.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.timeline.scene import NOTE, focusable, heading, rect, shape, svg, text
from dualpipe_lab.topology import Topology
from dualpipe_lab.viz.drawing import Drawing

_FILL, _INK = "#0072b2", "#fff"  # Okabe and Ito 2008; contrast 5.2 : 1
_LABEL, _CELL, _ROW, _HEAD, _TOP, _GAP = 46, 36, 28, 18, 28, 8  # px
_LIT = (  # the group below the pointer, or with the focus; Okabe and Ito's orange with black, 9.4 : 1
    ".dp-rank-group{cursor:pointer;outline:none}"
    ".dp-rank-group:hover rect,.dp-rank-group:focus rect{fill:#e69f00;stroke-width:2;stroke-opacity:1}"
    ".dp-rank-group:hover text,.dp-rank-group:focus text{fill:#000;font-weight:700}"
)
_COLUMNS = 8  # a longer last axis is wrapped


class RankGrid(Drawing):
    """The grid with the group of `rank` along `axis` highlighted; prints as text, displays as SVG.

    >>> print(RankGrid(Topology([("dp", 2), ("tp", 4)]), "dp", rank=1))
    dp 2 x tp 4 = 8 ranks; the dp group of rank 1: 1, 5
          tp 0  tp 1  tp 2  tp 3
    dp 0     0   [1]     2     3
    dp 1     4   [5]     6     7
    """

    def __init__(self, topology: Topology, axis: str, rank: int = 0) -> None:
        self.topology, self.axis, self.rank = topology, axis, rank
        self.group = topology.at(rank).ranks(axis)
        self.name = f"{axis} group of rank {rank}"
        self._columns = topology.axes[-1]
        self._rows = topology.axes[-2] if len(topology.axes) > 1 else ("", 1)

    @property
    def title(self) -> str:
        """The topology and the highlighted group, in words."""
        return f"{self.topology.shape} ranks; the {self.name}: {', '.join(map(str, self.group))}"

    def __str__(self) -> str:
        name, size = self._columns
        widths = max(len(f"{name} {size - 1}"), len(f"[{self.topology.world_size - 1}]"))
        heads = [f"{name} {place}".rjust(widths) for place in range(size)]
        labels = max([len(label) for label, _ in self._panels()] + [len(self._row_label(self._rows[1] - 1))])
        lines = [self.title]
        for label, first in self._panels():
            lines.append("  ".join([label.ljust(labels), *heads]))
            for row in range(self._rows[1]):
                ranks = range(first + row * size, first + (row + 1) * size)
                cells = [(f"[{rank}]" if rank in self.group else f"{rank}").rjust(widths) for rank in ranks]
                lines.append("  ".join([self._row_label(row).ljust(labels), *cells]))
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return f"<RankGrid of {self.title}>"

    def to_svg(self) -> str:
        """Draw one accessible SVG element; text and lines take the page's text colour."""
        wide = min(self._columns[1], _COLUMNS)
        wraps = -(-self._columns[1] // wide)
        panel = _HEAD + self._rows[1] * wraps * _ROW + _GAP
        width, height = _LABEL + wide * _CELL + 4, _TOP + len(self._panels()) * panel
        width = max(width, 240)
        parts = [heading(self.name)]
        cells: dict[int, str] = {}
        for index, (label, first) in enumerate(self._panels()):
            parts += self._panel(label, first, _TOP + index * panel, wide, wraps, cells)
        parts.append(shape("style", _LIT))
        for group in self.topology.groups(self.axis):
            words = f"{self.axis} group: {', '.join(map(str, group))}"
            parts.append(focusable("dp-rank-group", words, (cells[rank] for rank in group)))
        return svg(width, height, self.title, parts, str(self), role="group")

    def _panel(self, label: str, first: int, top: int, wide: int, wraps: int, cells: dict[int, str]) -> Iterator[str]:
        """Yield the headings of a panel, and store its cells in `cells`, by rank."""
        name, size = self._columns
        yield text(4, top + 12, label, font_weight=600)
        for column in range(wide):
            head = f"{name} {column}" if wraps == 1 else ""  # a wrapped row counts on, so its columns have no number
            x = _LABEL + column * _CELL + _CELL // 2
            yield text(x, top + 12, head, text_anchor="middle", font_size=10, opacity=".75")
        for row, place in product(range(self._rows[1]), range(size)):
            line, column = row * wraps + place // wide, place % wide
            y = top + _HEAD + line * _ROW
            if place == 0:
                yield text(4, y + 17, self._row_label(row), **NOTE)
            rank = first + row * size + place
            cells[rank] = self._cell(rank, _LABEL + column * _CELL, y)

    def _cell(self, rank: int, x: int, y: int) -> str:
        box: dict[str, Any] = {"fill": "none", "stroke_opacity": ".5"}
        ink: dict[str, Any] = {"fill": "currentColor"}
        if rank in self.group:  # not marked by colour alone
            box, ink = {"fill": _FILL, "stroke_width": 2}, {"fill": _INK, "font_weight": 700}
        shown = rect(x + 2, y + 2, _CELL - 4, _ROW - 5, rx=3, stroke="currentColor", **box)
        return shown + text(x + _CELL // 2, y + 17, f"{rank}", text_anchor="middle", **ink)

    def _row_label(self, row: int) -> str:
        return f"{self._rows[0]} {row}" if self._rows[0] else ""

    def _panels(self) -> list[tuple[str, int]]:
        outer = self.topology.axes[:-2]
        size = self._rows[1] * self._columns[1]
        places = product(*(range(extent) for _, extent in outer))
        labels = (", ".join(f"{name} {at}" for (name, _), at in zip(outer, place, strict=True)) for place in places)
        return [(label, index * size) for index, label in enumerate(labels)]


def grid(plan: Plan, axis: str | None = None, rank: int = 0) -> RankGrid:
    """Return the drawing of a plan's grid with one group highlighted; it prints as text and displays as SVG.

    Args:
        plan: whose ranks are drawn.
        axis: of the group (default: the first one with several ranks).
        rank: one of the group.

    >>> print(grid(Plan(dp=2, tp=2), "tp", rank=2))
    dp 2 x tp 2 = 4 ranks; the tp group of rank 2: 2, 3
          tp 0  tp 1
    dp 0     0     1
    dp 1   [2]   [3]
    """
    return RankGrid(plan.topology, axis or plan.topology.names[0], rank)
