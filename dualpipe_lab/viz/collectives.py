"""`RankValues`: the numbers on each rank before and after a collective, in the colour of the rank they came from.

Chapter: book/start/ranks-and-messages.  In: the numbers on each rank, state by state.  Out: an SVG, or text.
A cell has the colour of the rank that held its number in the first state.  A number that no rank started with, such as
a sum, has no colour.  An outlined cell changed in this state.
Elsewhere: the hand-drawn pictures of the MPI and NCCL manuals; these are drawn from a run.
"""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Protocol, TypeAlias

from dualpipe_lab.plan.fields import text_table
from dualpipe_lab.timeline.colours import NUMBERED
from dualpipe_lab.timeline.scene import NOTE, rect, shape, svg, text
from dualpipe_lab.viz.drawing import scrollable
from dualpipe_lab.viz.steplog import Steps

Rows: TypeAlias = Sequence[Sequence[float]]  # by rank: the numbers it holds

_ROW, _LABEL, _GAP, _TOP = 26, 48, 30, 46  # px
_LETTER = 7.0  # px, width of a digit at font size 12


class RankValues:
    """The numbers on every rank, state by state; prints as text, displays as SVG.

    `states`: pairs of a heading and, for each rank, its numbers in that state, possibly none.  The first state
    determines the colour of a number.  Raises ValueError if the states differ in their number of ranks.

    >>> print(RankValues("broadcast", [("before", [[1, 2], [0, 0]]), ("after", [[1, 2], [1, 2]])]))
    broadcast
            before  after
    rank 0  1 2     1 2
    rank 1  0 0     1 2
    """

    def __init__(self, name: str, states: Sequence[tuple[str, Rows]], note: str = "") -> None:
        self.name, self.note = name, note
        self.states = [(heading, [list(row) for row in rows]) for heading, rows in states]
        counts = [len(rows) for _, rows in self.states]
        if len(set(counts)) != 1 or not counts[0]:
            raise ValueError(f"{name}: every state needs one row per rank, got {counts} rows")
        self.num_ranks = counts[0]

    def __str__(self) -> str:
        texts = [[heading, *(" ".join(map(_number, row)) or "-" for row in rows)] for heading, rows in self.states]
        columns = [["", *(f"rank {rank}" for rank in range(self.num_ranks))], *texts]
        return f"{f'{self.name}  {self.note}'.rstrip()}\n{text_table([*zip(*columns, strict=True)])}"

    def __repr__(self) -> str:
        return f"<RankValues {self.name!r}: {self.num_ranks} ranks, {len(self.states)} states>"

    def _repr_html_(self) -> str:
        return scrollable(self.to_svg(), f"What each rank holds in {self.name}")

    def to_svg(self) -> str:
        """Draw one accessible SVG element; text and lines take the page's text colour."""
        values = (value for _, rows in self.states for row in rows for value in row)
        cell = max(26.0, 8 + _LETTER * max((len(_number(value)) for value in values), default=0))
        lefts, width = self._columns(cell)
        width = max(width, _LETTER * len(f"{self.name}  {self.note}") + 8)
        height = _TOP + _ROW * self.num_ranks + 4
        title = f"{self.name}: what each of {self.num_ranks} ranks holds"
        name = shape("tspan", escape(self.name), font_weight=600)
        parts = [shape("text", f"{name} " + shape("tspan", escape(self.note), opacity=".75"), x=4, y=16)]
        parts += [text(4, _middle(r) + 4, f"rank {r}", opacity=".75") for r in range(self.num_ranks)]
        for index, left in enumerate(lefts):
            parts += self._column(index, left, cell)
        return svg(width, height, title, parts, str(self), scales=False)

    def _columns(self, cell: float) -> tuple[list[float], float]:
        lefts, x = [], float(_LABEL)
        for words, rows in self.states:
            lefts.append(x)
            x += max(cell * max(map(len, rows)), _LETTER * len(words)) + _GAP
        return lefts, x - _GAP + 4

    def _column(self, index: int, left: float, cell: float) -> Iterator[str]:
        words, rows = self.states[index]
        before = self.states[index - 1][1] if index else rows
        yield text(left, 38, words, **NOTE)
        if index:
            yield text(left - _GAP / 2, _TOP + _ROW * self.num_ranks / 2 + 4, "→", text_anchor="middle")
        for rank, row in enumerate(rows):
            if not row:
                yield text(left, _middle(rank) + 4, "–", opacity=".75")
            for position, value in enumerate(row):
                is_new = position >= len(before[rank]) or before[rank][position] != value
                yield self._cell(value, left + position * cell, _middle(rank), cell, is_new)

    def _cell(self, value: float, x: float, y: float, width: float, is_new: bool) -> str:
        owner = self._owner(value)
        fill, ink = ("currentColor", "currentColor") if owner is None else NUMBERED[owner % len(NUMBERED)]
        style: dict[str, Any] = {"fill": fill, "fill_opacity": ".12" if owner is None else None}
        style |= {"stroke": "currentColor", "stroke_width": 2} if is_new else {}
        box = rect(x + 1.5, y - 11, width - 3, 22, rx=3, **style)
        return box + text(x + width / 2, y + 4, _number(value), text_anchor="middle", fill=ink)

    def _owner(self, value: float) -> int | None:
        """Return the rank that held a number in the first state; None for no rank or several."""
        owners = [rank for rank, row in enumerate(self.states[0][1]) if value in row]
        return owners[0] if len(owners) == 1 else None


class Picture(Protocol):
    """A picture of a gallery: `RankValues`, `Steps`, `Shards` or a `Drawing`."""

    def _repr_html_(self) -> str: ...


class Gallery:
    """Several pictures side by side, wrapped on a narrow page."""

    def __init__(self, pictures: Sequence[Picture]) -> None:
        self.pictures = list(pictures)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.pictures))

    def __repr__(self) -> str:
        return f"<Gallery of {len(self.pictures)} pictures>"

    def _repr_html_(self) -> str:
        # A drawing that plays takes the width that it gets; a picture has its own.
        sizes = ["flex:1 1 19rem;min-width:0" if isinstance(p, Steps) else "min-width:0" for p in self.pictures]
        boxes = "".join(
            f'<div style="{size}">{picture._repr_html_()}</div>'
            for size, picture in zip(sizes, self.pictures, strict=True)
        )
        return f'<div style="display:flex;flex-wrap:wrap;gap:1.25rem 2.5rem">{boxes}</div>'


def _middle(rank: int) -> int:
    return _TOP + _ROW * rank + _ROW // 2


def _number(value: float) -> str:
    return f"{value:g}"
