"""The schedule studio: a page without a kernel on which a reader writes, drags and breaks a schedule.

Chapter: book/pp/studio.  In: a first schedule, challenges.  Out: HTML.
Python sends the programs of the registry as compressed text, and the challenges.  The page edits, validates, explains
and simulates them itself; its verdicts and numbers are those of `validate`, `simulate` and `lower_bound`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from typing import Any

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules.variants import Variant, variant
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.viz.embed import element, image
from dualpipe_lab.viz.explorer import packed, rows_by_size

RANKS = (2, 3, 4, 5, 6, 8)
MICROBATCHES = (*range(1, 13), 16, 20)
START = ("1f1b", 4, 8)


@dataclass(frozen=True)
class Challenge:
    """A puzzle of the studio: a program to write under rules, with a bound on its time and two stars.

    Solved is a valid program within all rules: stages and microbatches as given, at most `in_flight` activations on any
    rank, no more than `directions` routes, at most `goal` ticks.  One star for at most `best` ticks, one for at most
    `least` activations on the fullest rank.

    Attributes:
        name: a short name, such as "mend".
        title: what to do, in a few words.
        text: the task, as the page shows it.
        ranks, stages, microbatches: its size.
        start: one row of text per rank to begin with; empty rows to begin with nothing.
        costs: ticks by the names of `Cost`.
        directions: 1 for every stage on one rank, 2 for two copies of the weights.
        in_flight: the limit of activations on each rank; None for no limit.
        goal: the most ticks that solve it; None for any.
        best: the most ticks for the star of time.
        least: the most activations on a rank for the star of memory.
        bound: ticks that no order under these rules can be below.
    """

    name: str
    title: str
    text: str
    ranks: int
    stages: int
    microbatches: int
    start: tuple[str, ...]
    best: int
    least: int
    bound: int
    goal: int | None = None
    in_flight: int | None = None
    directions: int = 1
    costs: tuple[tuple[str, Any], ...] = ()

    @property
    def cost(self) -> Cost:
        """The costs of its actions and links."""
        return Cost(**dict(self.costs))

    def program(self, rows: Sequence[str]) -> Program:
        """Return rows of text as a program of this size; ValueError for text that is not one."""
        ranks = Program.parse(self.name, rows).ranks
        return Program(self.name, ranks, self.stages, self.microbatches, self.directions)

    @property
    def spec(self) -> dict[str, Any]:
        """The challenge as the element <dp-studio> reads it."""
        return asdict(self) | {"start": list(self.start), "costs": self.cost.to_dict(self.stages)}


class Studio:
    """The element <dp-studio>; it prints as the program that it shows first.

    Args:
        start: name of a schedule, ranks, microbatches.
        challenges: the puzzles that the page offers.
        ranks, microbatches: the sizes of the registry's schedules that the page carries.

    Raises:
        ValueError: `start` is not among the sizes, or the schedule does not exist at this size.

    >>> print(Studio(("1f1b", 2, 2), ranks=[2], microbatches=[2]))
    # 1F1B: 2 ranks, 2 stages, 2 microbatches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """

    def __init__(
        self,
        start: tuple[str, int, int] = START,
        challenges: Iterable[Challenge] = (),
        ranks: Iterable[int] = RANKS,
        microbatches: Iterable[int] = MICROBATCHES,
    ) -> None:
        self.start, self.challenges = start, list(challenges)
        self.ranks, self.microbatches = list(ranks), list(microbatches)
        if start[1] not in self.ranks or start[2] not in self.microbatches:
            raise ValueError(f"start={start} is not among the sizes; use one of ranks and one of microbatches")
        self.program = variant(start[0]).build(*start[1:])

    @cached_property
    def programs(self) -> dict[str, tuple[Variant, Program]]:
        """Each synchronous schedule of the registry that has one of the sizes, and its program of the smallest one."""
        found = {}
        for name in schedules.names(synchronous=True):
            if program := self._smallest(one := variant(name)):
                found[name] = one, program
        return found

    @property
    def spec(self) -> dict[str, Any]:
        """The specification that the element <dp-studio> reads."""
        variants = {name: one for name, (one, _) in self.programs.items()}
        return {
            "titles": {name: one.title(program) for name, (one, program) in self.programs.items()},
            "directions": {name: program.num_directions for name, (_, program) in self.programs.items()},
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "start": list(self.start),
            "challenges": [one.spec for one in self.challenges],
            "programs": packed(rows_by_size(variants, self.ranks, self.microbatches)),
        }

    def to_html(self, script: bool = True) -> str:
        """Return the element around a picture of the first program, for readers without scripts."""
        timeline = simulate(self.program)
        picture = image(timeline.to_svg(), f"Timeline of {self.program.name}")
        return element("dp-studio", self.spec, picture + f"<pre>{escape(str(self))}</pre>", script)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        return str(self.program)

    def _smallest(self, one: Variant) -> Program | None:
        for num_ranks in self.ranks:
            for num_microbatches in self.microbatches:
                try:
                    return one.build(num_ranks, num_microbatches)
                except ValueError:
                    continue
        return None
