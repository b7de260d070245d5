"""`PlanFields`: the fields of a plan, their own rules, and what follows from them alone.

Chapter: book/whole/cuts.  In: sizes of the axes, settings.  Out: a grid, a program.
  world size    pp * dp * cp * tp, times ep where ep is an axis of the grid
  data ranks    dp, times ep where it is an axis: each has its own sequences; the ranks of cp share them
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # each method reads what it needs, so that a plan is there in milliseconds
    from dualpipe_lab.pp.program import Program
    from dualpipe_lab.topology import Topology

# bytes per element: parameter, gradient, which is summed and travels in 32 bits at least, master weight, both moments
NUMBER_BYTES = {"float64": (8, 8, 0, 16), "float32": (4, 4, 0, 8), "bfloat16": (2, 4, 4, 8)}
PRECISIONS = tuple(NUMBER_BYTES)
_OPTIONAL_COUNTS = ("chunks", "ranks_per_node", "loss_chunk")
_COUNTS = ("num_microbatches", *_OPTIONAL_COUNTS)
_SWITCHES = ("hybrid", "experts_in_data", "sequence_parallel", "recompute", "overlap")


@dataclass(frozen=True)
class PlanFields:
    """The fields of a `Plan`, which documents them."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    zero: int = 0
    hybrid: bool = False
    experts_in_data: bool = False
    sequence_parallel: bool = False
    layout: str = "zigzag"
    recompute: bool = False
    precision: str = "float32"
    overlap: bool = False
    layers: tuple[int, ...] | None = None
    order: tuple[str, ...] = ("pp", "dp", "ep", "cp", "tp")
    ranks_per_node: int | None = None
    loss_chunk: int | None = None
    mtp: float | None = None

    def __post_init__(self) -> None:
        from dualpipe_lab.cp.layouts import LAYOUTS
        from dualpipe_lab.topology import AXES

        for name in (*AXES, *_COUNTS):
            value = getattr(self, name)
            if not _is_count(value) and not (value is None and name in _OPTIONAL_COUNTS):
                raise ValueError(f"a plan needs {name} to be an integer of at least 1, got {value!r}; use {name}=1")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"a plan needs {name} to be True or False, got {getattr(self, name)!r}")
        chosen: dict[str, tuple[object, ...]] = {"zero": (0, 1, 2, 3), "layout": LAYOUTS, "precision": PRECISIONS}
        for name, choices in chosen.items():
            value = getattr(self, name)
            if type(value) is not type(choices[0]) or value not in choices:
                raise ValueError(f"a plan's {name} is one of {', '.join(map(str, choices))}, got {value!r}")
        object.__setattr__(self, "schedule", _registered_name(self.schedule))
        if self.mtp is not None and not _is_weight(self.mtp):
            raise ValueError(
                f"the second token's loss has a finite weight above 0, got mtp={self.mtp!r}; use 0.3, "
                "or None for the next token alone"
            )
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"a plan's order has each of {', '.join(AXES)} once, got {self.order}")
        if self.layers is None:
            return
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or any(not _is_count(size) and size != 0 for size in self.layers):
            raise ValueError(
                f"a plan gives every stage its number of layers, got layers={self.layers}; or leave it out"
            )

    @property
    def has_ep_axis(self) -> bool:
        """Whether ep is an axis of the grid."""
        return self.ep > 1 and not self.experts_in_data

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis of the grid, outermost first; also of those with one rank."""
        return {axis: 1 if axis == "ep" and self.experts_in_data else getattr(self, axis) for axis in self.order}

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """The number of ranks with sequences of their own: dp, times ep where it is an axis."""
        return self.dp * (self.ep if self.has_ep_axis else 1)

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """The axes of the grid along which dense weights are copied and see other data, outermost first."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis in ("dp", "ep", "cp"))

    @property
    def expert_copy_axes(self) -> tuple[str, ...]:
        """The axes of the grid along which experts are copied; `edp` where they are within the data ranks."""
        if self.experts_in_data and self.ep > 1:
            return ("edp",)
        return tuple(axis for axis in self.copy_axes if axis != "ep")

    @property
    def num_copies(self) -> int:
        """The number of ranks that hold the same dense weights: data ranks, times cp."""
        return self.data_size * self.cp

    @property
    def topology(self) -> "Topology":
        """The grid, without axes of one rank (`dp` stays if no axis has more); ValueError if sizes do not divide."""
        axes = tuple((axis, size) for axis, size in self.sizes.items() if size > 1) or (("dp", 1),)
        if self.ep == 1 or not self.experts_in_data:
            return _grid(axes, None, (), self.ranks_per_node)
        data = self.dp * self.cp
        if data % self.ep:
            raise ValueError(
                f"experts_in_data shards the experts over the ranks of dp and cp, and ep must divide them, got ep "
                f"{self.ep} and dp {self.dp} x cp {self.cp} = {data}"
            )
        over = tuple(axis for axis, _ in axes if axis in ("dp", "cp"))
        return _grid(axes, data // self.ep, over, self.ranks_per_node)

    @property
    def program(self) -> "Program | None":
        """The program of the pipeline, None without pp; ValueError if the schedule cannot have these sizes."""
        return None if self.pp == 1 else self._pipeline.program

    @property
    def _pipeline(self) -> "_Pipeline":
        found = _pipeline(self.schedule, self.pp, self.num_microbatches, self.chunks)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    @property
    def num_stages(self) -> int:
        """The number of stages of the model; 1 without pp."""
        return 1 if self.pp == 1 else self._pipeline.program.num_stages

    def stages(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a rank of pp."""
        return (0,) if self.pp == 1 else self._pipeline.stages[pp_rank]

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of pp that hold a stage: under DualPipe two."""
        return (0,) if self.pp == 1 else self._pipeline.program.holders[stage]

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight's or an activation's number."""
        return NUMBER_BYTES[self.precision][0]

    @property
    def routes(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For each way through the pipeline the rank of pp of every stage, and its number of microbatches."""
        return () if self.pp == 1 else self._pipeline.routes

    @property
    def has_pairs(self) -> bool:
        """Whether the pipeline has overlapped pairs of a forward and a backward."""
        return self.pp > 1 and self._pipeline.has_pairs

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def __str__(self) -> str:
        parts = [f"{axis} {size}{self._notes(axis)}" for axis, size in self.sizes.items() if size > 1] or ["dp 1"]
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return ", ".join([f"{' x '.join(parts)} = {ranks}", *self._tail(), self.precision])

    def _notes(self, axis: str) -> str:
        pipeline = [self.schedule, f"m {self.num_microbatches}"]
        pipeline += [] if self.chunks is None else [f"{self.chunks} stages per rank"]
        pipeline += [] if self.layers is None else [f"layers {' '.join(map(str, self.layers))}"]
        tensor = ["sequence parallel"] * self.sequence_parallel
        notes = {"pp": pipeline, "cp": [self.layout], "dp": self._zero(), "tp": tensor}.get(axis)
        return f" ({', '.join(notes)})" if notes else ""

    def _zero(self) -> list[str]:
        return [f"{'hybrid ' if self.hybrid else ''}ZeRO-{self.zero}"] if self.zero else []

    def _tail(self) -> list[str]:
        """What belongs to no axis that has more than one rank."""
        tail = [f"m {self.num_microbatches}"] if self.pp == 1 and self.num_microbatches > 1 else []
        tail += self._zero() if self.dp == 1 else []
        tail += [f"ep {self.ep} within the data ranks"] if self.experts_in_data and self.ep > 1 else []
        tail += [f"{self.ranks_per_node} ranks per node"] if self.ranks_per_node else []
        tail += [] if self.loss_chunk is None else [f"loss in chunks of {self.loss_chunk} tokens"]
        tail += [] if self.mtp is None else [f"a second token of weight {self.mtp:g}"]
        return tail + ["recompute"] * self.recompute + ["overlapped experts"] * self.overlap


@lru_cache(maxsize=1024)
def _grid(
    axes: tuple[tuple[str, int], ...], edp: int | None, over: tuple[str, ...], ranks_per_node: int | None
) -> "Topology":
    from dualpipe_lab.topology import Topology

    return Topology(axes, edp=edp, experts_over=over or ("dp",), ranks_per_node=ranks_per_node)


@cache
def _registered_name(schedule: str) -> str:
    from dualpipe_lab.pp import schedules

    return schedules.named(schedule).name


class _Pipeline(NamedTuple):
    program: "Program"
    stages: tuple[tuple[int, ...], ...]  # of each rank
    routes: tuple[tuple[tuple[int, ...], int], ...]  # the ranks of a microbatch's stages, and how many take them
    has_pairs: bool


@cache
def _pipeline(schedule: str, pp: int, num_microbatches: int, chunks: int | None) -> "_Pipeline | str":
    """Build a program with `chunks` stages per rank, or say why there is none: a search asks again and again."""
    from dualpipe_lab.pp import schedules
    from dualpipe_lab.pp.program import Overlap
    from dualpipe_lab.pp.validation.rules import routes

    free = [name for name in schedules.names(synchronous=True) if "num_virtual_stages" in schedules.options_of(name)]
    options = {"num_virtual_stages": chunks} if chunks is not None and schedule in free else {}
    try:
        program = schedules.build(schedule, pp, num_microbatches, **options)
    except ValueError as error:
        return str(error)
    if chunks is not None and program.num_stages != chunks * pp:
        return (
            f"{schedule} has {program.num_stages} stages on {pp} ranks, got chunks={chunks}; leave chunks out, or use "
            f"one of {', '.join(free)}"
        )
    stages = tuple(program.stages_of(rank) for rank in range(pp))
    has_pairs = any(isinstance(step, Overlap) for steps in program.ranks for step in steps)
    return _Pipeline(program, stages, tuple(sorted(Counter(routes(program)).items())), has_pairs)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as lines whose columns begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
