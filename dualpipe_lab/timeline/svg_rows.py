"""The rows of a timeline's SVG: its cells, or, where they would be too thin, shares of stretches of time."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dualpipe_lab.timeline.gantt import cell_label, second_stage
from dualpipe_lab.timeline.overview import Shares, buckets
from dualpipe_lab.timeline.spans import Span
from dualpipe_lab.timeline.svg_shapes import LEFT, OTHER, PALETTE, Frame, box, path, px

if TYPE_CHECKING:
    from dualpipe_lab.timeline.model import Timeline

LETTER = 6.4  # px, width of a letter at font size 11
_BUCKET = 3  # px
_LEVELS = 4  # heights of a summed stretch, so that neighbours are often equal and merge


def cells(timeline: "Timeline", frame: Frame) -> Iterator[str]:
    """Draw every span; all cells of one kind are one path."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    letters: defaultdict[str, list[str]] = defaultdict(list)
    for rank, spans in enumerate(timeline.spans_by_rank):
        lower = second_stage(spans)
        for span in spans:
            for kind, shape, letter in _cell(span, lower, frame.top(rank), frame):
                paths[kind].append(shape)
                letters[kind].append(letter)
    # The borders of pairs and the bars under a rank's second stage lie above all cells.
    for kind in sorted(paths, key=lambda kind: kind.startswith("mark ")):
        yield path(kind, "".join(paths[kind]))
    for kind, texts in letters.items():
        if any(texts):
            yield f'<g fill="{PALETTE.get(kind, OTHER)[1]}" text-anchor="middle" font-size="11">{"".join(texts)}</g>'


def _cell(span: Span, lower: int | None, top: float, frame: Frame) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, shape, letter) of everything that one span draws."""
    x, width = LEFT + float(span.start) * frame.per_time, float(span.duration) * frame.per_time
    gap = min(0.5, width / 8)
    x, width, y, height = x + gap, width - 2 * gap, top + 2, frame.row - 4
    if not width:
        return
    parts = span.parts
    if not parts:
        yield span.kind, box(x, y, width, height), ""
    share = height / max(len(parts), 1)
    for index, part in enumerate(parts):
        base = y + index * share
        yield part[1], box(x, base, width, share), _text(cell_label(part, lower), x, base, width, share)
        if part[0] == lower:
            yield "mark second", box(x, base + share - 2.5, width, 2.5), ""
    if len(parts) > 1:
        yield "mark pair", box(x, y, width, height), ""


def _text(label: str, x: float, y: float, width: float, height: float) -> str:
    if len(label) * LETTER > width:
        label = label[0]  # the letter alone
    if len(label) * LETTER > width + 1 or height < 10:
        return ""
    return f'<text x="{px(x + width / 2)}" y="{px(y + height / 2 + 3.6)}">{label}</text>'


def stretches(timeline: "Timeline", frame: Frame) -> Iterator[str]:
    """Draw for each stretch of a few pixels how much of it is which work, stacked; equal neighbours merge."""
    count = int(frame.plot / _BUCKET)
    step = frame.plot / count
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for rank, spans in enumerate(timeline.spans_by_rank):
        gap = min(2.0, frame.row / 6)
        unit = (frame.row - 2 * gap) / _LEVELS
        bottom = frame.top(rank) + frame.row - gap
        levels = [_levels(shares) for shares in buckets(spans, timeline.makespan, count)]
        starts = [i for i in range(count) if i == 0 or levels[i] != levels[i - 1]]
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            y = bottom
            for kind, level in levels[start]:
                y -= level * unit
                paths[kind].append(box(LEFT + start * step, y, (end - start) * step, level * unit))
    for kind, shapes in paths.items():
        yield path(kind, "".join(shapes))


def _levels(shares: Shares) -> tuple[tuple[str, int], ...]:
    """Round the shares to whole levels, so that together they are as high as the busy share."""
    found, reached, total = [], 0, 0.0
    for kind in sorted(shares, key=list(PALETTE).index if shares.keys() <= PALETTE.keys() else None):
        total += shares[kind]
        level = round(total * _LEVELS) - reached
        reached += level
        if level:
            found.append((kind, level))
    return tuple(found)
