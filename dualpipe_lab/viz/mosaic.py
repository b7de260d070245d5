"""`Mosaic`: grids of coloured cells, such as the pairs of queries and keys that each rank computes.

Chapter: book/cp/flash-attention.  In: rows of cells by the name of their grid.  Out: SVGs side by side, or text.
The kind of a cell determines its colour; an empty cell has none.  Below each grid is the number of cells of each kind.
Elsewhere: matplotlib `imshow`, whose pictures are white rectangles on a dark page.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TypeAlias

Cell: TypeAlias = str | tuple[str, str] | None  # a kind; a kind and a short text; nothing
Rows: TypeAlias = Sequence[Sequence[Cell]]

# Okabe and Ito 2008, as in the pictures of collectives, with the colour of a text on top
_COLOURS = (
    ("#0072b2", "#fff"), ("#e69f00", "#000"), ("#009e73", "#000"), ("#cc79a7", "#000"),
    ("#56b4e9", "#000"), ("#f0e442", "#000"), ("#d55e00", "#000"), ("#595959", "#fff"),
)  # fmt: skip
_GRID, _CELL, _LEFT, _TOP, _ROW, _LETTER = 192, 34, 20, 44, 18, 6.4  # px


class Mosaic:
    """Grids of cells; prints as text, displays as SVG.

    Args:
        title: the conclusion, short.
        grids: rows of cells by name; a cell is a kind, a kind with a text of 1 or 2 letters, or None.
        rows, columns: the meaning of rows and columns, such as queries and keys.

    Raises:
        ValueError: no grid, rows of different lengths, or more kinds than colours.

    >>> print(Mosaic("half", {"causal": [["seen", None], ["seen", ("seen", "!")]]}, "queries", "keys"))
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
        if len(self.kinds) > len(_COLOURS):
            raise ValueError(f"{title}: there are colours for {len(_COLOURS)} kinds of cells, got {self.kinds}")

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
        return f"<Mosaic {self.title!r}: {', '.join(self.grids)}>"

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
        label = escape(f"{self.title}, {self._caption(name)}", quote=True)
        middle = _TOP + size * len(grid) / 2
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" style="max-width:100%;height:auto" role="img" aria-label="{label}" '
            f'fill="currentColor" font-family="system-ui,sans-serif" font-size="12"><title>{label}</title>',
            f'<text x="{_LEFT}" y="14" font-weight="600">{escape(name)}</text>',
            f'<text x="{_LEFT}" y="34" font-size="11" opacity=".75">{escape(self.columns)} →</text>',
            f'<text transform="translate(13 {middle:.1f}) rotate(-90)" text-anchor="middle" font-size="11" '
            f'opacity=".75">← {escape(self.rows)}</text>',
            *self._cells(grid, size),
        ]
        for row, (kind, number) in enumerate(found.items()):
            y, colour = bottom + _ROW * row + 12, _COLOURS[self.kinds.index(kind)][0]
            parts.append(f'<rect x="{_LEFT}" y="{y - 9:.1f}" width="11" height="11" fill="{colour}"/>')
            parts.append(f'<text x="{_LEFT + 17}" y="{y + 1:.1f}">{escape(kind)}: {number}</text>')
        return "".join([*parts, "</svg>"])

    def _cells(self, grid: Sequence[Sequence[tuple[str, str]]], size: float) -> Iterator[str]:
        font = min(11.0, 0.75 * size)
        for i, row in enumerate(grid):
            for j, (kind, text) in enumerate(row):
                x, y = _LEFT + size * j, _TOP + size * i
                fill, ink = _COLOURS[self.kinds.index(kind)] if kind else ("none", "")
                yield (
                    f'<rect x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" height="{size:.1f}" fill="{fill}" '
                    'stroke="currentColor" stroke-opacity=".35" stroke-width=".6"/>'
                )
                if text:
                    place = f'x="{x + size / 2:.1f}" y="{y + size / 2 + 0.36 * font:.1f}"'
                    style = f'text-anchor="middle" font-size="{font:.1f}" fill="{ink}"'
                    yield f"<text {place} {style}>{escape(text)}</text>"

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
