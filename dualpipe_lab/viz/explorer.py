"""The schedule explorer: every synchronous schedule of the registry at many sizes, on a page without a kernel.

Chapter: book/pp/explorer.  In: numbers of ranks and of microbatches.  Out: HTML that ranks the schedules.
The programs are built here and sent as compressed text, a few hundred bytes each; the page simulates them with the
reader's costs.  A schedule that refuses a size sends its reason instead.  Schedules appear with their entry in the
registry.  Work is compared fairly, see `dualpipe_lab.pp.ranking`: overlapped pairs are for all schedules that have
them, in themselves or in a twin, or for none; the page begins with none.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from html import escape
from typing import Any

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.ranking import Score, ranked, score
from dualpipe_lab.pp.schedules.variants import Variant, variant
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline.units import number
from dualpipe_lab.viz.embed import element
from dualpipe_lab.viz.spec import track_spec

RANKS = (2, 4, 8)
MICROBATCHES = tuple(range(1, 33))
START = (4, 8)
_HEAD = ("Schedule", "Makespan (ticks)", "Bubble", "Local bubble", "Peak activations", "Messages", "Weights")


class Explorer:
    """A page on which schedules are chosen, timed and ranked.

    `names`: schedules of the registry, also with options, such as "interleaved:num_virtual_stages=4".  By default all
    synchronous ones: an asynchronous one is quicker because it computes another gradient, which no number here shows.
    Raises ValueError if `start`, the numbers of ranks and microbatches shown first, is not among the sizes.

    >>> print(Explorer(ranks=[2], microbatches=[4], names=["gpipe", "1f1b"], start=(2, 4)))
    Schedule             Makespan (ticks)    Bubble  Local bubble  Peak activations  Messages   Weights
    1F1B                               15     20.0%             3                 2         8         1
    GPipe                              15     20.0%             3                 4         8         1
    """

    def __init__(
        self,
        ranks: Iterable[int] = RANKS,
        microbatches: Iterable[int] = MICROBATCHES,
        names: Sequence[str] | None = None,
        start: tuple[int, int] = START,
    ) -> None:
        self.ranks, self.microbatches, self.start = list(ranks), list(microbatches), start
        chosen = schedules.names(synchronous=True) if names is None else names
        self.variants = {name: variant(name) for name in chosen}
        if start[0] not in self.ranks or start[1] not in self.microbatches:
            raise ValueError(f"start={start} is not among the sizes; use one of ranks and one of microbatches")

    @cached_property
    def programs(self) -> dict[str, dict[str, list[str] | str]]:
        """Name -> "ranks microbatches" -> the program's rows, or the reason why there is none."""
        sizes = [(p, m) for p in self.ranks for m in self.microbatches]
        return {name: {f"{p} {m}": _rows(one, p, m) for p, m in sizes} for name, one in self.variants.items()}

    @property
    def twins(self) -> dict[str, str]:
        """Name -> the name of the same schedule with overlapped pairs, where both are on the page."""
        found = {name: (schedules.twin_of(one.name), one) for name, one in self.variants.items()}
        twins = {name: str(one._replace(name=twin)) for name, (twin, one) in found.items() if twin}
        return {name: twin for name, twin in twins.items() if twin in self.variants}

    @property
    def spec(self) -> dict[str, Any]:
        """What the element <dp-explorer> reads."""
        text = json.dumps(self.programs, separators=(",", ":"), ensure_ascii=False)
        packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        titles = {name: self._title(name, one) for name, one in self.variants.items()}
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches, "start": list(self.start)}
        return {"titles": titles, "twins": self.twins, **sizes, "programs": packed}

    def rows(self) -> list[Score]:
        """Return the schedules that exist at the first size, the quickest first; costs 1, messages free, no pairs."""
        scores = []
        twins = set(self.twins.values())
        for one in [one for name, one in self.variants.items() if name not in twins]:
            try:
                program = one.build(*self.start)
            except ValueError:
                continue
            scores.append(score(program)._replace(name=one.title(program)))
        return ranked(scores)

    def to_html(self, script: bool = True) -> str:
        """Return the element; inside it, for readers without scripts, the numbers at the first size."""
        return element("dp-explorer", self.spec, self._table(), script)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        lines = [_HEAD, *map(_words, self.rows())]
        widths = [max(len(word) + 2, 10) for word in _HEAD[1:]]
        return "\n".join(
            f"{line[0]:19}" + "".join(f"{word:>{width}}" for word, width in zip(line[1:], widths, strict=True))
            for line in lines
        )

    def _table(self) -> str:
        def cells(tag: str, words: Iterable[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(word)}</{tag}>" for word in words) + "</tr>"

        caption = f"{self.start[0]} ranks, {self.start[1]} microbatches, all costs 1"
        body = "".join(cells("td", _words(row)) for row in self.rows())
        return f"<table><caption>{caption}</caption>{cells('th', _HEAD)}{body}</table>"

    def _title(self, name: str, one: Variant) -> str:
        """The schedule's own name, which its programs carry, and its registry name as long as it has none."""
        for p, m in [(p, m) for p in self.ranks for m in self.microbatches]:
            if not isinstance(self.programs[name][f"{p} {m}"], str):
                return one.title(one.build(p, m))
        return name


def _rows(one: Variant, num_ranks: int, num_microbatches: int) -> list[str] | str:
    try:
        timeline = simulate(one.build(num_ranks, num_microbatches))
    except ValueError as refusal:
        return str(refusal)
    rows: list[str] = track_spec(timeline)["rows"]
    return rows


def _words(one: Score) -> tuple[str, ...]:
    sizes = (number(one.local_bubble), number(one.peak), str(one.messages), number(one.weights))
    return one.name, number(one.makespan), f"{one.bubble:.1%}", *sizes
