"""`Diagram`: boxes and arrows, such as ranks, the tensors that they hold, and what travels between them.

Chapter: book/start/memory, and the door of each part.  In: boxes at places of a grid, arrows.  Out: an SVG, or text.
A box is as large as its author says, and its text has to fit: a picture never overflows.  Lines, frames and plain text
take the page's text colour, so that the picture follows light and dark; a coloured box has an ink of contrast 4.5 : 1.
Elsewhere: Graphviz, Mermaid, TikZ, which find the places themselves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dualpipe_lab.timeline.scene import px, rect, shape, svg, swatches, text
from dualpipe_lab.viz.drawing import Drawing

Side: TypeAlias = Literal["left", "right", "top", "bottom"]
Point: TypeAlias = tuple[float, float]

CELL, MARGIN, TITLE = 20.0, 8.0, 24.0  # px
_FONT, _LETTER, _LINE = 12.0, 6.7, 15.0  # px: font size, mean width of a letter, height of a line
_SMALL = 11.0
_PAGE = "var(--pst-color-background, var(--jp-layout-color0, #fff))"
_COLOURS = {  # Okabe and Ito 2008, and the colour of a text on top
    "blue": ("#0072b2", "#fff"), "orange": ("#e69f00", "#000"), "green": ("#009e73", "#000"),
    "pink": ("#cc79a7", "#000"), "sky": ("#56b4e9", "#000"), "yellow": ("#f0e442", "#000"),
    "red": ("#d55e00", "#000"), "grey": ("#595959", "#fff"),
}  # fmt: skip
_OUTLINES = ("plain", "frame", "text", "absent")
DENSE = ("norm", "q, k, v", "attention", "output", "norm 2", "gate, up", "down")
MIXTURE = (*DENSE[:5], "router", "experts")
_WIDTH, _GAP, _STEP = 8, 7, 2  # cells: of a rank, between ranks, from one part to the next
_UNIT: dict[Side, Point] = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}


@dataclass(frozen=True)
class Box:
    """A box of a diagram.

    Attributes:
        name: what arrows call it.
        at: column and row of its upper left corner, in cells of 20 px.
        size: columns and rows.
        text: its lines, in the middle; None for the name.  The first line of a frame stands at its top.
        colour: blue, orange, green, pink, sky, yellow, red or grey; plain (an outline), frame (an outline around other
            boxes), absent (dashed: what is not there) or text (nothing but its text).
    """

    name: str
    at: Point
    size: Point
    text: str | None = None
    colour: str = "plain"

    @property
    def lines(self) -> list[str]:
        """The lines of its text."""
        text = self.name if self.text is None else self.text
        return text.split("\n") if text else []

    def side(self, side: Side) -> Point:
        """The middle of one side, in px."""
        (x, y), (width, height) = self.at, self.size
        dx, dy = _UNIT[side]
        return MARGIN + CELL * (x + width * (1 + dx) / 2), TITLE + MARGIN + CELL * (y + height * (1 + dy) / 2)


@dataclass(frozen=True)
class Arrow:
    """An arrow of a diagram.

    Attributes:
        start, end: names of boxes.
        text: what travels; beside the middle of the arrow, or `shift` cells from there.
        sides: where it leaves and arrives, as "right left"; None for the sides that face each other.
        colour: as of a box; None for that of the text.
        dashed: for what happens later, or only at times.
        both: an arrow with two heads.
        shift: columns and rows by which the text is moved.
    """

    start: str
    end: str
    text: str = ""
    sides: str | None = None
    colour: str | None = None
    dashed: bool = False
    both: bool = False
    shift: Point = (0, 0)


class Diagram(Drawing):
    """Boxes and arrows; prints as text, displays as SVG.

    Args:
        title: what the picture says, in a few words.
        boxes: in the order in which they are drawn; frames come before what lies in them.
        arrows: between boxes.
        legend: the meaning of colours.

    Raises:
        ValueError: a name that two boxes have or none has, an unknown colour or side, a text that does not fit its box.

    >>> ranks = [Box("rank 0", (0, 0), (4, 2), colour="blue"), Box("rank 1", (8, 0), (4, 2), colour="blue")]
    >>> print(Diagram("One message", ranks, [Arrow("rank 0", "rank 1", "y")]))
    One message
    [rank 0] [rank 1]
    rank 0 -> rank 1: y
    """

    def __init__(
        self, title: str, boxes: Sequence[Box], arrows: Sequence[Arrow] = (), legend: dict[str, str] | None = None
    ) -> None:
        self.title, self.arrows, self.legend = title, list(arrows), dict(legend or {})
        self.boxes = {box.name: box for box in boxes}
        if not boxes or len(self.boxes) != len(boxes):
            raise ValueError(f"{title}: boxes have names that differ, got {[box.name for box in boxes]}")
        for box in boxes:
            _check_box(title, box)
        for arrow in self.arrows:
            self._check_arrow(arrow)
        for colour in self.legend:
            if colour not in _COLOURS:
                raise ValueError(f"{title}: a legend explains {', '.join(_COLOURS)}, got {colour!r}")

    def __str__(self) -> str:
        texts = ["[" + " / ".join(box.lines) + "]" for box in self.boxes.values() if box.lines]
        lines = [
            f"{arrow.start} {'<->' if arrow.both else '->'} {arrow.end}{': ' if arrow.text else ''}"
            + " / ".join(arrow.text.split("\n"))
            for arrow in self.arrows
        ]
        return "\n".join([self.title, " ".join(texts), *lines])

    def __repr__(self) -> str:
        return f"<Diagram {self.title!r}: {len(self.boxes)} boxes, {len(self.arrows)} arrows>"

    def to_svg(self) -> str:
        """Draw one accessible SVG element."""
        middles = [self._curve(arrow)[-1] for arrow in self.arrows]  # a curve between two upper sides rises above both
        width = max(*(box.side("right")[0] for box in self.boxes.values()), *(x for x, _ in middles), 0)
        height = max(*(box.side("bottom")[1] for box in self.boxes.values()), *(y + 2 for _, y in middles), 0)
        body = [*map(_draw_box, self.boxes.values()), *map(self._draw_arrow, self.arrows)]
        body.append(
            swatches(((_COLOURS[name][0], words) for name, words in self.legend.items()), MARGIN, height + 18, _LETTER)
        )
        legend_width = sum(33 + _LETTER * len(words) for words in self.legend.values())
        width = max(width, 7.2 * len(self.title), legend_width) + MARGIN
        height += MARGIN + (22 if self.legend else 0)
        return svg(width, height, self.title, [text(MARGIN, 18, self.title, font_weight=600), *body], str(self))

    def _check_arrow(self, arrow: Arrow) -> None:
        missing = [name for name in (arrow.start, arrow.end) if name not in self.boxes]
        if missing:
            raise ValueError(f"{self.title}: no box has the name {missing[0]!r}; there are {', '.join(self.boxes)}")
        if arrow.colour is not None and arrow.colour not in _COLOURS:
            raise ValueError(f"{self.title}: arrows are {', '.join(_COLOURS)}, got {arrow.colour!r}")
        if arrow.sides is not None and not (len(arrow.sides.split()) == 2 and {*arrow.sides.split()} <= {*_UNIT}):
            raise ValueError(
                f"{self.title}: sides are two of {', '.join(_UNIT)}, such as 'right left', got {arrow.sides!r}"
            )

    def _curve(self, arrow: Arrow) -> list[Point]:
        """The four points of an arrow's Bezier curve, and its middle."""
        start, end = self.boxes[arrow.start], self.boxes[arrow.end]
        first, last = _sides(arrow, start, end)
        a, b = _away(start.side(first), first, 7 if arrow.both else 1), _away(end.side(last), last, 7)
        bend = max(14.0, 0.4 * max(abs(a[0] - b[0]), abs(a[1] - b[1])))
        if first == last:  # out and back: a flat bow
            bend = min(bend, 26.0)
        near, far = _away(a, first, bend), _away(b, last, bend)
        x, y = ((p + 3 * q + 3 * r + s) / 8 for p, q, r, s in zip(a, near, far, b, strict=True))
        return [a, near, far, b, (x, y)]

    def _draw_arrow(self, arrow: Arrow) -> str:
        start, end = self.boxes[arrow.start], self.boxes[arrow.end]
        first, last = _sides(arrow, start, end)
        colour = "currentColor" if arrow.colour is None else _COLOURS[arrow.colour][0]
        a, near, far, b, middle = self._curve(arrow)
        style: dict[str, Any] = {
            "stroke": colour,
            "stroke_width": 1.6,
            "stroke_dasharray": "5 4" if arrow.dashed else None,
        }
        drawn = shape("path", d=f"M{_at(a)}C{_at(near)} {_at(far)} {_at(b)}", fill="none", **style)
        drawn += _head(end.side(last), last, colour)
        if arrow.both:
            drawn += _head(start.side(first), first, colour)
        return drawn + _label(arrow, *middle, flat=first in ("left", "right") and a[1] == b[1])


def _check_box(title: str, box: Box) -> None:
    if box.colour not in (*_COLOURS, *_OUTLINES):
        raise ValueError(f"{title}: boxes are {', '.join((*_COLOURS, *_OUTLINES))}, got {box.colour!r}")
    if min(*box.at, *box.size) < 0:
        raise ValueError(f"{title}: places and sizes are at least 0, got {box}")
    longest, number = max(map(len, box.lines), default=0), len(box.lines)
    needed = _LETTER * longest / CELL, (_LINE * number) / CELL
    if box.colour != "text" and (needed[0] > box.size[0] or needed[1] > box.size[1]):
        raise ValueError(
            f"{title}: the text of {box.name!r} needs about {needed[0]:.1f} x {needed[1]:.1f} cells, and the box has "
            f"{box.size[0]:g} x {box.size[1]:g}; make the box larger or break the text into lines"
        )


def _draw_box(box: Box) -> str:
    x, y = MARGIN + CELL * box.at[0], TITLE + MARGIN + CELL * box.at[1]
    width, height = CELL * box.size[0], CELL * box.size[1]
    fill, ink = _COLOURS.get(box.colour, ("none", "currentColor"))
    outline: dict[str, Any] = {"stroke": "currentColor", "stroke_opacity": ".55"} if fill == "none" else {}
    outline |= {"stroke_dasharray": "4 4"} if box.colour == "absent" else {}
    drawn = "" if box.colour == "text" else rect(x, y, width, height, rx=4, fill=fill, **outline)
    top = y + 15 if box.colour == "frame" else y + height / 2 - _LINE * (len(box.lines) - 1) / 2 + 0.36 * _FONT
    style: dict[str, Any] = {"text_anchor": "middle", "fill": ink}
    style |= {"font_weight": 600} if box.colour == "frame" else {}
    return drawn + "".join(text(x + width / 2, top + _LINE * n, line, **style) for n, line in enumerate(box.lines))


def _sides(arrow: Arrow, start: Box, end: Box) -> tuple[Side, Side]:
    if arrow.sides is not None:
        first, last = arrow.sides.split()
        return first, last  # type: ignore[return-value]  # checked before
    right, left = end.at[0] - start.at[0] - start.size[0], start.at[0] - end.at[0] - end.size[0]
    below, above = end.at[1] - start.at[1] - start.size[1], start.at[1] - end.at[1] - end.size[1]
    gap = max(right, left, below, above)
    if gap == right:
        return "right", "left"
    if gap == left:
        return "left", "right"
    return ("bottom", "top") if gap == below else ("top", "bottom")


def _away(point: Point, side: Side, distance: float) -> Point:
    return point[0] + _UNIT[side][0] * distance, point[1] + _UNIT[side][1] * distance


def _at(point: Point) -> str:
    return f"{px(point[0])},{px(point[1])}"


def _head(tip: Point, side: Side, colour: str) -> str:
    """A triangle whose tip touches a side of a box."""
    dx, dy = _UNIT[side]
    left, right = ((tip[0] + 9 * dx + sign * 4.5 * dy, tip[1] + 9 * dy + sign * 4.5 * dx) for sign in (-1, 1))
    return shape("polygon", points=" ".join(map(_at, (_away(tip, side, 1), left, right))), fill=colour)


def _label(arrow: Arrow, x: float, y: float, flat: bool) -> str:
    """The text of an arrow: above a level one, otherwise over its middle, with the page's colour behind it."""
    lines = arrow.text.split("\n") if arrow.text else []
    x, y = x + CELL * arrow.shift[0], y + CELL * arrow.shift[1]
    top = y - 6 - _LINE * (len(lines) - 1) if flat else y - _LINE * (len(lines) - 1) / 2 + 0.36 * _SMALL
    halo: dict[str, Any] = {"paint_order": "stroke", "stroke_width": 4, "stroke_linejoin": "round", "stroke": _PAGE}
    style: dict[str, Any] = {"text_anchor": "middle", "font_size": _SMALL, **halo}
    return "".join(text(x, top + _LINE * number, line, **style) for number, line in enumerate(lines))


def transformer_block(
    title: str,
    colours: Mapping[str, str],
    communication: Mapping[str, str],
    texts: Mapping[str, str | tuple[str, str]] | None = None,
    ranks: tuple[str, str] = ("rank 0", "rank 1"),
    mixture: bool = False,
    legend: dict[str, str] | None = None,
) -> Diagram:
    """Draw one layer on two ranks, from top to bottom.

    Args:
        title: what the picture says.
        colours: of parts, by name; the others are outlines.  Parts are those of `DENSE`, or of `MIXTURE`.
        communication: what crosses between the ranks, by the part behind which it does; "in": before the layer.
        texts: the text of parts, where it is not their name; a pair for the two ranks.
        ranks: the names of the two.
        mixture: the feed-forward network is a mixture of experts.
        legend: the meaning of colours.

    Raises:
        ValueError: a part that the layer does not have.

    >>> picture = transformer_block("heads", {"q, k, v": "blue"}, {"output": "all-reduce", "down": "all-reduce"})
    >>> [str(arrow.text) for arrow in picture.arrows if arrow.both]
    ['all-reduce', 'all-reduce']
    """
    parts, texts = MIXTURE if mixture else DENSE, dict(texts or {})
    unknown = {*colours, *texts, *communication} - {*parts, "in"}
    if unknown:
        raise ValueError(f"{title}: a layer has the parts {', '.join(parts)}; got {', '.join(sorted(unknown))}")
    boxes, arrows = [], []
    height = _STEP * len(parts) + 1
    for number, rank in enumerate(ranks):
        left = number * (_WIDTH + _GAP)
        boxes.append(Box(rank, (left, 0), (_WIDTH, height), colour="frame"))
        for row, part in enumerate(parts):
            chosen = texts.get(part, part.removesuffix(" 2"))
            text = chosen if isinstance(chosen, str) else chosen[number]
            place, size = (left + 0.5, 1.3 + _STEP * row), (_WIDTH - 1, 1.3)
            boxes.append(Box(f"{part} {number}", place, size, text, colours.get(part, "plain")))
            if row:
                arrows.append(Arrow(f"{parts[row - 1]} {number}", f"{part} {number}", sides="bottom top"))
    for part, text in communication.items():
        first = part if part != "in" else parts[0]
        arrows.append(Arrow(f"{first} 0", f"{first} 1", text, "right left", "pink", both=True))
    return Diagram(title, boxes, arrows, legend)
