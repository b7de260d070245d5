"""`Stacks`: what every rank has to do, as pieces in a row, beside what all of them would have on average.

Chapter: book/ep/eplb.  In: for each row its pieces, a label and a size each.  Out: an SVG that fits a narrow page, or
text.  Pieces with the same label belong together: point at one, or tab to it, and all of them light up.
The heaviest row is outlined, the mean of the rows is a dashed line.
Elsewhere: the stacked bars of any plotting library, which tell pieces by a legend of colours.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TypeAlias

Pieces: TypeAlias = Sequence[tuple[str, float]]  # label and size

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR, _AXIS = 460, 52, 56, 44, 26, 20, 6  # px
_LETTER = 7.0  # px, mean width of a letter at font size 11
_SHADES = ("#0072b2", "#56b4e9")  # Okabe and Ito 2008: two blues, neighbours differ
_INKS = ("#fff", "#000")
_LIT = (  # what is below the pointer, or has the focus
    ".dp-piece{cursor:pointer;outline:none}"
    ".dp-piece:hover rect,.dp-piece:focus rect{fill:#e69f00}"
    ".dp-piece:hover text,.dp-piece:focus text{fill:#000;font-weight:700}"
)


class Stacks:
    """Rows of pieces; prints as a table, displays as SVG.

    Args:
        title: the conclusion, short.
        rows: the pieces of each row by its name; sizes are not negative.
        what: what a label names, such as "expert".
        unit: of the sizes.

    Raises:
        ValueError: no rows, nothing in them, or a negative size.

    >>> print(Stacks("two ranks", {"rank 0": [("0", 4.5), ("2", 1)], "rank 1": [("0", 4.5), ("1", 2)]}))
    two ranks: heaviest 6.5 tokens, mean 6, max/mean 1.083
    rank 0  0: 4.5, 2: 1  = 5.5
    rank 1  0: 4.5, 1: 2  = 6.5
    """

    def __init__(self, title: str, rows: Mapping[str, Pieces], what: str = "expert", unit: str = "tokens") -> None:
        self.title, self.what, self.unit = title, what, unit
        self.rows = {name: [(str(label), float(size)) for label, size in pieces] for name, pieces in rows.items()}
        self.totals = {name: sum(size for _, size in pieces) for name, pieces in self.rows.items()}
        if not any(self.totals.values()) or any(size < 0 for pieces in self.rows.values() for _, size in pieces):
            raise ValueError(f"{title}: stacks need rows whose pieces have sizes above 0, got {self.rows}")
        self.heaviest, self.mean = max(self.totals.values()), sum(self.totals.values()) / len(self.rows)

    @property
    def summary(self) -> str:
        """The heaviest row beside the mean."""
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
        return f"<Stacks {self.title!r}: {self.summary}>"

    def _repr_html_(self) -> str:
        return f'<div style="max-width:100%">{self.to_svg()}</div>'

    def to_svg(self) -> str:
        """Draw one accessible SVG element."""
        bottom = _TOP + _ROW * len(self.rows)
        label = escape(f"{self.title}: {self.summary}", quote=True)
        mean = self._x(self.mean)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + _AXIS}" width="{_WIDTH}" '
            f'height="{bottom + _AXIS}" style="max-width:100%;height:auto" role="group" aria-label="{label}" '
            f'fill="currentColor" font-family="system-ui,sans-serif" font-size="12"><title>{label}</title>'
            f"<desc>{escape(str(self))}</desc><style>{_LIT}</style>",
            f'<text x="4" y="16" font-weight="600">{escape(self.title)}</text>',
            f'<text x="4" y="34" font-size="11" opacity=".75">{escape(self.summary)}</text>',
            *self._frames(),
            *self._groups(),
            f'<path d="M{mean:.1f} {_TOP - 4}V{bottom}" stroke="currentColor" stroke-width="2" '
            'stroke-dasharray="5 3" pointer-events="none"/>',
        ]
        return "".join([*parts, "</svg>"])

    def _frames(self) -> Iterator[str]:
        """Name and total of each row; the heaviest one with an outline."""
        for index, (name, total) in enumerate(self.totals.items()):
            y, is_heaviest = _TOP + index * _ROW, total >= self.heaviest * (1 - 1e-12)
            weight = ' font-weight="700"' if is_heaviest else ' opacity=".75"'
            yield f'<text x="4" y="{y + 15}" font-size="11"{weight}>{escape(name)}</text>'
            words, place, mean = f"{total:.5g}", self._x(total) + 6, self._x(self.mean)
            place = mean + 6 if place - 2 < mean < place + _LETTER * len(words) else place  # not across the dashed line
            yield f'<text x="{place:.1f}" y="{y + 15}" font-size="11"{weight}>{words}</text>'
            if is_heaviest:
                box = f'x="{_LEFT - 2}" y="{y}" width="{self._x(total) - _LEFT + 3:.1f}" height="{_BAR + 4}" rx="3"'
                yield f'<rect {box} fill="none" stroke="currentColor" stroke-width="2"/>'

    def _groups(self) -> Iterator[str]:
        """All pieces of one label as one element, which lights up as a whole."""
        drawn: dict[str, list[str]] = {}
        holders: dict[str, list[str]] = {}
        for index, (name, pieces) in enumerate(self.rows.items()):
            at = 0.0
            for place, (label, size) in enumerate(pieces):
                drawn.setdefault(label, []).append(self._piece(label, at, size, _TOP + index * _ROW + 2, place))
                holders.setdefault(label, []).append(f"{size:.4g} on {name}")
                at += size
        for label, bars in drawn.items():
            words = escape(f"{self.what} {label}: {', '.join(holders[label])}", quote=True)
            yield f'<g class="dp-piece" tabindex="0" role="img" aria-label="{words}"><title>{words}</title>'
            yield "".join([*bars, "</g>"])

    def _piece(self, label: str, at: float, size: float, y: float, place: int) -> str:
        left, width = self._x(at), max(self._x(at + size) - self._x(at) - 1, 0.5)  # a gap of 1 px between neighbours
        bar = f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{_SHADES[place % 2]}"/>'
        if len(label) * _LETTER > width:
            return bar
        where = f'x="{left + width / 2:.1f}" y="{y + 14}" text-anchor="middle" font-size="11"'
        return f'{bar}<text {where} fill="{_INKS[place % 2]}">{escape(label)}</text>'

    def _x(self, size: float) -> float:
        return _LEFT + size / self.heaviest * (_WIDTH - _LEFT - _RIGHT)
