"""A timeline as a Chrome trace for ui.perfetto.dev: spans, messages as arrows, live activations as counters.

In: a timeline.  Out: JSON text.  Times of a trace are microseconds; one tick is written as one microsecond.
Spans of modules stand on the thread of the work, where they nest within its actions.
Source: "Trace Event Format", phases X (complete), s and f (flow), C (counter) and M (metadata).
"""

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, TypeAlias

from dualpipe_lab.timeline.data import TimelineData
from dualpipe_lab.timeline.spans import Span, Time, feeds

Event: TypeAlias = dict[str, Any]
Ends: TypeAlias = dict[tuple[int, str], Span]  # (rank, label of a message) -> the span at that end

_SLIVER = Fraction(1, 1000)


def to_perfetto(timeline: TimelineData) -> str:
    """Return the JSON text of the trace."""
    per_us = 1000 if timeline.unit == "ns" else 1
    events = [*_names(timeline), *_spans(timeline, per_us), *_flows(timeline, per_us), *_counters(timeline, per_us)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _names(timeline: TimelineData) -> Iterator[Event]:
    for rank in range(timeline.num_ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for stream, name in enumerate([timeline.name, *timeline.streams[1:]]):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": stream, "args": {"name": name}}


def _spans(timeline: TimelineData, per_us: int) -> Iterator[Event]:
    for rank, spans in enumerate(timeline.spans_by_rank):
        for span in spans:
            yield {
                "ph": "X",
                "name": span.label or span.kind,
                "cat": span.kind,
                "pid": rank,
                "tid": timeline.streams.index(span.stream),
                "ts": _us(span.start, per_us),
                "dur": _us(span.duration, per_us),
                "args": {"stage": span.stage, "microbatch": span.microbatch},
            }


def _flows(timeline: TimelineData, per_us: int) -> Iterator[Event]:
    maker, user = _ends(timeline)
    for number, message in enumerate(timeline.messages):
        common = {"cat": "message", "name": message.label or "message", "id": number, "tid": 0}
        source = maker.get((message.src, message.label))
        target = user.get((message.dst, message.label))
        # An arrow hangs on the span that encloses its time, so it leaves just before the end of the span that made it.
        sent = _us(message.sent, per_us) if source is None else _us(source.end - source.duration * _SLIVER, per_us)
        arrived = _us(message.arrived if target is None else target.start, per_us)
        yield {**common, "ph": "s", "pid": message.src, "ts": sent, "args": {"num_bytes": message.num_bytes}}
        yield {**common, "ph": "f", "bp": "e", "pid": message.dst, "ts": arrived}


def _ends(timeline: TimelineData) -> tuple[Ends, Ends]:
    maker: Ends = {}
    user: Ends = {}
    for rank, spans in enumerate(timeline.spans_by_rank):
        for span in spans:
            for stage, kind, microbatch in span.actions:
                maker[rank, f"{stage}{kind}{microbatch}"] = span
                user.update({(rank, label): span for label in feeds((stage, kind, microbatch))})
    return maker, user


def _counters(timeline: TimelineData, per_us: int) -> Iterator[Event]:
    for rank in range(timeline.num_ranks):
        for name, key, peak, steps in (
            ("live activations", "activations", timeline.peak_activations, timeline.live_activations),
            ("pending weight gradients", "due", timeline.peak_pending_weight_grads, timeline.pending_weight_grads),
        ):
            for time, count in steps(rank) if peak(rank) else ():
                yield {"ph": "C", "name": name, "pid": rank, "ts": _us(time, per_us), "args": {key: count}}


def _us(time: Time, per_us: int) -> int | float:
    value = Fraction(time) / per_us
    return value.numerator if value.denominator == 1 else float(value)
