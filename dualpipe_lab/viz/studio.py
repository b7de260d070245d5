"""The schedule studio: an element in which a reader writes, drags and breaks a schedule.

Chapter: book/pp/studio.  In: a first schedule, challenges.  Out: HTML, and in a notebook a widget that answers it.
The element gets the registry's programs as compressed text, the challenges, and the verdict on its first program.  It
draws, plays and edits by itself.  Everything that is to be known of an edited program it asks of `pp.studio.answer`:
in a notebook of the kernel, on a published page of the Python that the build put beside it.
"""

from collections.abc import Iterable
from functools import cached_property
from html import escape
from typing import Any

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.cost import UNIT_COST
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.schedules.variants import Variant, variant
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.pp.studio import Challenge, answer, as_json, verdict
from dualpipe_lab.viz.embed import AskingElement, element, image, packed
from dualpipe_lab.viz.explorer import rows_by_size

RANKS = (2, 3, 4, 5, 6, 8)
MICROBATCHES = (*range(1, 13), 16, 20)
START = ("1f1b", 4, 8)


class Studio(AskingElement):
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

    answer = staticmethod(answer)

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
        costs = UNIT_COST.to_dict(self.program.num_stages)
        return {
            "titles": {name: one.title(program) for name, (one, program) in self.programs.items()},
            "directions": {name: program.num_directions for name, (_, program) in self.programs.items()},
            "ranks": self.ranks,
            "microbatches": self.microbatches,
            "start": list(self.start),
            "verdict": verdict(as_json(self.program), costs),
            "challenges": [one.spec for one in self.challenges],
            "programs": packed(rows_by_size(variants, self.ranks, self.microbatches)),
        }

    def to_html(self, script: bool = True, key: str = "") -> str:
        """Return the element around a picture of the first program; `key` names the widget that answers it."""
        timeline = simulate(self.program)
        picture = image(timeline.to_svg(), f"Timeline of {self.program.name}")
        return element("dp-studio", {**self.spec, "key": key}, picture + f"<pre>{escape(str(self))}</pre>", script)

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
