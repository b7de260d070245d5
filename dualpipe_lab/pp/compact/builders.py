"""`compact_build`: compact programs of the registry's schedules; most are made as arrays, without a `Program`.

Chapter: book/pp.  In: a name, the number of ranks and of microbatches.  Out: a `CompactProgram`, equal to the compact
form of the program that `schedules.build` makes.
  three phases     GPipe, looped breadth-first, 1F1B, interleaved, ZB-H1, ZB-H2, their paired twins, PipeDream
  lists of words   DualPipe, DualPipeV, and ZBV from 2P - 1 microbatches
  by a simulation  Easy-DualPipe, V-Half, V-Min, short ZBV: built as a `Program` first, at its price
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dualpipe_lab.pp import schedules
from dualpipe_lab.pp.compact.program import CompactProgram
from dualpipe_lab.pp.compact.rows import Flows, Row, dualpipe_row, flows_on_loop, three_phases, zbv_row
from dualpipe_lab.pp.program import check_counts
from dualpipe_lab.pp.schedules.dualpipe import check_dualpipe
from dualpipe_lab.pp.schedules.dualpipev import check_dualpipev
from dualpipe_lab.pp.schedules.easy_dualpipe import check_easy_dualpipe
from dualpipe_lab.pp.schedules.eight_steps import Flow
from dualpipe_lab.pp.schedules.interleaved import round_sizes
from dualpipe_lab.pp.schedules.zero_bubble_h2 import activations_held


def compact_build(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> CompactProgram:
    """Build the compact program of a schedule by name, with the names, options and errors of `schedules.build`.

    >>> compact_build("1F1B", 128, 256)
    <CompactProgram '1F1B': 128 ranks, 128 stages, 256 microbatches>
    """
    known = schedules.builder(name)
    made = _BUILDERS.get(known, _from_program(known))
    return made(num_ranks, num_microbatches, **options)


class Placement(NamedTuple):
    """The stages of each rank, in order."""

    stages: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks."""
        return 1 + max(map(max, self.stages))


def placement(name: str, num_ranks: int, num_microbatches: int, **options: Any) -> Placement:
    """Return the stages that a schedule gives to each rank, with the errors of `compact_build`.

    Schedules that are found by a simulation of theirs, at its price, are not built for it.

    >>> placement("v_min", 2, 8).stages
    ((0, 3), (1, 2))
    """
    known = schedules.builder(name)
    if known in _PLACED:
        return Placement(_PLACED[known](num_ranks, num_microbatches))
    passes = compact_build(name, num_ranks, num_microbatches, **options).passes
    found: list[set[int]] = [set() for _ in range(num_ranks)]
    for rank, stage in zip(passes.rank.tolist(), passes.stage.tolist(), strict=True):
        found[rank].add(stage)
    return Placement(tuple(tuple(sorted(stages)) for stages in found))


def _on_a_v(builder: str) -> Callable[[int, int], tuple[tuple[int, ...], ...]]:
    def placed(num_ranks: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
        check_counts(builder, num_ranks=num_ranks, num_microbatches=num_microbatches)
        return tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))

    return placed


def _on_two_ranks(num_ranks: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    check_easy_dualpipe(num_ranks, num_microbatches)
    return tuple(tuple(sorted({rank, num_ranks - 1 - rank})) for rank in range(num_ranks))


_PLACED: dict[Callable[..., Any], Callable[[int, int], tuple[tuple[int, ...], ...]]] = {
    schedules.zbv: _on_a_v("zbv"),
    schedules.v_half: _on_a_v("v_half"),
    schedules.v_min: _on_a_v("v_min"),
    schedules.easy_dualpipe: _on_two_ranks,
}


@dataclass(frozen=True)
class _Loop:
    """The choices of a schedule in three phases (see `schedules.warmup_steady_cooldown`).

    Attributes:
        title: the program's name.
        sizes: the number of ranks, of microbatches, of stages per rank.
        rounds: the number of microbatches of each round.
        num_warmup: the forwards before the first backward, by rank.
        weight_delay: the further I between an I and its W, by rank; None for full backwards.
        pairs: whether forward and backward overlap.
    """

    title: str
    sizes: tuple[int, int, int]
    rounds: list[int]
    num_warmup: Callable[[int], int]
    weight_delay: Callable[[int], int] | None = None
    pairs: bool = False

    def build(self) -> CompactProgram:
        """Return the program."""
        num_ranks, num_microbatches, per_rank = self.sizes
        flows = flows_on_loop(self.rounds, per_rank)
        rows = [self._row(rank, flows.placed(rank, num_ranks)) for rank in range(num_ranks)]
        return _joined(self.title, rows, per_rank * num_ranks, num_microbatches)

    def _row(self, rank: int, flows: Flows) -> Row:
        delay = None if self.weight_delay is None else self.weight_delay(rank)
        return three_phases(flows, self.num_warmup(rank), delay, self.pairs)


def _joined(
    title: str, rows: Sequence[Row], num_stages: int, num_microbatches: int, num_directions: int = 1
) -> CompactProgram:
    import numpy as np

    kind, stage, microbatch, second = map(np.concatenate, zip(*rows, strict=True))
    offsets = np.cumsum([0, *(len(row.kind) for row in rows)])
    return CompactProgram(title, num_stages, num_microbatches, offsets, kind, stage, microbatch, second, num_directions)


def _from_program(build: Callable[..., Any]) -> Callable[..., CompactProgram]:
    return lambda *sizes, **options: CompactProgram.of(build(*sizes, **options))


def _gpipe(num_ranks: int, num_microbatches: int) -> CompactProgram:
    check_counts("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    sizes = num_ranks, num_microbatches, 1
    return _Loop("GPipe", sizes, [num_microbatches], lambda rank: num_microbatches).build()


def _looped_bfs(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2) -> CompactProgram:
    check_counts(
        "looped_bfs", num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages
    )
    sizes = num_ranks, num_microbatches, num_virtual_stages
    return _Loop("Looped BFS", sizes, [num_microbatches], lambda rank: num_virtual_stages * num_microbatches).build()


def _one_f_one_b(num_ranks: int, num_microbatches: int) -> CompactProgram:
    check_counts("one_f_one_b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    sizes = num_ranks, num_microbatches, 1
    return _Loop("1F1B", sizes, [num_microbatches], lambda rank: num_ranks - 1 - rank).build()


def _pipedream(num_ranks: int, num_microbatches: int) -> CompactProgram:
    check_counts("pipedream", num_ranks=num_ranks, num_microbatches=num_microbatches)
    sizes = num_ranks, num_microbatches, 1
    return _Loop("PipeDream (async)", sizes, [num_microbatches], lambda rank: num_ranks - 1 - rank).build()


def _interleaved(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int = 2, round_size: int | None = None
) -> CompactProgram:
    check_counts(
        "interleaved", num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages
    )
    rounds = round_sizes(num_ranks, num_microbatches, round_size)
    first = (num_virtual_stages - 1) * rounds[0]
    sizes = num_ranks, num_microbatches, num_virtual_stages
    return _Loop("Interleaved 1F1B", sizes, rounds, lambda rank: first + 2 * (num_ranks - 1 - rank)).build()


def _zero_bubble_h1(num_ranks: int, num_microbatches: int, num_virtual_stages: int = 1) -> CompactProgram:
    check_counts(
        "zero_bubble_h1", num_ranks=num_ranks, num_microbatches=num_microbatches, num_virtual_stages=num_virtual_stages
    )
    rounds = round_sizes(num_ranks, num_microbatches)
    first = (num_virtual_stages - 1) * rounds[0]
    sizes = num_ranks, num_microbatches, num_virtual_stages
    return _Loop("ZB-H1", sizes, rounds, lambda rank: first + num_ranks - 1 - rank, lambda rank: rank).build()


def _zero_bubble_h2(num_ranks: int, num_microbatches: int, in_flight: int | None = None) -> CompactProgram:
    check_counts("zero_bubble_h2", num_ranks=num_ranks, num_microbatches=num_microbatches)
    extra = max(0, activations_held(num_ranks, num_microbatches, in_flight) - num_ranks)

    def waiting(rank: int) -> int:
        return rank * extra // max(1, num_ranks - 1)

    def num_warmup(rank: int) -> int:
        return num_ranks - 1 - rank + extra - waiting(rank)

    sizes = num_ranks, num_microbatches, 1
    return _Loop("ZB-H2", sizes, [num_microbatches], num_warmup, lambda rank: rank + waiting(rank)).build()


def _paired(
    builder: str, title: str, num_virtual_stages: int = 1, split: bool = False
) -> Callable[..., CompactProgram]:
    def build(num_ranks: int, num_microbatches: int, num_virtual_stages: int = num_virtual_stages) -> CompactProgram:
        sizes = num_ranks, num_microbatches, num_virtual_stages
        names = "num_ranks", "num_microbatches", "num_virtual_stages"
        check_counts(builder, **dict(zip(names, sizes, strict=True)))
        rounds = round_sizes(num_ranks, num_microbatches)
        first = (num_virtual_stages - 1) * rounds[0]
        delay = (lambda rank: rank) if split else None
        return _Loop(title, sizes, rounds, lambda rank: first + 2 * (num_ranks - rank) - 1, delay, pairs=True).build()

    return build


def _paired_one_f_one_b(num_ranks: int, num_microbatches: int) -> CompactProgram:
    return _paired("paired_one_f_one_b", "Paired 1F1B")(num_ranks, num_microbatches)


def _dualpipe(num_ranks: int, num_microbatches: int) -> CompactProgram:
    check_dualpipe(num_ranks, num_microbatches)
    rows, per_flow = [], num_microbatches // 2
    for rank in range(num_ranks):
        mirror = num_ranks - 1 - rank
        downwards, upwards = Flow(rank, 0), Flow(mirror, per_flow)
        flows = (downwards, upwards) if rank < mirror else (upwards, downwards)  # the one whose end is nearer first
        rows.append(dualpipe_row(flows, min(rank, mirror), num_ranks // 2, per_flow))
    return _joined("DualPipe", rows, num_ranks, num_microbatches, num_directions=2)


def _dualpipev(num_ranks: int, num_microbatches: int) -> CompactProgram:
    check_dualpipev(num_ranks, num_microbatches)
    last = 2 * num_ranks - 1
    flows = [(Flow(rank, 0), Flow(last - rank, 0)) for rank in range(num_ranks)]
    rows = [dualpipe_row(flow, rank, num_ranks, num_microbatches) for rank, flow in enumerate(flows)]
    return _joined("DualPipeV", rows, last + 1, num_microbatches)


def _zbv(num_ranks: int, num_microbatches: int) -> CompactProgram:
    check_counts("zbv", num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_microbatches < 2 * num_ranks - 1:
        return _from_program(schedules.zbv)(num_ranks, num_microbatches)
    rows = [zbv_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return _joined("ZBV", rows, 2 * num_ranks, num_microbatches)


_BUILDERS: dict[Callable[..., Any], Callable[..., CompactProgram]] = {
    schedules.gpipe: _gpipe,
    schedules.one_f_one_b: _one_f_one_b,
    schedules.interleaved: _interleaved,
    schedules.looped_bfs: _looped_bfs,
    schedules.zero_bubble_h1: _zero_bubble_h1,
    schedules.zero_bubble_h2: _zero_bubble_h2,
    schedules.zbv: _zbv,
    schedules.dualpipe: _dualpipe,
    schedules.dualpipev: _dualpipev,
    schedules.paired_one_f_one_b: _paired_one_f_one_b,
    schedules.paired_interleaved: _paired("paired_interleaved", "Paired interleaved 1F1B", num_virtual_stages=2),
    schedules.paired_zero_bubble_h1: _paired("paired_zero_bubble_h1", "Paired ZB-H1", split=True),
    schedules.pipedream: _pipedream,
}
