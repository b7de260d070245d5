"""`CellGrid`: grids of coloured cells, such as the pairs of queries and keys that each rank computes.

Chapter: book/cp/flash-attention.  In: rows of cells by the name of their grid.  Out: SVGs side by side, or text.
The kind of a cell determines its colour; an empty cell has none.  Below each grid is the number of cells of each kind.
Elsewhere: matplotlib `imshow`, whose pictures are white rectangles on a dark page.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TypeAlias

from dualpipe_lab.timeline.colours import NUMBERED
from dualpipe_lab.timeline.scene import NOTE, px, rect, svg, swatches, text

Cell: TypeAlias = str | tuple[str, str] | None  # a kind; a kind and a short text; nothing
Rows: TypeAlias = Sequence[Sequence[Cell]]

_GRID, _CELL, _LEFT, _TOP, _ROW, _LETTER = 192, 34, 20, 44, 18, 6.4  # px


class CellGrid:
    """Grids of cells; prints as text, displays as SVG.

    Args:
        title: the conclusion, short.
        grids: rows of cells by name; a cell is a kind, a kind with a text of 1 or 2 letters, or None.
        rows, columns: the meaning of rows and columns, such as queries and keys.

    Raises:
        ValueError: no grid, rows of different lengths, or more kinds than colours.

    >>> print(CellGrid("half", {"causal": [["seen", None], ["seen", ("seen", "!")]]}, "queries", "keys"))
    half
    causal: 3 seen, 1 nothing
    a .
    a a
    a: seen; rows: queries, columns: keys
    """

    def __init__(self, title: str, grids: Mapping[str, Rows], rows: str, columns: str) -> None:
        self.title, self.rows, self.columns = title, rows, columns
        self.grids = {name: [list(map(_pair, row)) for row in grid] for name, grid in grids.items()}
        lengths = {name: sorted({len(row) for row in grid}) for name, grid in self.grids.items()}
        if not lengths or any(len(found) != 1 or not found[0] for found in lengths.values()):
            raise ValueError(f"{title}: a mosaic has grids with rows of one length each, got {lengths}")
        self.kinds = list(dict.fromkeys(kind for kinds in map(self.count, self.grids) for kind in kinds))
        if len(self.kinds) > len(NUMBERED):
            raise ValueError(f"{title}: there are colours for {len(NUMBERED)} kinds of cells, got {self.kinds}")

    def count(self, name: str) -> dict[str, int]:
        """Return the number of cells of each kind in one grid, in order of appearance, without empty cells."""
        return dict(Counter(kind for row in self.grids[name] for kind, _ in row if kind))

    def __str__(self) -> str:
        letter = {kind: chr(ord("a") + index) for index, kind in enumerate(self.kinds)} | {"": "."}
        lines = [self.title]
        for name, grid in self.grids.items():
            lines += [self._caption(name), *(" ".join(letter[kind] for kind, _ in row) for row in grid)]
        legend = ", ".join(f"{letter[kind]}: {kind}" for kind in self.kinds)
        return "\n".join([*lines, f"{legend}; rows: {self.rows}, columns: {self.columns}"])

    def __repr__(self) -> str:
        return f"<CellGrid {self.title!r}: {', '.join(self.grids)}>"

    def _repr_html_(self) -> str:
        pictures = "".join(self.to_svg(name) for name in self.grids)
        return (
            f'<div><div style="font-weight:600;margin-bottom:4px">{escape(self.title)}</div>'
            f'<div style="display:flex;flex-wrap:wrap;align-items:flex-start;gap:10px 14px">{pictures}</div></div>'
        )

    def to_svg(self, name: str) -> str:
        """Draw one grid as an accessible SVG element."""
        grid, found = self.grids[name], self.count(name)
        size = min(_CELL, _GRID / max(len(grid), len(grid[0])))
        bottom = _TOP + size * len(grid) + 8
        width = max(_LEFT + size * len(grid[0]), _LEFT + _LETTER * max(len(name) + 2, *map(_length, found.items())))
        height = bottom + _ROW * len(found)
        middle = _TOP + size * len(grid) / 2
        sideways = f"rotate(-90 13 {px(middle)})"
        parts = [
            text(_LEFT, 14, name, font_weight=600),
            text(_LEFT, 34, f"{self.columns} →", **NOTE),
            text(13, middle, f"← {self.rows}", transform=sideways, text_anchor="middle", **NOTE),
            *self._cells(grid, size),
        ]
        for row, (kind, number) in enumerate(found.items()):
            entry = NUMBERED[self.kinds.index(kind)][0], f"{kind}: {number}"
            parts.append(swatches([entry], _LEFT, bottom + _ROW * row + 13, _LETTER))
        return svg(width, height, f"{self.title}, {self._caption(name)}", parts)

    def _cells(self, grid: Sequence[Sequence[tuple[str, str]]], size: float) -> Iterator[str]:
        font = min(11.0, 0.75 * size)
        for i, row in enumerate(grid):
            for j, (kind, words) in enumerate(row):
                x, y = _LEFT + size * j, _TOP + size * i
                fill, ink = NUMBERED[self.kinds.index(kind)] if kind else ("none", "")
                yield rect(x, y, size, size, fill=fill, stroke="currentColor", stroke_opacity=".35", stroke_width=".6")
                if words:
                    place = x + size / 2, y + size / 2 + 0.36 * font
                    yield text(*place, words, text_anchor="middle", font_size=font, fill=ink)

    def _caption(self, name: str) -> str:
        found, grid = self.count(name), self.grids[name]
        words = [f"{number} {kind}" for kind, number in found.items()]
        if empty := len(grid) * len(grid[0]) - sum(found.values()):
            words.append(f"{empty} nothing")
        return f"{name}: {', '.join(words)}"


def _pair(cell: Cell) -> tuple[str, str]:
    return cell if isinstance(cell, tuple) else (cell or "", "")


def _length(found: tuple[str, int]) -> int:
    return len(found[0]) + len(str(found[1])) + 6
