"""The specification of a timeline drawing: small, exact JSON values.

Chapter: book/start/time.  In: one to three timelines.  Out: the dictionary that the element <dp-timeline> reads.
A simulated timeline is sent as its program and its costs, about 4 bytes per action, and the page computes the times.
Any other timeline is sent as its spans and messages (`Timeline.to_dict`), and is drawn without sliders.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dualpipe_lab.timeline import Span, Timeline
from dualpipe_lab.timeline.colours import check_colour_by
from dualpipe_lab.timeline.json_form import PER_PAIR

Spec = dict[str, Any]

MOST_TRACKS = 3
_OPTIONS = ("time", "selection", "colour_by", "memory", "streams", "activation_bytes")
_BANDS = ("none", "rank", "all")
_SHORTEST = 2**53  # whole numbers below are exact in JavaScript


def timeline_spec(timelines: Sequence[Timeline], options: Mapping[str, Any] | None = None) -> Spec:
    """Return the specification of a drawing of one to three timelines on one axis.

    `options`, all optional: the initial state.

        time, selection: the playhead, in the timelines' unit, and the action whose critical path is shown: "3F2".
        colour_by: "kind", "direction", "stage" or "microbatch".
        memory: memory bands of "none", of the chosen "rank", or of "all" ranks.
        streams: whether streams and messages are shown below the work; default: where a timeline has streams.
        activation_bytes: bytes of one stage's activations of a microbatch, a number or one per stage.

    Raises ValueError for no timeline, more than three, timelines in different units, or an unknown option.
    """
    if not 1 <= len(timelines) <= MOST_TRACKS:
        raise ValueError(f"one axis holds 1 to {MOST_TRACKS} timelines, got {len(timelines)}; draw the others apart")
    units = sorted({timeline.unit for timeline in timelines})
    if len(units) > 1:
        raise ValueError(
            f"timelines on one axis need one unit, got {' and '.join(units)}; simulate with costs in nanoseconds and "
            'unit="ns" to compare with a run'
        )
    given = dict(options or {})
    if unknown := set(given) - set(_OPTIONS):
        raise ValueError(f"a timeline has no option {sorted(unknown)[0]!r}; known are {', '.join(_OPTIONS)}")
    check_colour_by(given.get("colour_by", "kind"))
    if given.get("memory", "none") not in _BANDS:
        raise ValueError(f"memory bands are of {', '.join(_BANDS)}, got {given['memory']!r}")
    size = given.pop("activation_bytes", None)
    tracks = [track_spec(timeline) | ({} if size is None else {"activation_bytes": size}) for timeline in timelines]
    return {"tracks": tracks, **given}


def track_spec(timeline: Timeline) -> Spec:
    """Return one timeline as its program and costs if it has them, otherwise as its spans and messages."""
    costs = timeline.costs
    if costs is None or not _is_exact(costs):
        record = timeline.to_dict()
        return {key: record[key] for key in ("name", "source", "unit", "ranks", "messages")}
    if costs["overlap"] == PER_PAIR:
        pairs = [span for spans in timeline.spans_by_rank for span in spans if span.pair is not None]
        costs = {**costs, "overlap": [span.duration for span in pairs]}
    rows = [" ".join(_tokens(spans)) for spans in timeline.spans_by_rank]
    return {"name": timeline.name, "source": timeline.source, "unit": timeline.unit, "rows": rows, "costs": costs}


def _tokens(spans: Sequence[Span]) -> Iterator[str]:
    """Yield a rank's actions as text; an action on the stage of the previous action omits the stage."""
    here: int | None = None
    for span in spans:
        words = []
        for stage, kind, microbatch in span.actions:
            words.append(f"{'' if stage == here else stage}{kind}{microbatch}")
            here = stage
        yield f"({';'.join(words)})" if len(words) > 1 else words[0]


def _is_exact(costs: Mapping[str, Any]) -> bool:
    """Whether JavaScript can represent every cost exactly (a Fraction is text here)."""
    numbers = [number for value in costs.values() for number in (value if isinstance(value, list) else [value])]
    return all(number in (None, PER_PAIR) or (isinstance(number, int) and number < _SHORTEST) for number in numbers)
