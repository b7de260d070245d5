"""The schedule explorer: every schedule of the registry at many sizes, on a page without a kernel.

Chapter: book/pp/explorer.  In: numbers of ranks and of microbatches.  Out: HTML that ranks the schedules.
The programs are built here and sent as compressed text, about 25 bytes each; the page simulates them with the reader's
costs.  A schedule that refuses a size sends its reason instead.  Schedules appear with their entry in the registry.
Work is compared fairly: F, I and W are the costs of 1/p of the model, so a schedule with two stages a rank pays half of
them for each stage.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from html import escape
from typing import Any, NamedTuple

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.program import Program
from dualpipe_lab.pp.ranking import score
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Time
from dualpipe_lab.viz.embed import element
from dualpipe_lab.viz.spec import track_spec

RANKS = (2, 4, 8)
MICROBATCHES = tuple(range(1, 33))
START = (4, 8)
_HEAD = ("Schedule", "Makespan (ticks)", "Bubble", "Peak activations", "Messages")


class Row(NamedTuple):
    """A schedule's numbers at one size: F, I and W of 1/p of the model cost 1, messages are free."""

    name: str
    makespan: Time
    bubble: float
    peak: Time
    messages: int


class Explorer:
    """A page on which schedules are chosen, timed and ranked.

    Raises ValueError if `start`, the numbers of ranks and microbatches shown first, is not among the sizes.

    >>> print(Explorer(ranks=[2], microbatches=[4], names=["gpipe", "1f1b"], start=(2, 4)))
    Schedule          Makespan (ticks)            Bubble  Peak activations          Messages
    1F1B                            15             20.0%                 2                 8
    GPipe                           15             20.0%                 4                 8
    """

    def __init__(
        self,
        ranks: Iterable[int] = RANKS,
        microbatches: Iterable[int] = MICROBATCHES,
        names: Sequence[str] | None = None,
        start: tuple[int, int] = START,
    ) -> None:
        self.ranks, self.microbatches, self.start = list(ranks), list(microbatches), start
        self.names = schedules.names() if names is None else list(names)
        if start[0] not in self.ranks or start[1] not in self.microbatches:
            raise ValueError(f"start={start} is not among the sizes; use one of ranks and one of microbatches")

    @cached_property
    def programs(self) -> dict[str, dict[str, list[str] | str]]:
        """Name -> "ranks microbatches" -> the program's rows, or the reason why there is none."""
        sizes = [(p, m) for p in self.ranks for m in self.microbatches]
        return {name: {f"{p} {m}": _rows(name, p, m) for p, m in sizes} for name in self.names}

    @property
    def spec(self) -> dict[str, Any]:
        """What the element <dp-explorer> reads."""
        text = json.dumps(self.programs, separators=(",", ":"), ensure_ascii=False)
        packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
        titles = {name: self._title(name) for name in self.names}
        sizes = {"ranks": self.ranks, "microbatches": self.microbatches, "start": list(self.start)}
        return {"titles": titles, **sizes, "programs": packed}

    def rows(self) -> list[Row]:
        """Return the schedules that exist at the first size, the quickest first."""
        found = [_program(name, *self.start) for name in self.names]
        rows = [_numbers(program) for program in found if isinstance(program, Program)]
        return sorted(rows, key=lambda row: (row.makespan, row.peak, row.messages))

    def to_html(self, script: bool = True) -> str:
        """Return the element; inside it, for readers without scripts, the numbers at the first size."""
        return element("dp-explorer", self.spec, self._table(), script)

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        lines = [_HEAD, *map(_words, self.rows())]
        return "\n".join(f"{line[0]:16}" + "".join(f"{word:>18}" for word in line[1:]) for line in lines)

    def _table(self) -> str:
        def cells(tag: str, words: Iterable[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(word)}</{tag}>" for word in words) + "</tr>"

        caption = f"{self.start[0]} ranks, {self.start[1]} microbatches, all costs 1"
        body = "".join(cells("td", _words(row)) for row in self.rows())
        return f"<table><caption>{caption}</caption>{cells('th', _HEAD)}{body}</table>"

    def _title(self, name: str) -> str:
        """The schedule's own name, which its programs carry, and its registry name as long as it has none."""
        for p, m in [(p, m) for p in self.ranks for m in self.microbatches]:
            if not isinstance(self.programs[name][f"{p} {m}"], str):
                return schedules.build(name, p, m).name
        return name


def _program(name: str, num_ranks: int, num_microbatches: int) -> Program | str:
    try:
        return schedules.build(name, num_ranks, num_microbatches)
    except ValueError as refusal:
        return str(refusal)


def _rows(name: str, num_ranks: int, num_microbatches: int) -> list[str] | str:
    program = _program(name, num_ranks, num_microbatches)
    if isinstance(program, str):
        return program
    rows: list[str] = track_spec(simulate(program))["rows"]
    return rows


def _numbers(program: Program) -> Row:
    found = score(program)
    return Row(program.name, found.makespan, found.bubble, found.peak, found.messages)


def _words(row: Row) -> tuple[str, ...]:
    makespan, peak = f"{float(row.makespan):g}", f"{float(row.peak):g}"
    return row.name, makespan, f"{row.bubble:.1%}", peak, str(row.messages)
