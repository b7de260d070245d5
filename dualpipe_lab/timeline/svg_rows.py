"""The rows of a timeline's SVG: its cells, or, where they would be too thin, shares of stretches of time."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from dualpipe_lab.timeline.gantt import cell_label, second_stage
from dualpipe_lab.timeline.overview import Shares, buckets
from dualpipe_lab.timeline.spans import Span
from dualpipe_lab.timeline.svg_shapes import FONT, LEFT, LETTER, OTHER, PALETTE, Frame, box, path, px

if TYPE_CHECKING:
    from dualpipe_lab.timeline.model import Timeline

_BUCKET = 4  # px
LEVELS = 4  # heights of a summed stretch
_STICKY = 0.7  # levels


class Label(NamedTuple):
    """What stands in a cell, and where its middle is."""

    text: str
    x: str
    y: str


def cells(timeline: "Timeline", frame: Frame) -> Iterator[str]:
    """Draw every span; all cells of one kind are one path."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    labels: defaultdict[str, list[Label]] = defaultdict(list)
    for rank, spans in enumerate(timeline.spans_by_rank):
        lower = second_stage(spans)
        for span in spans:
            for kind, shape, label in _cell(span, lower, frame.top(rank), frame):
                paths[kind].append(shape)
                labels[kind] += label
    # The borders of pairs and the bars under a rank's second stage lie above all cells.
    for kind in sorted(paths, key=lambda kind: kind.startswith("mark ")):
        yield path(kind, "".join(paths[kind]))
    for kind, found in labels.items():
        if found:
            fill, size = PALETTE.get(kind, OTHER)[1], px(frame.font)
            yield f'<g fill="{fill}" text-anchor="middle" font-size="{size}">{"".join(_texts(found))}</g>'


def _texts(labels: list[Label]) -> Iterator[str]:
    """Write labels; letters alone on one line are one <text> with a list of places, a fifth of the size."""
    lines: defaultdict[str, list[Label]] = defaultdict(list)
    for label in labels:
        if len(label.text) == 1:
            lines[label.y].append(label)
        else:
            yield f'<text x="{label.x}" y="{label.y}">{label.text}</text>'
    for y, line in lines.items():
        places = " ".join(label.x for label in line)
        yield f'<text y="{y}" x="{places}">{"".join(label.text for label in line)}</text>'


def _cell(span: Span, lower: int | None, top: float, frame: Frame) -> Iterator[tuple[str, str, list[Label]]]:
    """Yield (kind, shape, label if there is one) of everything that one span draws."""
    x, width = LEFT + float(span.start) * frame.per_time, float(span.duration) * frame.per_time
    gap = min(0.5, width / 8)
    x, width, y, height = x + gap, width - 2 * gap, top + 2, frame.row - 4
    if not width:
        return
    parts = span.parts
    if not parts:
        yield span.kind, box(x, y, width, height), []
    share = height / max(len(parts), 1)
    for index, part in enumerate(parts):
        base = y + index * share
        yield part[1], box(x, base, width, share), _label(cell_label(part, lower), x, base, width, share, frame.font)
        if part[0] == lower:
            yield "mark second", f"M{px(x)} {px(base + share - 1.25)}h{px(width)}", []
    if len(parts) > 1:
        yield "mark pair", box(x, y, width, height), []


def _label(label: str, x: float, y: float, width: float, height: float, font: float) -> list[Label]:
    letter = LETTER * font / FONT
    if len(label) * letter > width + 0.5:
        label = label[0]  # the letter alone
    if letter > width or height < 10:
        return []
    return [Label(label, px(x + width / 2), px(y + height / 2 + 0.33 * font))]


def stretches(timeline: "Timeline", frame: Frame) -> Iterator[str]:
    """Draw for each stretch of a few pixels how much of it is which work, stacked; similar neighbours merge."""
    count = int(frame.plot / _BUCKET)
    step = frame.plot / count
    gap = min(2.0, frame.row / 6)
    unit = (frame.row - 2 * gap) / LEVELS
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for rank, spans in enumerate(timeline.spans_by_rank):
        bottom = frame.top(rank) + frame.row - gap
        for start, end, tops in runs(buckets(spans, timeline.makespan, count)):
            x, reached = LEFT + start * step, 0
            for kind, top in tops.items():
                if top > reached:
                    paths[kind].append(box(x, bottom - top * unit, (end - start) * step, (top - reached) * unit))
                    reached = top
    for kind, shapes in paths.items():
        yield path(kind, "".join(shapes))


def runs(shares: list[Shares]) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Yield (first, end, the level up to which each kind reaches, 0 to LEVELS) of stretches that look alike.

    A run goes on while the exact levels stay near its own: else the steady state of 1F1B, whose stretches hold now one
    forward more, now one less, would fall into thousands of pieces.
    """
    order = sorted({kind for share in shares for kind in share}, key=lambda kind: [*PALETTE, kind].index(kind))
    begin, tops = 0, dict.fromkeys(order, 0)
    for index, share in enumerate(shares):
        exact = list(accumulate(share.get(kind, 0.0) * LEVELS for kind in order))
        if any(abs(value - top) > _STICKY for value, top in zip(exact, tops.values(), strict=True)):
            yield begin, index, tops
            begin, tops = index, dict(zip(order, map(round, exact), strict=True))
    yield begin, len(shares), tops
