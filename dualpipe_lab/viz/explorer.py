"""The schedule explorer: every synchronous schedule of the registry at many sizes, on a page without a kernel.

Chapter: book/pp/explorer.  In: numbers of ranks and of microbatches.  Out: HTML that ranks the schedules.
Python builds the programs and sends them as compressed text of a few hundred bytes each; the page simulates them with
the reader's costs.  For a size that a schedule does not support, the page shows the reason.  Every schedule of the
registry appears.  The ranking (`dualpipe_lab.pp.ranking`) permits overlapped pairs to all schedules that have them, in
themselves or in a twin, or to none; the page starts with none.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.ranking import Score, ranked, score
from dualpipe_lab.pp.schedules.variants import Variant, variant
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline.units import number
from dualpipe_lab.viz.embed import element, packed, table, track_spec

RANKS = (2, 4, 8)
MICROBATCHES = tuple(range(1, 33))
START = (4, 8)
_HEAD = ("Schedule", "Makespan (ticks)", "Bubble", "Local bubble", "Peak activations", "Messages", "Weights")


class Explorer:
    """A page that times and ranks schedules with the reader's costs.

    `names`: schedules of the registry, also with options, such as "interleaved:num_virtual_stages=4".  Default: all
    synchronous schedules; an asynchronous schedule computes another gradient, so its time cannot be compared.
    `start`: the numbers of ranks and microbatches shown first.  Raises ValueError if `start` is not among the sizes.

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
        """The rows of every program, or the reason why there is none: name -> "ranks microbatches" -> rows."""
        return rows_by_size(self.variants, self.ranks, self.microbatches)

    @property
    def twins(self) -> dict[str, str]:
        """The twin with overlapped pairs of each schedule, if both are on the page: name -> name."""
        found = {name: (schedules.named(one.name).paired, one) for name, one in self.variants.items()}
        twins = {name: str(one._replace(name=twin)) for name, (twin, one) in found.items() if twin}
        return {name: twin for name, twin in twins.items() if twin in self.variants}

    @property
    def spec(self) -> dict[str, Any]:
        """The specification that the element <dp-explorer> reads."""
        titles = {name: self._title(name, one) for name, one in self.variants.items()}
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches, "start": list(self.start)}
        return {"titles": titles, "twins": self.twins, **sizes, "programs": packed(self.programs)}

    def rows(self) -> list[Score]:
        """Return the scores at the first size, fastest first, with costs 1, free messages and no pairs."""
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
        """Return the element around a table of the numbers at the first size, for readers without scripts."""
        caption = f"{self.start[0]} ranks, {self.start[1]} microbatches, all costs 1"
        return element("dp-explorer", self.spec, table(_HEAD, map(_words, self.rows()), caption), script)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        lines = [_HEAD, *map(_words, self.rows())]
        widths = [max(len(word) + 2, 10) for word in _HEAD[1:]]
        return "\n".join(
            f"{line[0]:19}" + "".join(f"{word:>{width}}" for word, width in zip(line[1:], widths, strict=True))
            for line in lines
        )

    def _title(self, name: str, one: Variant) -> str:
        for p, m in [(p, m) for p in self.ranks for m in self.microbatches]:
            if not isinstance(self.programs[name][f"{p} {m}"], str):
                return one.title(one.build(p, m))
        return name


def rows_by_size(
    variants: Mapping[str, Variant], ranks: Sequence[int], microbatches: Sequence[int]
) -> dict[str, dict[str, list[str] | str]]:
    """Return the rows of every program, or the reason why there is none: name -> "ranks microbatches" -> rows."""
    sizes = [(p, m) for p in ranks for m in microbatches]
    return {name: {f"{p} {m}": _rows(one, p, m) for p, m in sizes} for name, one in variants.items()}


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
