"""Colours of a timeline's cells: by kind of work, by direction, by stage or by microbatch.

In: a timeline, what to colour by.  Out: for each cell the name of its colour, and the colour of each name.
The colours are those of Okabe and Ito (2008), which colour-blind readers distinguish.  Each has an ink of contrast at
least 4.5 : 1, in which the cell says in letters what its colour says.
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from dualpipe_lab.timeline.data import TimelineData
from dualpipe_lab.timeline.spans import WAIT, ActionKey, Span

ColourBy: TypeAlias = Literal["kind", "direction", "stage", "microbatch"]

# kind -> colour of the cell, colour of its letter, word in the legend
PALETTE = {
    "F": ("#0072b2", "#fff", "F forward"),
    "B": ("#e69f00", "#000", "B backward"),
    "I": ("#56b4e9", "#000", "I backward, input"),
    "W": ("#009e73", "#000", "W backward, weights"),
    "compute": ("#0072b2", "#fff", "compute"),
    "collective": ("#cc79a7", "#000", "collective"),
    "message": ("#cc79a7", "#000", "message"),
    WAIT: ("none", "currentColor", "wait"),
}
OTHER = ("#f0e442", "#000", "other")
# Okabe and Ito 2008, colour-blind safe; each with the text colour that has the higher contrast on it
NUMBERED = (
    ("#0072b2", "#fff"),
    ("#e69f00", "#000"),
    ("#009e73", "#000"),
    ("#cc79a7", "#000"),
    ("#56b4e9", "#000"),
    ("#f0e442", "#000"),
    ("#d55e00", "#000"),
    ("#595959", "#fff"),
)
_NUMBER = re.compile(r"(direction|stage|microbatch) (\d+)")
_CARRIED = re.compile(r"\d+([FBIW])\d+")


class Colour(NamedTuple):
    """The colour of cells, the colour of their letters, and the words of the legend."""

    fill: str
    ink: str
    words: str


def colour_named(name: str) -> Colour:
    """Return the colour of a name: a kind of work, or a number such as "stage 3"."""
    if found := _NUMBER.fullmatch(name):
        words = {"0": "direction 0", "1": "direction 1 (bar on top)"}[found[2]] if found[1] == "direction" else name
        return Colour(*NUMBERED[int(found[2]) % len(NUMBERED)], words)
    return Colour(*PALETTE.get(name, OTHER))


def check_colour_by(by: str) -> ColourBy:
    """Return `by`; ValueError if cells cannot be coloured by it."""
    if by not in get_args(ColourBy):
        raise ValueError(f"cells are coloured by {', '.join(get_args(ColourBy))}, got {by!r}")
    return cast(ColourBy, by)


def directions(timeline: TimelineData) -> dict[int, int]:
    """Return the direction of each microbatch: 0 if it enters on the rank of the lowest microbatch, otherwise 1."""
    entry: dict[int, tuple[int, int]] = {}  # microbatch -> its lowest stage, and the rank of that stage
    for rank in range(timeline.num_ranks):
        for stage, _, microbatch in (action for span in timeline.stream(rank) for action in span.actions):
            if microbatch not in entry or stage < entry[microbatch][0]:
                entry[microbatch] = stage, rank
    first = entry[min(entry)][1] if entry else 0
    return {microbatch: int(entry[microbatch][1] != first) for microbatch in sorted(entry)}


def _place(name: str) -> tuple[int, str]:  # in the legend
    if name in PALETTE:
        return [*PALETTE].index(name), name
    return int((_NUMBER.fullmatch(name) or "00900")[2]) + 20, name


class Colouring:
    """Names the colour of each cell of a timeline."""

    def __init__(self, timeline: TimelineData, by: ColourBy = "kind") -> None:
        self.by: ColourBy = check_colour_by(by)
        self._directions = directions(timeline) if by == "direction" else {}

    def of_action(self, action: ActionKey) -> str:
        """Return the name of the colour of a pipeline action."""
        stage, kind, microbatch = action
        return self._number(stage, microbatch) or kind

    def of_span(self, span: Span) -> str:
        """Return the name of the colour of a span that is no pipeline action."""
        if (
            span.stage is not None
            and span.microbatch is not None
            and (name := self._number(span.stage, span.microbatch))
        ):
            return name
        carried = _CARRIED.fullmatch(span.label) if span.kind == "message" else None
        return carried[1] if carried else span.kind

    def names(self, timeline: TimelineData) -> Iterator[str]:
        """Yield the names of all colours in use, in the order of the legend."""
        found = {name for spans in timeline.spans_by_rank for span in spans for name in self.of(span)}
        yield from sorted(found, key=_place)

    def of(self, span: Span) -> list[str]:
        """Return the names of the colours of a span: two for a pair."""
        return [self.of_action(action) for action in span.actions] or [self.of_span(span)]

    def _number(self, stage: int, microbatch: int) -> str:
        if self.by == "kind":
            return ""
        if self.by == "direction":
            return f"direction {self._directions.get(microbatch, 0)}"
        return f"stage {stage}" if self.by == "stage" else f"microbatch {microbatch}"
