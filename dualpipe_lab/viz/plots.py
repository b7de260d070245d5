"""Timelines for papers: matplotlib draws the same cells in the width of a column, as vectors or as a PNG.

Chapter: book/pp/gpipe.  In: one to three timelines.  Out: a matplotlib figure with one time axis.
Colours as on the page (Okabe and Ito 2008); idle time is hatched, an overlapped pair shares one border, lower case is a
rank's second stage.  Thin cells are summarised as shares of stretches of time, as in `Timeline.to_svg`.
"""

import io
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dualpipe_lab._optional import extra
from dualpipe_lab.timeline import Span, Timeline
from dualpipe_lab.timeline.colours import OTHER, PALETTE
from dualpipe_lab.timeline.gantt import buckets, cell_label, second_stage
from dualpipe_lab.timeline.spans import WAIT
from dualpipe_lab.timeline.svg import LEVELS, runs
from dualpipe_lab.timeline.units import number, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Bars: TypeAlias = defaultdict[tuple[str, float, float], list[tuple[float, float]]]  # kind, bottom, height -> stretches

_CELL = 0.8  # height of a cell; the distance of two rows is 1
_LETTER = 0.055  # inches, width of a letter at size 6
_LOWEST = 0.15  # inches, of a row whose cells have letters
_THINNEST = 0.02  # inches, of a cell that is drawn by itself
_BUCKET = 0.03  # inches, of a stretch that is summed up
_DPI = 150
_IDLE: dict[str, Any] = {"facecolor": "#f4f6f8", "edgecolor": "#d0d7de", "hatch": "////", "lw": 0}


def plot_timelines(*timelines: Timeline, width: float = 7.0) -> "Figure":
    """Draw timelines above each other on one time axis, as a matplotlib figure `width` inches wide.

    Save the figure with `figure.savefig("timeline.pdf")`.
    Raises ValueError for timelines in different units.
    """
    with extra("notebook", "a figure"):
        from matplotlib.figure import Figure

    if not timelines or len({timeline.unit for timeline in timelines}) > 1:
        raise ValueError(
            "a figure needs one or more timelines in one unit; simulate with unit='ns' to compare with a run"
        )
    heights = [0.6 + _row_height(timeline) * timeline.num_ranks for timeline in timelines]
    figure = Figure(figsize=(width, sum(heights) + 0.2), layout="constrained")
    grid = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)
    makespan = max(float(timeline.makespan) for timeline in timelines)
    for axes, timeline in zip(grid[:, 0], timelines, strict=True):
        draw_timeline(axes, timeline, inches_per_time=(width - 0.9) / (makespan or 1.0))
    grid[-1, 0].set_xlim(0, makespan or 1.0)
    divisor, unit = scale_of(timelines[0].unit, max(timeline.makespan for timeline in timelines))
    grid[-1, 0].set_xlabel(f"time ({unit})", fontsize=8)
    grid[-1, 0].xaxis.set_major_formatter(lambda value, _: f"{value / divisor:g}")
    _add_legend(figure, timelines)
    return figure


def timeline_png(timeline: Timeline, path: str | Path | None = None, width: int = 1280) -> bytes:
    """Draw one timeline as a PNG of `width` pixels; return its bytes, and write them to `path` if it is given."""
    stream = io.BytesIO()
    plot_timelines(timeline, width=width / _DPI).savefig(stream, format="png", dpi=_DPI)
    if path is not None:
        Path(path).write_bytes(stream.getvalue())
    return stream.getvalue()


def draw_timeline(axes: "Axes", timeline: Timeline, inches_per_time: float) -> None:
    """Draw a timeline into given axes; a cell has letters if they fit."""
    bars: Bars = defaultdict(list)
    lengths = [span.duration for spans in timeline.spans_by_rank for span in spans if span.duration]
    is_cells = float(min(lengths, default=1)) * inches_per_time >= _THINNEST
    room_per_time = inches_per_time if _row_height(timeline) >= _LOWEST else 0.0
    for rank in range(timeline.num_ranks):
        spans = timeline.stream(rank)
        axes.broken_barh([(0.0, float(timeline.makespan))], (rank - _CELL / 2, _CELL), **_IDLE)
        if is_cells:
            lower = second_stage(spans)
            for span in spans:
                _add_span(axes, span, lower, bars, room_per_time)
        elif lengths:
            _add_stretches(timeline, rank, bars, inches_per_time)
    for (kind, bottom, height), ranges in bars.items():
        colour, edge = PALETTE.get(kind, OTHER)[0], "white" if is_cells else "none"
        axes.broken_barh(ranges, (bottom, height), facecolor=colour, edgecolor=edge, lw=0.3, zorder=2)
    divisor, unit = scale_of(timeline.unit, timeline.makespan)
    numbers = f"{timeline.source}, {number(timeline.makespan, divisor)} {unit}, bubble {timeline.bubble_fraction:.1%}"
    axes.set_title(f"{timeline.name}: {numbers}", fontsize=8, loc="left")
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    named = range(0, timeline.num_ranks, max(round(0.12 / _row_height(timeline)), 1))
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.tick_params(labelsize=7, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _row_height(timeline: Timeline) -> float:
    """Return the height of a rank's row in inches, smaller for many ranks, so that the figure fits a page."""
    return 0.24 if timeline.num_ranks <= 16 else max(3.84 / timeline.num_ranks, 0.05)


def _add_span(axes: "Axes", span: Span, lower: int | None, bars: Bars, room_per_time: float) -> None:
    start, length = float(span.start), float(span.duration)
    if span.kind == WAIT or not length:
        return
    actions = span.actions
    share = _CELL / max(len(actions), 1)
    if not actions:
        bars[span.kind, span.rank - _CELL / 2, _CELL].append((start, length))
    for index, action in enumerate(actions):
        bottom = span.rank - _CELL / 2 + index * share
        bars[action[1], bottom, share].append((start, length))
        words = cell_label(action, lower)
        label = next((text for text in (words, words[0]) if len(text) * _LETTER <= length * room_per_time), "")
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6 if len(actions) == 1 else 5, "zorder": 4}
        if label:
            axes.text(start + length / 2, bottom + share / 2, label, color=PALETTE[action[1]][1], **style)
    if len(actions) > 1:
        box = [(start, length)]
        axes.broken_barh(box, (span.rank - _CELL / 2, _CELL), facecolor="none", edgecolor="#16202b", lw=0.8, zorder=3)


def _add_stretches(timeline: Timeline, rank: int, bars: Bars, inches_per_time: float) -> None:
    """Add the shares of stretches of time as bars, stacked from below."""
    count = max(int(float(timeline.makespan) * inches_per_time / _BUCKET), 1)
    step, unit = float(timeline.makespan) / count, _CELL / LEVELS
    for kind, start, end, low, high in runs(buckets(timeline.spans_by_rank[rank], timeline.makespan, count)):
        place = kind, rank + _CELL / 2 - high * unit, (high - low) * unit
        bars[place].append((start * step, (end - start) * step))


def _add_legend(figure: "Figure", timelines: tuple[Timeline, ...]) -> None:
    from matplotlib.patches import Patch

    spans = [span for timeline in timelines for row in timeline.spans_by_rank for span in row if span.kind != WAIT]
    kinds = {kind for span in spans for kind in ([kind for _, kind, _ in span.actions] or [span.kind])}
    known = [PALETTE[kind] for kind in PALETTE if kind in kinds] + ([OTHER] if kinds - set(PALETTE) else [])
    handles = [Patch(color=colour, label=words) for colour, _, words in known]
    if any(span.pair for span in spans):
        handles.append(Patch(facecolor="none", edgecolor="#16202b", label="an overlapped pair"))
    handles.append(Patch(**_IDLE, label="idle"))
    if any(second_stage(row) is not None for timeline in timelines for row in timeline.spans_by_rank):
        handles.append(Patch(alpha=0, label="lower case: the rank's second stage"))
    figure.legend(handles=handles, loc="outside lower left", ncols=6, fontsize=7, frameon=False, handlelength=1)
