"""Text drawing of a timeline: one row per rank, letter and microbatch in each cell, dots for idle time.

In: a timeline, a width in columns.  Out: lines of text.  Each further stream of a rank is a row below its work.
The width determines the scale: letter and microbatch (F3), the letter alone (F), or an overview in which each column
summarises a stretch of time.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import ceil, gcd, lcm
from typing import TypeAlias

from dualpipe_lab.timeline.data import TimelineData
from dualpipe_lab.timeline.spans import WAIT, WORK, ActionKey, Span, Time
from dualpipe_lab.timeline.units import axis_step, number, scale_of

IDLE = "."
LABELS, LETTERS, OVERVIEW = "labels", "letters", "overview"
_WORDS = {"F": "forward", "B": "backward", "I": "backward for the input", "W": "backward for the weights"}
_OTHER = {"compute": "c", WAIT: "~", "collective": "*"}
_MIN_COLUMNS = 20


def draw(timeline: TimelineData, width: int) -> str:
    """Return the drawing, at most `width` columns wide."""
    names = [(rank, name) for rank in range(timeline.num_ranks) for name in timeline.streams]
    labels = [f"rank {rank}" if name == WORK else f"  {name}" for rank, name in names]
    margin = max(map(len, labels), default=4) + 2
    available = max(width - margin, _MIN_COLUMNS)
    header = f"{timeline.name}: {timeline.num_ranks} ranks, {timeline.source}"
    if not timeline.makespan:
        return f"{header}\n(no time passes)"
    columns, scale = _scale(timeline, available)
    if scale != OVERVIEW:
        rows = [_row(timeline.stream(*name), columns / timeline.makespan, ceil(columns), scale) for name in names]
    else:
        rows = ["".join(map(symbol, buckets(timeline.stream(*name), timeline.makespan, columns))) for name in names]
    body = [(label.ljust(margin) + row).rstrip() for label, row in zip(labels, rows, strict=True)]
    return "\n".join([header, _axis(timeline, columns, margin), *body, *_legend(timeline, columns, scale)])


def second_stage(spans: tuple[Span, ...]) -> int | None:
    """Return the higher of a rank's two stages, which is written in lower case; None unless it has exactly two."""
    stages = {stage for span in spans for stage, _, _ in span.actions if not span.extra_label}
    return max(stages) if len(stages) == 2 else None


def cell_label(action: ActionKey, lower: int | None) -> str:
    """Return letter and microbatch of one action, in lower case on a rank's second stage."""
    stage, kind, microbatch = action
    return f"{kind.lower() if stage == lower else kind}{microbatch}"


def _scale(timeline: TimelineData, available: int) -> tuple[Fraction, str]:
    spans = [span for row in timeline.spans_by_rank for span in row if span.duration]
    times = {Fraction(time) for span in spans for time in (span.start, span.end)}
    grain = Fraction(gcd(*(time.numerator for time in times)), lcm(*(time.denominator for time in times)))
    ticks = timeline.makespan / grain
    if ticks > available:
        shortest = min((span.duration for span in spans if span.kind != WAIT), default=timeline.makespan)
        return Fraction(available), LETTERS if shortest * available >= timeline.makespan else OVERVIEW
    # Whole columns per tick: every cell of one length has the same width.
    most = int(available / ticks)
    needed = max(ceil(len(_longest(span)) * grain / span.duration) for span in spans)
    airy = max(ceil((len(_longest(span)) + 1) * grain / span.duration) for span in spans)
    return (ticks * min(airy, most), LABELS) if needed <= most else (ticks * min(most, 2), LETTERS)


def _longest(span: Span) -> str:
    letters = "&".join(cell_label(action, None) for action in span.actions) or _OTHER.get(span.kind, "o")
    return span.extra_label if span.stage is not None and span.extra_label else letters


def _row(spans: tuple[Span, ...], per_time: Fraction, columns: int, scale: str) -> str:
    lower = second_stage(spans)
    row = [IDLE] * columns
    for span in spans:
        start, end = round(span.start * per_time), round(span.end * per_time)
        if end > start:
            row[start:end] = _cell(span, lower, end - start, scale)
    return "".join(row)


def _cell(span: Span, lower: int | None, width: int, scale: str) -> str:
    labels = [span.extra_label or cell_label(action, lower) for action in span.actions]
    if span.stage is not None and span.extra_label and scale == LABELS:
        return span.extra_label.ljust(width)
    if not labels:
        return _OTHER.get(span.kind, "o") * width
    if scale == LABELS:
        return "&".join(labels).ljust(width)
    return ("&" if span.pair else labels[0][0]).ljust(width)


def _axis(timeline: TimelineData, columns: Fraction, margin: int) -> str:
    divisor, unit = scale_of(timeline.unit, timeline.makespan)
    span = Fraction(timeline.makespan) / divisor
    end = f"{number(span)} {unit}"
    step = axis_step(span, most=max(int(columns) // 8, 1))
    line = "time".ljust(margin)
    for k in range(int(span / step) + 1):
        place = margin + round(k * step * columns / span)
        text = number(k * step)
        if place + len(text) < margin + columns - len(number(span)):
            line = line.ljust(place) + text
    return line.ljust(margin + round(columns) - len(number(span))) + end


def _legend(timeline: TimelineData, columns: Fraction, scale: str) -> Iterator[str]:
    divisor, unit = scale_of(timeline.unit, timeline.makespan)
    idle = sum(timeline.bubble_time(rank) for rank in range(timeline.num_ranks))
    total = timeline.num_ranks * timeline.makespan
    numbers = [
        f"makespan {number(timeline.makespan, divisor)} {unit}",
        f"bubble {timeline.bubble_fraction:.1%} ({number(idle, divisor)} of {number(total, divisor)} idle)",
    ]
    if peak := max((timeline.peak_activations(rank) for rank in range(timeline.num_ranks)), default=0):
        numbers.append(f"peak activations {peak}")
    yield ", ".join(numbers)
    actions = {kind for spans in timeline.spans_by_rank for span in spans for _, kind, _ in span.actions}
    kinds = {span.kind for spans in timeline.spans_by_rank for span in spans}
    letters = [f"{kind} {word}" for kind, word in _WORDS.items() if kind in actions]
    if scale != OVERVIEW:
        letters += ["& an overlapped pair"] if "F&B" in kinds else []
        others = sorted(kinds - set(_WORDS) - {"F&B"})
        letters += [f"{_OTHER[kind]} {kind}" for kind in others if kind in _OTHER]
        letters += ["o " + "/".join(kind for kind in others if kind not in _OTHER)] if set(others) - set(_OTHER) else []
        letters.append(f"{IDLE} idle")
        if any(second_stage(spans) is not None for spans in timeline.spans_by_rank):
            letters.append("lower case: the rank's second stage")
    else:
        each = number(timeline.makespan / columns, divisor)
        letters += ["# mixed", "+ partly idle", f"{IDLE} mostly idle", f"one column = {each} {unit}"]
    yield ", ".join(letters)


# The overview

Shares: TypeAlias = dict[str, float]  # kind -> share of the stretch, 0 to 1

_PURE = 0.9  # of the work: a letter stands for (almost) one kind


def buckets(spans: Iterable[Span], makespan: Time, count: int | Fraction) -> list[Shares]:
    """Return the shares of kinds of work in `count` equal stretches; a pair counts half and half, waiting as idle."""
    num_buckets = int(count)
    shares: list[Shares] = [{} for _ in range(num_buckets)]
    per_time = float(num_buckets / Fraction(makespan))  # a picture: floating point is exact enough
    for span in spans:
        kinds = [kind for _, kind, _ in span.actions] or [span.kind]
        start, end = float(span.start) * per_time, float(span.end) * per_time
        for index in range(int(start), min(int(end) + 1, num_buckets)) if span.kind != WAIT else ():
            covered = min(end, index + 1) - max(start, index)
            for kind in kinds if covered > 0 else ():
                shares[index][kind] = shares[index].get(kind, 0.0) + covered / len(kinds)
    return shares


def symbol(shares: Shares) -> str:
    """Return one character for a stretch: a kind's letter, # for mixed work, + for partly and . for mostly idle."""
    busy = sum(shares.values())
    if busy < 1 / 8:
        return "."
    if busy < 7 / 8:
        return "+"
    kind = max(shares, key=lambda kind: shares[kind])
    return kind[0] if shares[kind] >= _PURE * busy else "#"
