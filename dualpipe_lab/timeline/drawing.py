"""A timeline as one static SVG element: no script, no fonts, no ids, so that it works wherever HTML or images do.

All cells of one kind are one <path>, which keeps the file small.  Text and lines take the page's text colour
(currentColor), cells have colours that stay apart for colour-blind readers (Okabe and Ito 2008) and carry their letter.
A pair shares one border: its forward above its backward.  Where cells get too thin, stretches of time are summed up.
"""

from collections.abc import Iterator
from fractions import Fraction
from html import escape
from typing import TYPE_CHECKING

from dualpipe_lab.timeline.gantt import cell_label, second_stage
from dualpipe_lab.timeline.spans import WAIT, Span
from dualpipe_lab.timeline.svg_rows import cells, stretches
from dualpipe_lab.timeline.svg_shapes import (
    BOTTOM,
    FONT,
    LEFT,
    LETTER,
    OTHER,
    PALETTE,
    RIGHT,
    SMALLEST_FONT,
    TOP,
    Frame,
    box,
    path,
    px,
)
from dualpipe_lab.timeline.units import axis_step, number, scale_of

if TYPE_CHECKING:
    from dualpipe_lab.timeline.model import Timeline

_MIN_CELL = 3  # px: thinner cells are summed up


def draw_svg(timeline: "Timeline", width: int) -> str:
    """Return the SVG element, at most `width` pixels wide (at least 400)."""
    frame = _frame(timeline, max(width, 400))
    spans = [span for row in timeline.spans_by_rank for span in row if span.duration]
    shortest = min((float(span.duration) for span in spans if span.kind != WAIT), default=1.0)
    is_cells = shortest * frame.per_time >= _MIN_CELL
    picture = cells(timeline, frame) if is_cells else stretches(timeline, frame)
    title = f"Timeline of {timeline.name}: {timeline.num_ranks} ranks"
    size = f'viewBox="0 0 {px(frame.width)} {px(frame.height)}" width="{px(frame.width)}" height="{px(frame.height)}"'
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" ',
            'fill="currentColor" font-family="system-ui,sans-serif" font-size="12">',
            f"<title>{escape(title)}</title><desc>{escape(_description(timeline))}</desc>",
            *_scaffold(timeline, frame),
            *picture,
            *_legend(timeline, frame, is_cells),
            "</svg>",
        ]
    )


def _frame(timeline: "Timeline", width: int) -> Frame:
    room = width - LEFT - RIGHT
    spans = [span for row in timeline.spans_by_rank for span in row if span.duration]
    # Wide enough for the longest label of each cell, but not wider than the room; then the letters shrink a little.
    wanted = max((_label_width(span) / float(span.duration) for span in spans), default=1.0)
    makespan = float(timeline.makespan) or 1.0
    plot = max(min(room, wanted * makespan), 240)
    row = 28.0 if timeline.num_ranks <= 16 else max(448 / timeline.num_ranks, 6.0)
    font = min(max(FONT * plot / (wanted * makespan), SMALLEST_FONT), FONT)
    return Frame(LEFT + plot + RIGHT, TOP + row * timeline.num_ranks + BOTTOM, row, plot / makespan, font)


def _label_width(span: Span) -> float:
    return max((len(cell_label(part, None)) for part in span.parts), default=1) * LETTER + 4


def _description(timeline: "Timeline") -> str:
    divisor, unit = scale_of(timeline.unit, timeline.makespan)
    idle = [number(timeline.bubble_time(rank), divisor) for rank in range(timeline.num_ranks)]
    peak = [str(timeline.peak_activations(rank)) for rank in range(timeline.num_ranks)]
    return (
        f"Makespan {number(timeline.makespan, divisor)} {unit}, "
        f"bubble {timeline.bubble_fraction:.1%} of all ranks' time. "
        f"Idle per rank: {' '.join(idle)}. Peak of live activations per rank: {' '.join(peak)}."
    )


def _scaffold(timeline: "Timeline", frame: Frame) -> Iterator[str]:
    """Title, time axis, and for each rank its name, its background and its idle time."""
    divisor, unit = scale_of(timeline.unit, timeline.makespan)
    makespan = number(timeline.makespan, divisor)
    yield f'<text x="4" y="15"><tspan font-weight="600">{escape(timeline.name)}</tspan>'
    yield f" {makespan} {unit}, bubble {timeline.bubble_fraction:.1%}</text>"
    bottom = px(frame.top(timeline.num_ranks))
    span = Fraction(timeline.makespan) / divisor
    step = axis_step(span, most=max(int(frame.plot / 60), 1)) if span else Fraction(1)
    marks = (
        [(number(k * step), LEFT + frame.plot * float(k * step / span)) for k in range(int(span / step) + 1)]
        if span
        else []
    )
    yield '<g font-size="11" text-anchor="middle" opacity=".75">'
    yield "".join(f'<text x="{px(x)}" y="36">{text}</text>' for text, x in marks)
    yield f'</g><path d="{"".join(f"M{px(x)} 39V{bottom}" for _, x in marks)}" stroke="currentColor" opacity=".2"/>'
    gap = min(2.0, frame.row / 6)
    tracks = "".join(box(LEFT, frame.top(r) + gap, frame.plot, frame.row - 2 * gap) for r in range(timeline.num_ranks))
    yield f'<path d="{tracks}" opacity=".08"/>'
    every = max(round(14 / frame.row), 1)  # thin rows: name only every few ranks
    for rank in range(0, timeline.num_ranks, every):
        y = px(frame.top(rank) + frame.row / 2 + 4)
        idle = number(timeline.bubble_time(rank), divisor)
        yield f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">rank {rank}</text>'
        yield f'<text x="{px(frame.width - RIGHT + 6)}" y="{y}" font-size="11" opacity=".75">idle {idle} {unit}</text>'


def _legend(timeline: "Timeline", frame: Frame, is_cells: bool) -> Iterator[str]:
    spans = [span for row in timeline.spans_by_rank for span in row]
    kinds = {kind for span in spans for kind in ([part[1] for part in span.parts] or [span.kind])}
    x, y = float(LEFT), frame.height - 12
    for kind in [*(kind for kind in PALETTE if kind in kinds), *(["other"] if kinds - set(PALETTE) else [])]:
        word = PALETTE.get(kind, OTHER)[2]
        yield path(kind, box(x, y - 10, 12, 12)) + f'<text x="{px(x + 16)}" y="{px(y)}" font-size="11">{word}</text>'
        x += 28 + len(word) * 6.2
    notes = ["framed: an overlapped pair"] if is_cells and any(span.pair for span in spans) else []
    if is_cells and any(second_stage(row) is not None for row in timeline.spans_by_rank):
        notes.append("lower case, dark bar: the rank's second stage")
    if not is_cells:
        notes.append("heights: shares of a stretch of time")
    yield f'<text x="{px(x)}" y="{px(y)}" font-size="11">{escape("; ".join(notes))}</text>' if notes else ""
