"""Static SVG drawing of a timeline, without script, fonts or ids: pages and images can hold it.

In: a timeline, a width in px.  Out: one SVG element.
All cells of one kind are one <path>, so that the file is small.  Text and lines have the page's text colour
(currentColor).  Cells have a letter and a colour that colour-blind readers distinguish (Okabe and Ito 2008).  A pair
has one border, with its forward above its backward.  Cells below 3 px are drawn as shares of stretches of time.  Other
streams of a rank, such as its communication (book/ep/one-f-one-b-basic), are lanes below its work.  A message occupies
that of its sender from the time its link is free to its arrival.  Spans of one stream that overlap stand in several
lines, each in the first that is free.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from html import escape
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from dualpipe_lab.timeline.colours import PALETTE, ColourBy, Colouring, colour_named
from dualpipe_lab.timeline.data import TimelineData
from dualpipe_lab.timeline.gantt import Shares, buckets, cell_label, second_stage
from dualpipe_lab.timeline.scene import NOTE, Axis, px, shape, svg, text
from dualpipe_lab.timeline.spans import COMMUNICATION, WAIT, WORK, ActionKey, Message, Span, Time
from dualpipe_lab.timeline.units import number, scale_of

LEFT, RIGHT, TOP, BOTTOM = 62, 96, 44, 50  # px around the rows
FONT, SMALLEST_FONT = 11.0, 9.0  # px, of the letters in the cells
LETTER = 6.4  # px, width of a letter of that font
_MIN_CELL = 3  # px: thinner cells are summed up
_BUCKET = 4  # px
LEVELS = 4  # heights of a summed stretch
_STICKY = 0.7  # levels
_LANE = 0.6  # of the height of a row
_MOST_WORDS = 8  # in the legend
_MOST_LINES = 4  # of one stream; more that overlap share the last ones
_ACTION = re.compile(r"(\d+)[FBIW](\d+)")
_START = attrgetter("start")
_STYLES: dict[str, dict[str, Any]] = {  # of what has no colour of its own
    "mark pair": {"fill": "none", "stroke": "currentColor", "stroke_width": 1.5},
    "mark second": {"stroke": "#000", "stroke_width": 2.5, "opacity": ".45"},
    WAIT: {"fill": "none", "stroke": "currentColor", "stroke_dasharray": "2", "opacity": ".5"},
}

Label: TypeAlias = tuple[str, str, str]  # the text of a cell, and its centre
Piece: TypeAlias = tuple[str, str, list[Label]]  # the name of its colour, its shape, and its label or none
Lines: TypeAlias = list[list[Span]]  # lines of one stream; spans of one line do not overlap


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
    colouring, below = Colouring(timeline, colour_by), stream_lines(timeline, messages)
    frame = _frame(timeline, max(width, 400), _heights(below))
    spans = [span for row in timeline.spans_by_rank for span in row if span.duration]
    shortest = min((float(span.duration) for span in spans if span.kind != WAIT), default=1.0)
    is_cells = shortest * frame.per_time >= _MIN_CELL
    picture = cells(timeline, frame, colouring, below) if is_cells else stretches(timeline, frame)
    title = f"Timeline of {timeline.name}: {timeline.num_ranks} ranks"
    legend = _legend(timeline, frame, colouring if is_cells else None, messages)
    body = [*_scaffold(timeline, frame), *picture, *legend]
    return svg(frame.width, frame.height, title, body, _description(timeline), scales=False)


def _frame(timeline: TimelineData, width: int, num_lines: dict[str, int]) -> Geometry:
    available = width - LEFT - RIGHT
    spans = [span for row in timeline.spans_by_rank for span in row if span.duration]
    # Wide enough for the longest label of each cell, but not wider than available; then the letters shrink a little.
    wanted = max((_label_width(span) / float(span.duration) for span in spans), default=1.0)
    makespan = float(timeline.makespan) or 1.0
    plot = max(min(available, wanted * makespan), 280)
    row = 28.0 if timeline.num_ranks <= 16 else max(448 / timeline.num_ranks, 6.0)
    font = min(max(FONT * plot / (wanted * makespan), SMALLEST_FONT), FONT)
    lanes = tuple((name, row * _LANE * lines) for name, lines in num_lines.items())
    frame = Geometry(LEFT + plot + RIGHT, 0, row, plot / makespan, font, lanes)
    return frame._replace(height=TOP + frame.pitch * timeline.num_ranks + BOTTOM)


def _label_width(span: Span) -> float:
    letters = max((len(text_of(span, action, None)) for action in span.actions), default=len(span.label) or 1)
    return letters * LETTER + (8 if span.extra_label else 4)


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
    divisor, unit = scale_of(timeline.unit, timeline.makespan)
    facts = f" {number(timeline.makespan, divisor)} {unit}, bubble {timeline.bubble_fraction:.1%}"
    yield shape("text", shape("tspan", escape(timeline.name), font_weight=600) + escape(facts), x=4, y=15)
    bottom = px(frame.top(timeline.num_ranks))
    axis = Axis(0, Fraction(timeline.makespan) / divisor, LEFT, LEFT + frame.plot)
    ticks = axis.ticks(max(int(frame.plot / 60), 1)) if axis.high else []
    numbers = "".join(text(axis.at(tick), 36, number(tick)) for tick in ticks)
    yield shape("g", numbers, font_size=11, text_anchor="middle", opacity=".75")
    lines = "".join(f"M{px(axis.at(tick))} 39V{bottom}" for tick in ticks)
    yield shape("path", d=lines, stroke="currentColor", opacity=".2")
    gap = min(2.0, frame.row / 6)
    tracks = "".join(box(LEFT, frame.top(r) + gap, frame.plot, frame.row - 2 * gap) for r in range(timeline.num_ranks))
    yield shape("path", d=tracks, opacity=".08")
    hatching = "".join(_hatching(frame.top(rank) + frame.row / 2, frame) for rank in range(timeline.num_ranks))
    thick = frame.row - 2 * gap
    yield shape("g", hatching, stroke="currentColor", stroke_width=thick, stroke_dasharray="1 5", opacity=".2")
    every = max(round(14 / frame.pitch), 1)  # thin rows: name only every few ranks
    if frame.lanes and every == 1:
        yield from _lane_names(timeline.num_ranks, frame)
    for rank in range(0, timeline.num_ranks, every):
        y = frame.top(rank) + frame.row / 2 + 4
        yield text(LEFT - 6, y, f"rank {rank}", text_anchor="end")
        yield text(frame.width - RIGHT + 6, y, f"idle {number(timeline.bubble_time(rank), divisor)} {unit}", **NOTE)


def _hatching(middle: float, frame: Geometry) -> str:
    """Return the hatch of idle time in one row: a leaning, dashed line as thick as the row (a pattern has an id)."""
    lean = frame.row / 2
    line = f"M{px(LEFT + lean)} 0h{px(frame.plot - 2 * lean)}"
    return shape("path", transform=f"translate(0 {px(middle)}) skewX(-45)", d=line)


def _lane_names(num_ranks: int, frame: Geometry) -> Iterator[str]:
    for rank in range(num_ranks):
        y = frame.top(rank) + frame.row
        for name, height in frame.lanes:
            short = name if len(name) < 9 else f"{name[:4]}."
            yield text(LEFT - 6, y + height / 2 + 2, short, text_anchor="end", font_size=10, opacity=".75")
            y += height


def _legend(timeline: TimelineData, frame: Geometry, colouring: Colouring | None, messages: bool) -> Iterator[str]:
    is_cells = colouring is not None
    names = list(dict.fromkeys((colouring or Colouring(timeline)).names(timeline)))
    if is_cells and messages and any(not _ACTION.fullmatch(message.label) for message in timeline.messages):
        names.append("message")
    x, y = float(LEFT), frame.height - 28
    for name in names[:_MOST_WORDS]:
        word = colour_named(name).words
        yield path(name, box(x, y - 10, 12, 12)) + text(x + 16, y, word, font_size=11)
        x += 28 + len(word) * 6.2
    if len(names) > _MOST_WORDS:
        yield text(x, y, "and so on, the colours repeat", font_size=11)
    has_pairs = any(span.pair for spans in timeline.spans_by_rank for span in spans)
    notes = ["framed: an overlapped pair"] if is_cells and has_pairs else []
    if is_cells and any(second_stage(row) is not None for row in timeline.spans_by_rank):
        notes.append("lower case, dark bar: the rank's second stage")
    if not is_cells:
        notes.append("heights: shares of a stretch of time")
    notes.append("hatched: idle")
    yield text(LEFT, y + 16, "; ".join(notes), font_size=11)


def cells(
    timeline: TimelineData, frame: Geometry, colouring: Colouring, below: list[dict[str, Lines]]
) -> Iterator[str]:
    """Yield the cells of all spans; all cells of one kind are one path."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    labels: defaultdict[str, list[Label]] = defaultdict(list)
    for rank, streams in enumerate(below):
        for name, data, label in _pieces(timeline, rank, frame, colouring, streams):
            paths[name].append(data)
            labels[name] += label
    # The borders of pairs and the bars under a rank's second stage lie above all cells.
    for kind in sorted(paths, key=lambda kind: kind.startswith("mark ")):
        yield path(kind, "".join(paths[kind]))
    for kind, found in labels.items():
        if found:
            ink, size = colour_named(kind).ink, frame.font
            yield shape("g", "".join(_texts(found)), fill=ink, text_anchor="middle", font_size=size)


def _pieces(
    timeline: TimelineData, rank: int, frame: Geometry, colouring: Colouring, streams: dict[str, Lines]
) -> Iterator[Piece]:
    """Yield what one rank shows: the cells of its work, and below them the bars of its other streams."""
    lower, y = second_stage(timeline.spans_by_rank[rank]), frame.top(rank)
    for span in timeline.stream(rank):
        yield from _cell(span, lower, y, frame, colouring)
    y += frame.row
    for stream, height in frame.lanes:
        line_height = height / max(len(streams[stream]), 1)
        for index, line in enumerate(streams[stream]):
            yield from (_bar(span, y + index * line_height, line_height, frame, colouring) for span in line)
        y += height


def _texts(labels: list[Label]) -> Iterator[str]:
    """Yield the labels; single letters of one row are one <text> with a list of positions, a fifth of the size."""
    lines: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for words, x, y in labels:
        if len(words) == 1:
            lines[y].append((words, x))
        else:
            yield text(x, y, words)
    for y, line in lines.items():
        yield text(" ".join(x for _, x in line), y, "".join(letter for letter, _ in line))


def text_of(span: Span, action: ActionKey, lower: int | None, by: str = "kind") -> str:
    """Return the text of a cell: its label if that is not the action's own, else letter and microbatch."""
    stage, kind, microbatch = action
    return span.extra_label or (f"{stage}{kind}{microbatch}" if by == "stage" else cell_label(action, lower))


def _cell(span: Span, lower: int | None, top: float, frame: Geometry, colouring: Colouring) -> Iterator[Piece]:
    """Yield every shape of one span."""
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
        # a narrow cell says what its colour does not, or the number of its colour
        short = {"stage": str(action[0]), "microbatch": str(action[2])}.get(colouring.by, action[1])
        words = text_of(span, action, lower, colouring.by)
        yield name, box(x, base, width, share), _label(words, short, x, base, width, share, frame.font)
        if action[0] == lower and not span.extra_label:
            yield "mark second", f"M{px(x)} {px(base + share - 1.25)}h{px(width)}", []
        if name == "direction 1":
            yield "mark second", f"M{px(x)} {px(base + 1.25)}h{px(width)}", []
    if len(actions) > 1:
        yield "mark pair", box(x, y, width, height), []


def _extent(span: Span, frame: Geometry) -> tuple[float, float]:
    x, width = LEFT + float(span.start) * frame.per_time, float(span.duration) * frame.per_time
    gap = min(0.5, width / 8)
    return x + gap, width - 2 * gap


def _bar(span: Span, top: float, height: float, frame: Geometry, colouring: Colouring) -> Piece:
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
    return [(label, px(x + width / 2), px(y + height / 2 + 0.33 * font))]


def stretches(timeline: TimelineData, frame: Geometry) -> Iterator[str]:
    """Yield the shares of each stretch of a few pixels as stacked boxes; similar neighbours are merged."""
    count = int(frame.plot / _BUCKET)
    step = frame.plot / count
    gap = min(2.0, frame.row / 6)
    unit = (frame.row - 2 * gap) / LEVELS
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for rank in range(timeline.num_ranks):
        bottom = frame.top(rank) + frame.row - gap
        for kind, start, end, low, high in runs(buckets(timeline.stream(rank), timeline.makespan, count)):
            place = LEFT + start * step, bottom - high * unit
            paths[kind].append(box(*place, (end - start) * step, (high - low) * unit))
    for kind, shapes in paths.items():
        yield path(kind, "".join(shapes))


def runs(shares: list[Shares]) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield (kind, first, end, its lower and upper level, 0 to LEVELS) of similar neighbouring stretches.

    A run continues while the exact levels are near its own.  Otherwise the steady phase of 1F1B, whose stretches differ
    by one forward, would become thousands of pieces.
    """
    order = sorted({kind for share in shares for kind in share}, key=lambda kind: [*PALETTE, kind].index(kind))
    begin, tops = 0, [0] * len(order)
    for index, share in enumerate([*shares, None]):
        exact = list(accumulate((share or {}).get(kind, 0.0) * LEVELS for kind in order))
        if share is None or any(abs(value - top) > _STICKY for value, top in zip(exact, tops, strict=True)):
            for kind, low, high in zip(order, [0, *tops], tops, strict=False):
                if high > low:
                    yield kind, begin, index, low, high
            begin, tops = index, list(map(round, exact))


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as a piece of path data."""
    return f"M{px(x)} {px(y)}h{px(width)}v{px(height)}h-{px(width)}z"


def path(kind: str, data: str) -> str:
    """Return the <path> of all shapes of one kind."""
    style = _STYLES.get(kind) or {"fill": colour_named(kind).fill}
    return shape("path", d=data, **style)


# The streams beside the work


def message_spans(messages: Iterable[Message], num_ranks: int) -> list[list[Span]]:
    """Return by rank the messages that it sends, as spans; messages that take no time are left out."""
    rows: list[list[Span]] = [[] for _ in range(num_ranks)]
    for message in messages:
        start = message.sent if message.left is None else message.left
        action = _ACTION.fullmatch(message.label)
        stage, microbatch = map(int, action.groups()) if action else (None, None)
        if message.arrived > start:
            place = message.src, start, message.arrived, "message", stage, microbatch
            rows[message.src].append(Span(*place, message.label or f"to rank {message.dst}", stream=COMMUNICATION))
    return [sorted(row, key=_START) for row in rows]


def lines_of(spans: Iterable[Span]) -> Lines:
    """Divide spans, in the order of their starts, into lines of spans that do not overlap."""
    lines: Lines = []
    ends: list[Time] = []
    for span in spans:
        line = next((i for i, end in enumerate(ends) if end <= span.start), len(ends))
        if line == _MOST_LINES:
            line = min(range(_MOST_LINES), key=ends.__getitem__)
        if line == len(ends):
            lines.append([])
            ends.append(span.end)
        lines[line].append(span)
        ends[line] = span.end
    return lines


def stream_lines(timeline: TimelineData, with_messages: bool = False) -> list[dict[str, Lines]]:
    """Return by rank the lines of each stream but "work"; `with_messages` adds messages to the communication."""
    sent = message_spans(timeline.messages, timeline.num_ranks) if with_messages else [[]] * timeline.num_ranks
    names = [name for name in timeline.streams if name != WORK]
    if any(sent) and COMMUNICATION not in names:
        names.append(COMMUNICATION)
    return [
        {name: lines_of(_merged(timeline.stream(rank, name), sent[rank], name)) for name in names}
        for rank in range(timeline.num_ranks)
    ]


def _merged(spans: Sequence[Span], sent: list[Span], name: str) -> list[Span]:
    return sorted([*spans, *sent], key=_START) if name == COMMUNICATION else list(spans)


def _heights(ranks: list[dict[str, Lines]]) -> dict[str, int]:
    """Return the number of lines of each stream, the same on all ranks."""
    return {name: max(1, *(len(streams[name]) for streams in ranks)) for name in (ranks[0] if ranks else ())}
