"""The `Timeline`: one type for simulated, virtual and measured runs.

Chapter: book/start/time.  In: spans per rank and messages.  Out: numbers (`TimelineData`), steps and stretches of the
run, text, SVG and exports (dictionary, Perfetto).  Notebooks show it through `dualpipe_lab.viz`.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any, TypeAlias

from dualpipe_lab.timeline import gantt, json_form, perfetto
from dualpipe_lab.timeline.colours import ColourBy
from dualpipe_lab.timeline.data import TimelineData
from dualpipe_lab.timeline.spans import COLLECTIVE, WAIT, WORK, ActionKey, Message, Span, Time
from dualpipe_lab.timeline.svg import draw_svg

Excerpt: TypeAlias = tuple[list[list[Span]], list[Message]]  # of one stretch of a run: the spans by rank, the messages


class Timeline(TimelineData):
    """The spans and messages of a run, by rank; immutable, comparable, printable.

    A span of kind "wait" counts as idle time, every other span as busy time.  Times start at 0, in `unit`.

    Two timelines are equal if their units, spans and messages are equal.  Name, source, costs and message bytes are not
    compared, so that a run on the virtual clock can be compared with its simulation.

    `costs`: the costs of a simulation (`Cost.to_dict`), from which a page recomputes it with other costs.

    >>> timeline = Timeline("two ranks", [[Span(0, 0, 1, "F", 0, 0, "0F0")], [Span(1, 1, 2, "F", 1, 0, "1F0")]])
    >>> timeline.makespan, timeline.bubble_time(1), timeline.bubble_fraction
    (2, 1, 0.5)
    """

    def steps(self) -> list["Timeline"]:
        """Split a run of several training steps into one timeline per step, each moved to time 0.

        A step holds its pipeline spans and the messages that these spans sent; other spans are left out.

        >>> twice = Timeline("run", [[Span(0, 0, 2, "F", 0, 0, "0F0"), Span(0, 5, 8, "F", 0, 0, "0F0")]])
        >>> [step.makespan for step in twice.steps()]
        [2, 3]
        """
        excerpts = _split_steps(self.spans_by_rank, self.messages)
        return [Timeline(self.name, *excerpt, self.source, self.unit) for excerpt in excerpts]

    def between(self, start: Time, end: Time) -> "Timeline":
        """Return the spans and messages that began in [start, end), as a timeline in which `start` is time 0.

        >>> Timeline("run", [[Span(0, 0, 2, "F"), Span(0, 5, 8, "F")]]).between(4, 6).spans_by_rank[0][0].start
        1
        """
        rows = [[span for span in spans if start <= span.start < end] for spans in self.spans_by_rank]
        messages = [message for message in self.messages if start <= message.sent < end]
        return Timeline(self.name, *_moved(rows, messages, start), self.source, self.unit)

    def with_stream(self, name: str, spans_by_rank: Iterable[Iterable[Span]]) -> "Timeline":
        """Return the timeline with one more stream per rank, such as the collectives of a run as "communication".

        Collectives on the stream "work" are the time in which a rank waits for them, and become waits.

        >>> run = Timeline("run", [[Span(0, 0, 2, "F"), Span(0, 2, 6, "collective")]])
        >>> both = run.with_stream("communication", [[Span(0, 1, 6, "collective")]])
        >>> both.streams, run.busy_time(0), both.busy_time(0)
        (('work', 'communication'), 6, 2)
        """
        rows = [
            [span._replace(kind=WAIT) if span.kind == COLLECTIVE and span.stream == WORK else span for span in spans]
            for spans in self.spans_by_rank
        ]
        for row, added in zip(rows, spans_by_rank, strict=True):
            row += [span._replace(stream=name) for span in added]
        return Timeline(self.name, rows, self.messages, self.source, self.unit)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        same_spans = self.unit == other.unit and self.spans_by_rank == other.spans_by_rank
        return same_spans and self._crossings() == other._crossings()

    __hash__ = None  # type: ignore[assignment]  # equal timelines may differ in name and source

    def _crossings(self) -> list[tuple[int, int, Time, Time, str]]:
        return sorted(message[:5] for message in self.messages)

    def to_text(self, width: int = 100) -> str:
        """Draw the timeline as text of at most `width` columns; `str` and `print` use 100."""
        return gantt.draw(self, width)

    def to_svg(self, width: int = 1280, colour_by: ColourBy = "kind", messages: bool = False) -> str:
        """Draw the timeline as one accessible SVG element of at most `width` pixels.

        `colour_by`: "kind", "direction", "stage" or "microbatch".  `messages`: draw them on the stream "communication"
        of their senders.
        """
        return draw_svg(self, width, colour_by, messages)

    def to_dict(self) -> dict[str, Any]:
        """Return the timeline as plain JSON values, without loss; `from_dict` reads them."""
        return {
            "format": json_form.FORMAT,
            "name": self.name,
            "source": self.source,
            "unit": self.unit,
            "ranks": [[json_form.pack_span(span) for span in spans] for spans in self.spans_by_rank],
            "messages": [json_form.pack_message(message) for message in self.messages],
            **({} if self.costs is None else {"costs": self.costs}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Timeline":
        """Return the timeline that `to_dict` wrote; ValueError if `data` has another format."""
        if (found := data.get("format")) != json_form.FORMAT:
            raise ValueError(
                f"expected a timeline with format {json_form.FORMAT!r}, got {found!r}; use Timeline.to_dict"
            )
        ranks = [[json_form.unpack_span(rank, row) for row in rows] for rank, rows in enumerate(data["ranks"])]
        messages = [json_form.unpack_message(row) for row in data["messages"]]
        return cls(data["name"], ranks, messages, data["source"], data["unit"], data.get("costs"))

    def to_perfetto(self) -> str:
        """Return a trace for ui.perfetto.dev or chrome://tracing, as JSON text.

        Messages are flow arrows, live activations are counters.  One tick is written as one microsecond.
        """
        return perfetto.to_perfetto(self)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<Timeline {self.name!r}: {self.num_ranks} ranks, makespan {self.makespan} {self.unit}, {self.source}>"


def _split_steps(spans_by_rank: Sequence[Sequence[Span]], messages: Sequence[Message]) -> list[Excerpt]:
    """Return the spans and messages of each step.

    An action occurs once per step.  On each rank a new step begins with the first span that repeats an action, and a
    message belongs to the step whose span sent it.
    """
    steps = list(zip_longest(*map(_steps_of_rank, spans_by_rank), fillvalue=[]))
    sent: list[list[Message]] = [[] for _ in steps]
    made: defaultdict[tuple[int, str], list[tuple[Time, int]]] = defaultdict(list)
    for number, step in enumerate(steps):
        for rank, spans in enumerate(step):
            for span in spans:
                for stage, kind, microbatch in span.actions:
                    made[rank, f"{stage}{kind}{microbatch}"].append((span.end, number))
    for message in messages:
        ends = made.get((message.src, message.label), [])
        position = bisect_right(ends, message.sent, key=itemgetter(0))
        if position:
            sent[ends[position - 1][1]].append(message)
    starts = [min(span.start for spans in step for span in spans) for step in steps]
    return [_moved(*step) for step in zip(steps, sent, starts, strict=True)]


def _steps_of_rank(spans: Sequence[Span]) -> list[list[Span]]:
    rows: list[list[Span]] = []
    seen: set[ActionKey] = set()
    for span in spans:
        if span.actions:
            if not rows or not seen.isdisjoint(span.actions):
                rows.append([])
                seen = set()
            rows[-1].append(span)
            seen.update(span.actions)
    return rows


def _moved(spans_by_rank: Iterable[Iterable[Span]], messages: Iterable[Message], zero: Time) -> Excerpt:
    rows = [[s._replace(start=s.start - zero, end=s.end - zero) for s in spans] for spans in spans_by_rank]
    return rows, [
        m._replace(sent=m.sent - zero, arrived=m.arrived - zero, left=None if m.left is None else m.left - zero)
        for m in messages
    ]
