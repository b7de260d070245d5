"""`Lanes`: named rows of spans on one time axis, such as the computation of a rank above its collectives.

Chapter: book/dp/dp-gradients.  In: spans by the name of their row.  Out: an SVG that fits a narrow page, or text.
A timeline has one row per rank, in which spans do not overlap.  Lanes also show a collective that was launched and not
yet waited for.
Elsewhere: the streams of Nsight Systems; the rows of a Perfetto trace.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from dualpipe_lab.timeline.colours import OTHER, PALETTE
from dualpipe_lab.timeline.scene import NOTE, Axis, heading, px, rect, shape, svg, text
from dualpipe_lab.timeline.spans import Span, Time
from dualpipe_lab.timeline.units import number, scale_of
from dualpipe_lab.viz.drawing import Drawing

_WIDTH, _TOP, _ROW, _BAR, _LEFT, _RIGHT = 460, 30, 34, 22, 4, 16  # px
_NAME, _AXIS, _LETTER = 14, 34, 6.6  # px: height of a row's name and of the axis, mean width of a letter


class Lanes(Drawing):
    """Rows of spans; prints as a table, displays as SVG.

    Args:
        title: the conclusion, short.
        rows: spans by the name of their row; spans of one row do not overlap.
        unit: the unit of their times, "ns" or "ticks".

    Raises:
        ValueError: no row, no span, or spans of one row that overlap.

    >>> work, link = Span(0, 0, 30, "B", label="B1"), Span(0, 20, 45, "collective", label="bucket 0")
    >>> print(Lanes("a sum beside the backward", {"work": [work], "link": [link]}, unit="ticks"))
    a sum beside the backward (ticks)
    work  B1 0-30
    link  bucket 0 20-45
    """

    def __init__(self, title: str, rows: Mapping[str, Sequence[Span]], unit: str = "ns") -> None:
        self.title, self.unit = title, unit
        self.rows = {name: sorted(spans, key=lambda span: (span.start, span.end)) for name, spans in rows.items()}
        if not any(self.rows.values()):
            raise ValueError(f"{title}: lanes need a row with a span, got {list(rows)} without any")
        for name, spans in self.rows.items():
            for one, other in pairwise(spans):
                if other.start < one.end:
                    raise ValueError(f"{title}: in {name!r}, {_text(other)} begins before {_text(one)} ends")
        self.end: Time = max(span.end for spans in self.rows.values() for span in spans)

    def __str__(self) -> str:
        divisor, unit = scale_of(self.unit, self.end)
        width = max(map(len, self.rows))
        lines = [
            f"{name:{width}}  "
            + ", ".join(f"{_text(s)} {number(s.start, divisor)}-{number(s.end, divisor)}" for s in spans)
            for name, spans in self.rows.items()
        ]
        return "\n".join([f"{self.title} ({unit})", *(line.rstrip() for line in lines)])

    def __repr__(self) -> str:
        return f"<Lanes {self.title!r}: {', '.join(self.rows)}>"

    def to_svg(self) -> str:
        """Draw one accessible SVG element."""
        height = _TOP + (_ROW + _NAME) * len(self.rows) + _AXIS
        axis = Axis(0, self.end or 1, _LEFT, _WIDTH - _RIGHT)
        parts = [heading(self.title), *self._ticks(axis, height - _AXIS)]
        for index, (name, spans) in enumerate(self.rows.items()):
            y = _TOP + index * (_ROW + _NAME)
            parts.append(text(_LEFT, y + 10, name, **NOTE))
            parts += [_bar(span, axis, y + _NAME) for span in spans]
        return svg(_WIDTH, height, self.title, parts, str(self))

    def _ticks(self, axis: Axis, y: float) -> Iterator[str]:
        divisor, unit = scale_of(self.unit, self.end)
        for value in axis.ticks(8) if self.end else [0]:
            x = axis.at(value)
            yield shape("path", d=f"M{px(x)} {_TOP}V{px(y + 4)}", stroke="currentColor", stroke_opacity=".2")
            words = number(value, divisor) + (f" {unit}" if not value else "")
            yield text(x, y + 18, words, text_anchor="middle" if value else "start", font_size=11)


def _bar(span: Span, axis: Axis, y: float) -> str:
    fill, ink, _ = PALETTE.get(span.kind, OTHER)
    left, right = axis.at(span.start), axis.at(span.end)
    width = max(right - left - 1, 1)  # a gap of 1 px keeps neighbours apart
    words = next((words for words in (_text(span), _text(span)[0]) if len(words) * _LETTER < width), "")
    place = left + width / 2, y + _BAR / 2 + 4
    shown = rect(left, y, width, _BAR, rx=2, fill=fill)
    return shown + (text(*place, words, text_anchor="middle", font_size=11, fill=ink) if words else "")


def _text(span: Span) -> str:
    return span.label or span.kind
