"""The `Timeline`: one type for simulated, virtual and measured runs.

Chapter: book/start/time.  In: spans per rank and messages.  Out: numbers (makespan, bubble, live activations, critical
path), pictures (text, SVG) and exports (dictionary, Perfetto).

  bubble_time(rank)   makespan - busy_time(rank)
  bubble_fraction     sum of bubble times / (num_ranks * makespan)    idle over makespan, not over useful work
  local_bubble(rank)  last end - first start - busy_time(rank)        the zero-bubble papers' bubble
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dualpipe_lab.timeline import gantt, holdings, path, perfetto
from dualpipe_lab.timeline import json_form as exchange
from dualpipe_lab.timeline.drawing import draw_svg
from dualpipe_lab.timeline.spans import WAIT, Message, Span, Time
from dualpipe_lab.timeline.steps import cut_steps, cut_time

if TYPE_CHECKING:
    from dualpipe_lab.viz.widget import TimelineWidget

Source: TypeAlias = Literal["simulated", "virtual", "measured"]
Unit: TypeAlias = Literal["ticks", "ns"]


class Timeline:
    """What each rank did when; immutable, comparable, printable.

    Spans of kind "wait" count as idle, everything else as busy.  Times start at 0, in `unit`.  Two timelines are equal
    when their spans and messages are: name, source, costs and the bytes of messages do not matter, so that a run on the
    virtual clock can be compared with its simulation.

    `costs`: what a simulation was made with (`Cost.to_dict`), so that a page can compute it again with other costs.

    >>> timeline = Timeline("two ranks", [[Span(0, 0, 1, "F", 0, 0, "0F0")], [Span(1, 1, 2, "F", 1, 0, "1F0")]])
    >>> timeline.makespan, timeline.bubble_time(1), timeline.bubble_fraction
    (2, 1, 0.5)
    """

    def __init__(
        self,
        name: str,
        spans_by_rank: Iterable[Iterable[Span]],
        messages: Iterable[Message] = (),
        source: Source = "simulated",
        unit: Unit = "ticks",
        costs: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.spans_by_rank = tuple(tuple(sorted(spans, key=itemgetter(1))) for spans in spans_by_rank)
        self.messages = tuple(messages)
        self.source: Source = source
        self.unit: Unit = unit
        self.costs = costs

    @property
    def num_ranks(self) -> int:
        """The number of ranks, working or not."""
        return len(self.spans_by_rank)

    @cached_property
    def makespan(self) -> Time:
        """The time from 0 to the end of the last span."""
        return max((span.end for spans in self.spans_by_rank for span in spans), default=0)

    @cached_property
    def _busy(self) -> tuple[Time, ...]:
        return tuple(_covered(span for span in spans if span.kind != WAIT) for spans in self.spans_by_rank)

    def busy_time(self, rank: int) -> Time:
        """Return how long a rank worked; spans that cover each other count once."""
        return self._busy[rank]

    def bubble_time(self, rank: int) -> Time:
        """Return how long a rank was idle between time 0 and the makespan."""
        return self.makespan - self.busy_time(rank)

    @property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time, 0 to 1: idle / (num_ranks * makespan)."""
        total = self.num_ranks * self.makespan
        return float(Fraction(total - sum(self._busy)) / total) if total else 0.0

    def window(self, rank: int) -> tuple[Time, Time]:
        """Return when a rank first began and last ended to work; (0, 0) if it never worked."""
        work = [span for span in self.spans_by_rank[rank] if span.kind != WAIT]
        return (work[0].start, max(span.end for span in work)) if work else (0, 0)

    def local_bubble(self, rank: int) -> Time:
        """Return the idle time inside a rank's window: what the zero-bubble papers count.

        It leaves out the wait for the first input and the wait for the last rank to end, which `bubble_time` includes
        and which only a step without a barrier can fill (see `dualpipe_lab.pp.repeat`).
        """
        first, last = self.window(rank)
        return last - first - self.busy_time(rank)

    def live_activations(self, rank: int) -> list[tuple[Time, int]]:
        """Return the number of held activations as a step function [(time, count)], starting at time 0.

        An activation of one stage and microbatch is held from the start of its F to the end of its B, or of its W
        where the backward is split: W still needs it.  The count holds until the next entry's time.
        """
        return holdings.step_function(self.spans_by_rank[rank], holdings.ACTIVATIONS)

    def peak_activations(self, rank: int) -> int:
        """Return the largest number of activations that a rank holds at once."""
        return holdings.peak(self.spans_by_rank[rank], holdings.ACTIVATIONS)

    def pending_weight_grads(self, rank: int) -> list[tuple[Time, int]]:
        """Return the number of weight gradients that are due, [(time, count)]: their I has ended, their W has not.

        Each holds the input and the output gradient of its microbatch.  A whole backward leaves none.
        """
        return holdings.step_function(self.spans_by_rank[rank], holdings.PENDING_WEIGHT_GRADS)

    def peak_pending_weight_grads(self, rank: int) -> int:
        """Return the largest number of weight gradients that are due at once on a rank."""
        return holdings.peak(self.spans_by_rank[rank], holdings.PENDING_WEIGHT_GRADS)

    def critical_path(self) -> list[Span]:
        """Return spans from time 0 to the makespan, each started by the end of the one before it or its message.

        Shortening anything outside this list does not shorten the run.
        """
        return path.critical_path(self.spans_by_rank, self.messages)

    def steps(self) -> list["Timeline"]:
        """Return each step of a run of several, moved to time 0: its pipeline work, and the messages this made.

        >>> twice = Timeline("run", [[Span(0, 0, 2, "F", 0, 0, "0F0"), Span(0, 5, 8, "F", 0, 0, "0F0")]])
        >>> [step.makespan for step in twice.steps()]
        [2, 3]
        """
        parts = cut_steps(self.spans_by_rank, self.messages)
        return [Timeline(self.name, *part, self.source, self.unit) for part in parts]

    def between(self, start: Time, end: Time) -> "Timeline":
        """Return what began at `start` or later and before `end`, as a timeline in which `start` is time 0.

        >>> Timeline("run", [[Span(0, 0, 2, "F"), Span(0, 5, 8, "F")]]).between(4, 6).spans_by_rank[0][0].start
        1
        """
        part = cut_time(self.spans_by_rank, self.messages, start, end)
        return Timeline(self.name, *part, self.source, self.unit)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        same_spans = self.unit == other.unit and self.spans_by_rank == other.spans_by_rank
        return same_spans and self._crossings() == other._crossings()

    __hash__ = None  # type: ignore[assignment]  # equal timelines may differ in name and source

    def _crossings(self) -> list[tuple[int, int, Time, Time, str]]:
        return sorted(message[:5] for message in self.messages)

    def to_text(self, width: int = 100) -> str:
        """Draw the timeline with letters, at most `width` characters wide; `str` and `print` use 100."""
        return gantt.draw(self, width)

    def to_svg(self, width: int = 1280) -> str:
        """Draw the timeline as one accessible SVG element of at most `width` pixels."""
        return draw_svg(self, width)

    def to_png(self, path: str | Path | None = None, width: int = 1280) -> bytes:
        """Draw the timeline with matplotlib, `width` pixels wide; return the PNG, and write it if there is a path."""
        from dualpipe_lab.viz.plots import png

        picture = png(self, width)
        if path is not None:
            Path(path).write_bytes(picture)
        return picture

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary of plain JSON values; `from_dict` gives an equal timeline back, to the last digit."""
        return exchange.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Timeline":
        """Rebuild a timeline from `to_dict`, also after a trip through JSON."""
        return cls(**exchange.from_dict(data))

    def to_perfetto(self) -> str:
        """Return a trace for ui.perfetto.dev or chrome://tracing: JSON text with flow arrows and memory counters.

        One tick is shown as one microsecond.
        """
        return perfetto.to_perfetto(self)

    def widget(self, **traits: Any) -> "TimelineWidget":
        """Return the drawing as a notebook widget, whose time, costs and selection Python reads and sets."""
        from dualpipe_lab.viz.widget import TimelineWidget

        return TimelineWidget(self, **traits)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Timeline {self.name!r}: {self.num_ranks} ranks, makespan {self.makespan} {self.unit}, {self.source}>"

    def _repr_html_(self) -> str:
        # Drawing stands on the floor above: the page's script is read only when something is shown.
        from dualpipe_lab.viz.embed import timeline_html

        return timeline_html(self)


def _covered(spans: Iterable[Span]) -> Time:
    total: Time = 0
    reached: Time = 0
    for span in spans:  # in order of their starts
        if span.end > reached:
            total += span.end - max(span.start, reached)
            reached = span.end
    return total
