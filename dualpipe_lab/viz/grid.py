"""`RankGrid`: the grid of ranks with one group highlighted, as text and as an SVG that fits a narrow page.

Chapter: book/dp/topology.  In: a topology, an axis, a rank.  Out: a drawing.
A group lights up when the pointer or the focus is on one of its ranks.
The last axis runs to the right, the second last downwards; each position along the other axes has its own panel.
"""

from collections.abc import Iterator
from html import escape
from itertools import product

from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.topology import Topology
from dualpipe_lab.viz.drawing import Drawing, svg

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
        parts = [f'<text x="4" y="16" font-weight="600">{escape(self.name)}</text>']
        cells: dict[int, str] = {}
        for index, (label, first) in enumerate(self._panels()):
            parts += self._panel(label, first, _TOP + index * panel, wide, wraps, cells)
        return svg(width, height, self.title, [*parts, *self._groups(cells)], str(self), role="group")

    def _groups(self, cells: dict[int, str]) -> Iterator[str]:
        yield f"<style>{_LIT}</style>"
        for group in self.topology.groups(self.axis):
            words = escape(f"{self.axis} group: {', '.join(map(str, group))}")
            body = "".join(cells[rank] for rank in group)
            yield f'<g class="dp-rank-group" tabindex="0" role="img" aria-label="{words}">'
            yield f"<title>{words}</title>{body}</g>"

    def _panel(self, label: str, first: int, top: int, wide: int, wraps: int, cells: dict[int, str]) -> Iterator[str]:
        """Yield the headings of a panel, and store its cells in `cells`, by rank."""
        name, size = self._columns
        yield f'<text x="4" y="{top + 12}" font-weight="600">{escape(label)}</text>'
        for column in range(wide):
            x = _LABEL + column * _CELL + _CELL // 2
            head = f"{name} {column}" if wraps == 1 else ""  # a wrapped row counts on, so its columns have no number
            yield f'<text x="{x}" y="{top + 12}" text-anchor="middle" font-size="10" opacity=".75">{head}</text>'
        for row, place in product(range(self._rows[1]), range(size)):
            line, column = row * wraps + place // wide, place % wide
            y = top + _HEAD + line * _ROW
            if place == 0:
                yield f'<text x="4" y="{y + 17}" font-size="11" opacity=".75">{self._row_label(row)}</text>'
            rank = first + row * size + place
            cells[rank] = self._cell(rank, _LABEL + column * _CELL, y)

    def _cell(self, rank: int, x: int, y: int) -> str:
        fill, ink, weight, edge = "none", "currentColor", "", ' stroke="currentColor" stroke-opacity=".5"'
        if rank in self.group:
            fill, ink, edge = _FILL, _INK, ' stroke="currentColor" stroke-width="2"'
            weight = ' font-weight="700"'  # not by colour alone
        return (
            f'<rect x="{x + 2}" y="{y + 2}" width="{_CELL - 4}" height="{_ROW - 5}" rx="3" fill="{fill}"{edge}/>'
            f'<text x="{x + _CELL // 2}" y="{y + 17}" text-anchor="middle" fill="{ink}"{weight}>{rank}</text>'
        )

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
