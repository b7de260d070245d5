"""Static SVG drawing of a timeline, without script, fonts or ids: pages and images can hold it.

In: a timeline, a width in px.  Out: one SVG element.
All cells of one kind are one <path>, so that the file is small.  Text and lines have the page's text colour
(currentColor).  Cells have a letter and a colour that colour-blind readers distinguish (Okabe and Ito 2008).  A pair
has one border, with its forward above its backward.  Cells below 3 px are drawn as shares of stretches of time.  Other
streams of a rank, such as its communication, are lanes below its work.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from html import escape
from itertools import accumulate
from typing import NamedTuple

from dualpipe_lab.timeline import streams
from dualpipe_lab.timeline.colours import PALETTE, ColourBy, Colouring, colour_named
from dualpipe_lab.timeline.data import TimelineData
from dualpipe_lab.timeline.gantt import Shares, buckets, cell_label, second_stage
from dualpipe_lab.timeline.spans import WAIT, ActionKey, Span
from dualpipe_lab.timeline.units import axis_step, number, scale_of

LEFT, RIGHT, TOP, BOTTOM = 62, 96, 44, 34  # px around the rows
FONT, SMALLEST_FONT = 11.0, 9.0  # px, of the letters in the cells
LETTER = 6.4  # px, width of a letter of that font
_MIN_CELL = 3  # px: thinner cells are summed up
_BUCKET = 4  # px
LEVELS = 4  # heights of a summed stretch
_STICKY = 0.7  # levels
_LANE = 0.6  # of the height of a row
_MOST_WORDS = 8  # in the legend


class Geometry(NamedTuple):
    """Sizes of the drawing, in px."""

    width: float
    height: float
    row: float
    per_time: float
    font: float
    lanes: tuple[tuple[str, float], ...] = ()  # streams below the work, and their heights

    @property
    def plot(self) -> float:
        """The width of the rows."""
        return self.width - LEFT - RIGHT

    def top(self, rank: int) -> float:
        """Return the top edge of a rank's row."""
        return TOP + rank * self.pitch

    @property
    def pitch(self) -> float:
        """The height of a rank's row with the lanes below."""
        return self.row + sum(height for _, height in self.lanes)


def draw_svg(timeline: TimelineData, width: int, colour_by: ColourBy = "kind", messages: bool = False) -> str:
    """Return the SVG element, at most `width` pixels wide (at least 400); `messages` draws them as communication."""
    colouring, below = Colouring(timeline, colour_by), streams.lanes(timeline, messages)
    frame = _frame(timeline, max(width, 400), streams.heights(below))
    spans = [span for row in timeline.spans_by_rank for span in row if span.duration]
    shortest = min((float(span.duration) for span in spans if span.kind != WAIT), default=1.0)
    is_cells = shortest * frame.per_time >= _MIN_CELL
    picture = cells(timeline, frame, colouring, below) if is_cells else stretches(timeline, frame)
    title = f"Timeline of {timeline.name}: {timeline.num_ranks} ranks"
    size = f'viewBox="0 0 {px(frame.width)} {px(frame.height)}" width="{px(frame.width)}" height="{px(frame.height)}"'
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" ',
            'fill="currentColor" font-family="system-ui,sans-serif" font-size="12">',
            f"<title>{escape(title)}</title><desc>{escape(_description(timeline))}</desc>",
            *_scaffold(timeline, frame),
            *picture,
            *_legend(timeline, frame, colouring if is_cells else None, messages),
            "</svg>",
        ]
    )


def _frame(timeline: TimelineData, width: int, num_lines: dict[str, int]) -> Geometry:
    available = width - LEFT - RIGHT
    spans = [span for row in timeline.spans_by_rank for span in row if span.duration]
    # Wide enough for the longest label of each cell, but not wider than available; then the letters shrink a little.
    wanted = max((_label_width(span) / float(span.duration) for span in spans), default=1.0)
    makespan = float(timeline.makespan) or 1.0
    plot = max(min(available, wanted * makespan), 240)
    row = 28.0 if timeline.num_ranks <= 16 else max(448 / timeline.num_ranks, 6.0)
    font = min(max(FONT * plot / (wanted * makespan), SMALLEST_FONT), FONT)
    lanes = tuple((name, row * _LANE * lines) for name, lines in num_lines.items())
    frame = Geometry(LEFT + plot + RIGHT, 0, row, plot / makespan, font, lanes)
    return frame._replace(height=TOP + frame.pitch * timeline.num_ranks + BOTTOM)


def _label_width(span: Span) -> float:
    return max((len(text_of(span, action, None)) for action in span.actions), default=len(span.label) or 1) * LETTER + (
        8 if span.extra_label else 4
    )


def _description(timeline: TimelineData) -> str:
    divisor, unit = scale_of(timeline.unit, timeline.makespan)
    idle = [number(timeline.bubble_time(rank), divisor) for rank in range(timeline.num_ranks)]
    peak = [str(timeline.peak_activations(rank)) for rank in range(timeline.num_ranks)]
    return (
        f"Makespan {number(timeline.makespan, divisor)} {unit}, "
        f"bubble {timeline.bubble_fraction:.1%} of all ranks' time. "
        f"Idle per rank: {' '.join(idle)}. Peak of live activations per rank: {' '.join(peak)}."
    )


def _scaffold(timeline: TimelineData, frame: Geometry) -> Iterator[str]:
    """Yield title, time axis, and the name, background and idle time of each rank."""
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
    every = max(round(14 / frame.pitch), 1)  # thin rows: name only every few ranks
    if frame.lanes and every == 1:
        yield from _lane_names(timeline.num_ranks, frame)
    for rank in range(0, timeline.num_ranks, every):
        y = px(frame.top(rank) + frame.row / 2 + 4)
        idle = number(timeline.bubble_time(rank), divisor)
        yield f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">rank {rank}</text>'
        yield f'<text x="{px(frame.width - RIGHT + 6)}" y="{y}" font-size="11" opacity=".75">idle {idle} {unit}</text>'


def _lane_names(num_ranks: int, frame: Geometry) -> Iterator[str]:
    for rank in range(num_ranks):
        y = frame.top(rank) + frame.row
        for name, height in frame.lanes:
            text = escape(name if len(name) < 9 else f"{name[:4]}.")
            place = f'x="{LEFT - 6}" y="{px(y + height / 2 + 2)}" text-anchor="end"'
            yield f'<text {place} font-size="10" opacity=".75">{text}</text>'
            y += height


def _legend(timeline: TimelineData, frame: Geometry, colouring: Colouring | None, messages: bool) -> Iterator[str]:
    is_cells = colouring is not None
    names = list(dict.fromkeys((colouring or Colouring(timeline)).names(timeline)))
    if is_cells and messages and any(not streams.ACTION.fullmatch(message.label) for message in timeline.messages):
        names.append("message")
    x, y = float(LEFT), frame.height - 12
    for name in names[:_MOST_WORDS]:
        word = colour_named(name).words
        yield path(name, box(x, y - 10, 12, 12)) + f'<text x="{px(x + 16)}" y="{px(y)}" font-size="11">{word}</text>'
        x += 28 + len(word) * 6.2
    if len(names) > _MOST_WORDS:
        yield f'<text x="{px(x)}" y="{px(y)}" font-size="11">and so on, the colours repeat</text>'
        return
    has_pairs = any(span.pair for spans in timeline.spans_by_rank for span in spans)
    notes = ["framed: an overlapped pair"] if is_cells and has_pairs else []
    if is_cells and any(second_stage(row) is not None for row in timeline.spans_by_rank):
        notes.append("lower case, dark bar: the rank's second stage")
    if not is_cells:
        notes.append("heights: shares of a stretch of time")
    yield f'<text x="{px(x)}" y="{px(y)}" font-size="11">{escape("; ".join(notes))}</text>' if notes else ""


class Label(NamedTuple):
    """The text of a cell, and its centre."""

    text: str
    x: str
    y: str


def cells(
    timeline: TimelineData, frame: Geometry, colouring: Colouring, below: list[dict[str, streams.Lines]]
) -> Iterator[str]:
    """Yield the cells of all spans; all cells of one kind are one path."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    labels: defaultdict[str, list[Label]] = defaultdict(list)
    for rank, spans in enumerate(timeline.spans_by_rank):
        lower, y = second_stage(spans), frame.top(rank)
        for span in timeline.stream(rank):
            for name, shape, label in _cell(span, lower, y, frame, colouring):
                paths[name].append(shape)
                labels[name] += label
        y += frame.row
        for stream, height in frame.lanes:
            line_height = height / max(len(lines := below[rank][stream]), 1)
            for index, line in enumerate(lines):
                for span in line:
                    name, shape, label = _bar(span, y + index * line_height, line_height, frame, colouring)
                    paths[name].append(shape)
                    labels[name] += label
            y += height
    # The borders of pairs and the bars under a rank's second stage lie above all cells.
    for kind in sorted(paths, key=lambda kind: kind.startswith("mark ")):
        yield path(kind, "".join(paths[kind]))
    for kind, found in labels.items():
        if found:
            fill, size = colour_named(kind).ink, px(frame.font)
            yield f'<g fill="{fill}" text-anchor="middle" font-size="{size}">{"".join(_texts(found))}</g>'


def _texts(labels: list[Label]) -> Iterator[str]:
    """Yield the labels; single letters of one row are one <text> with a list of positions, a fifth of the size."""
    lines: defaultdict[str, list[Label]] = defaultdict(list)
    for label in labels:
        if len(label.text) == 1:
            lines[label.y].append(label)
        else:
            yield f'<text x="{label.x}" y="{label.y}">{escape(label.text)}</text>'
    for y, line in lines.items():
        places = " ".join(label.x for label in line)
        yield f'<text y="{y}" x="{places}">{escape("".join(label.text for label in line))}</text>'


def text_of(span: Span, action: ActionKey, lower: int | None, by: str = "kind") -> str:
    """Return the text of a cell: its label if that is not the action's own, else letter and microbatch.

    >>> text_of(Span(0, 0, 1, "F", 2, 7, "2F7"), (2, "F", 7), None, "stage")
    '2F7'
    """
    stage, kind, microbatch = action
    return span.extra_label or (f"{stage}{kind}{microbatch}" if by == "stage" else cell_label(action, lower))


def _cell(
    span: Span, lower: int | None, top: float, frame: Geometry, colouring: Colouring
) -> Iterator[tuple[str, str, list[Label]]]:
    """Yield (name of the colour, shape, label or nothing) of every shape of one span."""
    x, width = _extent(span, frame)
    y, height = top + 2, frame.row - 4
    if not width:
        return
    actions = span.actions
    if not actions:
        yield colouring.of_span(span), box(x, y, width, height), _word(span, x, y, width, height, frame.font)
    share = height / max(len(actions), 1)
    for index, action in enumerate(actions):
        base, name = y + index * share, colouring.of_action(action)
        text, short = text_of(span, action, lower, colouring.by), _SHORT[colouring.by](action)
        yield name, box(x, base, width, share), _label(text, short, x, base, width, share, frame.font)
        if action[0] == lower and not span.extra_label:
            yield "mark second", f"M{px(x)} {px(base + share - 1.25)}h{px(width)}", []
        if name == "direction 1":
            yield "mark second", f"M{px(x)} {px(base + 1.25)}h{px(width)}", []
    if len(actions) > 1:
        yield "mark pair", box(x, y, width, height), []


# What a narrow cell says: what its colour does not, or the number of its colour.
_SHORT: dict[str, Callable[[ActionKey], str]] = {
    "kind": lambda action: action[1],
    "direction": lambda action: action[1],
    "stage": lambda action: str(action[0]),
    "microbatch": lambda action: str(action[2]),
}


def _extent(span: Span, frame: Geometry) -> tuple[float, float]:
    x, width = LEFT + float(span.start) * frame.per_time, float(span.duration) * frame.per_time
    gap = min(0.5, width / 8)
    return x + gap, width - 2 * gap


def _bar(span: Span, top: float, height: float, frame: Geometry, colouring: Colouring) -> tuple[str, str, list[Label]]:
    """Return (name of the colour, shape, label or nothing) of a span on a lane."""
    x, width = _extent(span, frame)
    y, height = top + 1, height - 2
    return colouring.of(span)[0], box(x, y, width, height), _word(span, x, y, width, height, min(frame.font, 10))


def _word(span: Span, x: float, y: float, width: float, height: float, font: float) -> list[Label]:
    fits = span.label and span.kind != WAIT and len(span.label) * LETTER * font / FONT <= width - 2
    return _label(span.label, span.label, x, y, width, height, font) if fits else []


def _label(label: str, short: str, x: float, y: float, width: float, height: float, font: float) -> list[Label]:
    letter = LETTER * font / FONT
    if len(label) * letter > width + 0.5:
        label = short
    if len(label) * letter > width + 0.5 * (len(label) > 1) or height < 10:
        return []
    return [Label(label, px(x + width / 2), px(y + height / 2 + 0.33 * font))]


def stretches(timeline: TimelineData, frame: Geometry) -> Iterator[str]:
    """Yield the shares of each stretch of a few pixels as stacked boxes; similar neighbours are merged."""
    count = int(frame.plot / _BUCKET)
    step = frame.plot / count
    gap = min(2.0, frame.row / 6)
    unit = (frame.row - 2 * gap) / LEVELS
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for rank in range(timeline.num_ranks):
        bottom = frame.top(rank) + frame.row - gap
        for start, end, tops in runs(buckets(timeline.stream(rank), timeline.makespan, count)):
            x, reached = LEFT + start * step, 0
            for kind, top in tops.items():
                if top > reached:
                    paths[kind].append(box(x, bottom - top * unit, (end - start) * step, (top - reached) * unit))
                    reached = top
    for kind, shapes in paths.items():
        yield path(kind, "".join(shapes))


def runs(shares: list[Shares]) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Yield (first, end, the top level of each kind, 0 to LEVELS) of similar neighbouring stretches.

    A run continues while the exact levels are near its own.  Otherwise the steady phase of 1F1B, whose stretches differ
    by one forward, would become thousands of pieces.
    """
    order = sorted({kind for share in shares for kind in share}, key=lambda kind: [*PALETTE, kind].index(kind))
    begin, tops = 0, dict.fromkeys(order, 0)
    for index, share in enumerate(shares):
        exact = list(accumulate(share.get(kind, 0.0) * LEVELS for kind in order))
        if any(abs(value - top) > _STICKY for value, top in zip(exact, tops.values(), strict=True)):
            yield begin, index, tops
            begin, tops = index, dict(zip(order, map(round, exact), strict=True))
    yield begin, len(shares), tops


def px(value: float) -> str:
    """Write a length with at most one digit after the point.

    >>> px(3.0), px(3.14)
    ('3', '3.1')
    """
    return f"{value:.1f}".removesuffix(".0")


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as a piece of path data."""
    return f"M{px(x)} {px(y)}h{px(width)}v{px(height)}h-{px(width)}z"


def path(kind: str, shape: str) -> str:
    """Return the <path> of all shapes of one kind."""
    if kind == "mark pair":
        return f'<path d="{shape}" fill="none" stroke="currentColor" stroke-width="1.5"/>'
    if kind == "mark second":
        return f'<path d="{shape}" stroke="#000" stroke-width="2.5" opacity=".45"/>'
    if kind == WAIT:
        return f'<path d="{shape}" fill="none" stroke="currentColor" stroke-dasharray="2" opacity=".5"/>'
    return f'<path d="{shape}" fill="{colour_named(kind).fill}"/>'
