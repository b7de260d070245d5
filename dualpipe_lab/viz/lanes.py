"""`Lanes`: named rows of spans on one time axis, such as the computation of a rank above its collectives.

Chapter: book/dp/dp-gradients.  In: spans by the name of their row.  Out: an SVG that fits a narrow page, or text.
A timeline has one row per rank, in which spans do not overlap.  Lanes also show a collective that was launched and not
yet waited for.
Elsewhere: the streams of Nsight Systems; the rows of a Perfetto trace.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise

from dualpipe_lab.timeline.colours import OTHER, PALETTE
from dualpipe_lab.timeline.spans import Span, Time
from dualpipe_lab.timeline.units import axis_step, number, scale_of
from dualpipe_lab.viz.drawing import Drawing, svg

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
        parts = [f'<text x="{_LEFT}" y="16" font-weight="600">{escape(self.title)}</text>', *self._axis(height - _AXIS)]
        for index, (name, spans) in enumerate(self.rows.items()):
            y = _TOP + index * (_ROW + _NAME)
            parts.append(f'<text x="{_LEFT}" y="{y + 10}" font-size="11" opacity=".75">{escape(name)}</text>')
            parts += [piece for span in spans for piece in self._bar(span, y + _NAME)]
        return svg(_WIDTH, height, self.title, parts, str(self))

    def _bar(self, span: Span, y: float) -> Iterator[str]:
        fill, ink, _ = PALETTE.get(span.kind, OTHER)
        left, right = self._x(span.start), self._x(span.end)
        width = max(right - left - 1, 1)  # a gap of 1 px keeps neighbours apart
        yield f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{fill}"/>'
        words = next((words for words in (_text(span), _text(span)[0]) if len(words) * _LETTER < width), "")
        if words:
            place = f'x="{left + width / 2:.1f}" y="{y + _BAR / 2 + 4:.1f}" text-anchor="middle" font-size="11"'
            yield f'<text {place} fill="{ink}">{escape(words)}</text>'

    def _axis(self, y: float) -> Iterator[str]:
        divisor, unit = scale_of(self.unit, self.end)
        step, value = axis_step(self.end, 8), 0
        while value * step <= self.end:
            x = self._x(value * step)
            words = number(value * step, divisor) + (f" {unit}" if not value else "")
            anchor = "middle" if value else "start"
            yield f'<path d="M{x:.1f} {_TOP}V{y + 4}" stroke="currentColor" stroke-opacity=".2"/>'
            yield f'<text x="{x:.1f}" y="{y + 18}" text-anchor="{anchor}" font-size="11">{words}</text>'
            value += 1

    def _x(self, time: Time) -> float:
        return _LEFT + float(time) / float(self.end or 1) * (_WIDTH - _LEFT - _RIGHT)


def _text(span: Span) -> str:
    return span.label or span.kind
