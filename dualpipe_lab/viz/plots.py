"""Timelines for papers: the same cells drawn by matplotlib, as vectors, in the size of a column.

Chapter: book/pp/gpipe.  In: one to three timelines.  Out: a matplotlib figure with one time axis.
Colours as on the page (Okabe and Ito 2008); idle time is hatched, an overlapped pair shares one border.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from dualpipe_lab.timeline import Span, Timeline
from dualpipe_lab.timeline.spans import WAIT
from dualpipe_lab.timeline.svg_shapes import OTHER, PALETTE
from dualpipe_lab.timeline.units import number, scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL = 0.8  # height of a cell; the distance of two rows is 1
_LETTER = 0.055  # inches, width of a letter at size 6


def plot_timelines(*timelines: Timeline, width: float = 7.0, messages: bool = False) -> "Figure":
    """Draw one to three timelines above each other on one time axis, `width` inches wide.

    `messages`: draw them as arrows too.  Save the figure with `figure.savefig("timeline.pdf")`.
    Raises ValueError for timelines in different units.
    """
    from matplotlib.figure import Figure

    if not timelines or len({timeline.unit for timeline in timelines}) > 1:
        raise ValueError(
            "a figure needs one or more timelines in one unit; simulate with unit='ns' to compare with a run"
        )
    heights = [0.6 + 0.24 * timeline.num_ranks for timeline in timelines]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    grid = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)
    makespan = max(float(timeline.makespan) for timeline in timelines)
    for axes, timeline in zip(grid[:, 0], timelines, strict=True):
        draw_timeline(axes, timeline, inches_per_time=(width - 0.9) / (makespan or 1.0))
        if messages:
            _draw_messages(axes, timeline)
    grid[-1, 0].set_xlim(0, makespan)
    divisor, unit = scale_of(timelines[0].unit, max(timeline.makespan for timeline in timelines))
    grid[-1, 0].set_xlabel(f"time ({unit})", fontsize=8)
    grid[-1, 0].xaxis.set_major_formatter(lambda value, _: f"{value / divisor:g}")
    return figure


def draw_timeline(axes: "Axes", timeline: Timeline, inches_per_time: float) -> None:
    """Draw a timeline into axes of one's own; letters are drawn where a cell has room for them."""
    bars: defaultdict[tuple[str, float, float], list[tuple[float, float]]] = defaultdict(list)
    for rank, spans in enumerate(timeline.spans_by_rank):
        idle = [(0.0, float(timeline.makespan))]
        axes.broken_barh(idle, (rank - _CELL / 2, _CELL), facecolor="#f4f6f8", edgecolor="#d0d7de", hatch="////", lw=0)
        for span in spans:
            _add_span(axes, span, bars, inches_per_time)
    for (kind, bottom, height), ranges in bars.items():
        colour = PALETTE.get(kind, OTHER)[0]
        axes.broken_barh(ranges, (bottom, height), facecolor=colour, edgecolor="white", lw=0.3, zorder=2)
    divisor, unit = scale_of(timeline.unit, timeline.makespan)
    numbers = f"{timeline.source}, {number(timeline.makespan, divisor)} {unit}, bubble {timeline.bubble_fraction:.1%}"
    axes.set_title(f"{timeline.name}: {numbers}", fontsize=8, loc="left")
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.tick_params(labelsize=7, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _add_span(
    axes: "Axes",
    span: Span,
    bars: defaultdict[tuple[str, float, float], list[tuple[float, float]]],
    inches_per_time: float,
) -> None:
    start, length = float(span.start), float(span.duration)
    if span.kind == WAIT or not length:
        return
    parts = span.parts
    share = _CELL / max(len(parts), 1)
    if not parts:
        bars[span.kind, span.rank - _CELL / 2, _CELL].append((start, length))
    for index, (_, kind, microbatch) in enumerate(parts):
        bottom = span.rank - _CELL / 2 + index * share
        bars[kind, bottom, share].append((start, length))
        label = next(
            (text for text in (f"{kind}{microbatch}", kind) if len(text) * _LETTER <= length * inches_per_time), ""
        )
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6 if len(parts) == 1 else 5, "zorder": 4}
        axes.text(start + length / 2, bottom + share / 2, label, color=PALETTE[kind][1], **style)
    if len(parts) > 1:
        box = [(start, length)]
        axes.broken_barh(box, (span.rank - _CELL / 2, _CELL), facecolor="none", edgecolor="#16202b", lw=0.8, zorder=3)


def _draw_messages(axes: "Axes", timeline: Timeline) -> None:
    for message in timeline.messages:
        side = _CELL / 2 if message.dst > message.src else -_CELL / 2
        sent, arrived = (float(message.sent), message.src + side), (float(message.arrived), message.dst - side)
        arrow = {"arrowstyle": "->", "lw": 0.5, "color": "#586573", "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", arrived, sent, arrowprops=arrow, zorder=5)
