"""`PlanFields`: the fields of a plan, and what follows from them alone: ranks, grid, program, one line of text.

Chapter: book/whole/cuts.  In: sizes of the axes, settings.  Out: a `Topology`, a `Program`, JSON values.
  world size    pp * dp * cp * tp, times ep where ep is an axis of the grid
  data ranks    dp, times ep where it is an axis: each has its own sequences; the ranks of cp share them
Elsewhere: Megatron `parallel_state.initialize_model_parallel` and `--num-layers-per-virtual-pipeline-stage`;
torchtitan's `ParallelDims`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:  # at run time where they are used: the fields alone are read in milliseconds
    from dualpipe_lab.pp.program import Program
    from dualpipe_lab.topology import Topology

PRECISIONS = ("float64", "float32", "bfloat16")
_OPTIONAL_COUNTS = ("chunks", "ranks_per_node", "loss_chunk")
_COUNTS = ("num_microbatches", *_OPTIONAL_COUNTS)
_SWITCHES = ("hybrid", "experts_in_data", "sequence_parallel", "recompute", "overlap")
Fields = TypeVar("Fields", bound="PlanFields")


@dataclass(frozen=True)
class PlanFields:
    """The fields of a plan.

    Attributes:
        pp, dp, cp, tp, ep: ranks along each axis.
        num_microbatches: of each data rank and step.
        schedule: a name of `schedules.names()`; without pp the microbatches run one after another.
        chunks: stages per rank, for schedules that let one choose.
        zero: 0 to 3, the stage of ZeRO over the ranks of dp, cp and ep together.
        hybrid: ZeRO shards within a node and replicates across nodes; needs `ranks_per_node`.
        experts_in_data: the ranks of ep are a slice of those of dp and cp, not an axis of their own.
        sequence_parallel: between the layers, each rank of tp holds its shard of the tokens.
        layout: which positions of a sequence each rank of cp holds.
        recompute: keep only the input of each layer, and rerun its forward in the backward.
        loss_chunk: tokens whose logits exist at the same time in the loss (default: all of a microbatch).
        multi_token: lambda, the weight of a second token's loss; None for a model that predicts the next one alone.
        precision: of weights and gradients; bfloat16 has fp32 master weights.
        overlap: run the experts of a forward and of a backward as overlapped pairs.
        layers: the number of layers of each stage (default: `pp.partition`).
        order: the axes, outermost first; the last one is contiguous in rank.
        ranks_per_node: consecutive ranks that share a machine.

    Raises:
        ValueError: a value that has no meaning for any model.
    """

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
    multi_token: float | None = None

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
        _check_choice("zero", self.zero, (0, 1, 2, 3))
        _check_choice("layout", self.layout, LAYOUTS)
        _check_choice("precision", self.precision, PRECISIONS)
        object.__setattr__(self, "schedule", registered_name(self.schedule))
        if self.multi_token is not None and not _is_weight(self.multi_token):
            raise ValueError(
                f"the second token's loss has a finite weight above 0, got multi_token={self.multi_token!r}; use 0.3, "
                "or None for the next token alone"
            )
        self._check_lists()

    def _check_lists(self) -> None:
        from dualpipe_lab.topology import AXES

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
        """The grid; axes with one rank are left out, but for `dp` where no axis has more.

        Raises:
            ValueError: `ranks_per_node` does not divide the ranks, or `ep` the ranks of dp and cp.
        """
        from dualpipe_lab.topology import Topology

        axes = [(axis, size) for axis, size in self.sizes.items() if size > 1] or [("dp", 1)]
        if self.ep == 1 or not self.experts_in_data:
            return Topology(axes, ranks_per_node=self.ranks_per_node)
        data = self.dp * self.cp
        if data % self.ep:
            raise ValueError(
                f"experts_in_data shards the experts over the ranks of dp and cp, and ep must divide them, got ep "
                f"{self.ep} and dp {self.dp} x cp {self.cp} = {data}"
            )
        over = tuple(axis for axis, _ in axes if axis in ("dp", "cp"))
        return Topology(axes, edp=data // self.ep, experts_over=over, ranks_per_node=self.ranks_per_node)

    @property
    def program(self) -> "Program | None":
        """The program of the pipeline; None without pp.

        Raises:
            ValueError: the schedule cannot have these sizes.
        """
        return None if self.pp == 1 else _legal(*self._sizes)

    @property
    def _sizes(self) -> "_Sizes":
        return self.schedule, self.pp, self.num_microbatches, self.chunks

    @property
    def num_stages(self) -> int:
        """The number of stages of the model; 1 without pp."""
        return 1 if self.pp == 1 else _legal(*self._sizes).num_stages

    def stages(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a rank of pp."""
        return (0,) if self.pp == 1 else _stages(*self._sizes)[pp_rank]

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of pp that hold a stage: under DualPipe two."""
        return (0,) if self.pp == 1 else _holders(*self._sizes)[stage]

    @property
    def has_pairs(self) -> bool:
        """Whether the pipeline has overlapped pairs of a forward and a backward."""
        return self.pp > 1 and _has_pairs(*self._sizes)

    def describe(self) -> dict[str, Any]:
        """Return the fields as JSON values.

        >>> PlanFields.from_description(PlanFields(dp=2).describe()) == PlanFields(dp=2)
        True
        """
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def from_description(cls: type[Fields], description: Mapping[str, Any]) -> Fields:
        """Return the plan that `describe` has described; a field that is missing has its default.

        Raises:
            ValueError: an unknown field, or a value that has no meaning.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(description) - set(known))
        if unknown:
            raise ValueError(f"a plan has no field {', '.join(unknown)}; it has {', '.join(known)}")
        return cls(**description)

    def __str__(self) -> str:
        parts = [f"{axis} {size}{self._notes(axis)}" for axis, size in self.sizes.items() if size > 1] or ["dp 1"]
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return ", ".join([f"{' x '.join(parts)} = {ranks}", *self._tail(), self.precision])

    def _notes(self, axis: str) -> str:
        notes = {"pp": self._pipeline(), "cp": [self.layout], "dp": self._zero()}.get(axis, [])
        if axis == "tp" and self.sequence_parallel:
            notes = ["sequence parallel"]
        return f" ({', '.join(notes)})" if notes else ""

    def _pipeline(self) -> list[str]:
        chunks = [] if self.chunks is None else [f"{self.chunks} stages per rank"]
        layers = [] if self.layers is None else [f"layers {' '.join(map(str, self.layers))}"]
        return [self.schedule, f"m {self.num_microbatches}", *chunks, *layers]

    def _zero(self) -> list[str]:
        return [f"{'hybrid ' if self.hybrid else ''}ZeRO-{self.zero}"] if self.zero else []

    def _tail(self) -> list[str]:
        """Return the fields that are printed after the axes."""
        tail = [f"m {self.num_microbatches}"] if self.pp == 1 and self.num_microbatches > 1 else []
        tail += self._zero() if self.dp == 1 else []
        tail += [f"ep {self.ep} within the data ranks"] if self.experts_in_data and self.ep > 1 else []
        tail += [f"{self.ranks_per_node} ranks per node"] if self.ranks_per_node else []
        tail += [] if self.loss_chunk is None else [f"loss in chunks of {self.loss_chunk} tokens"]
        tail += [] if self.multi_token is None else [f"a second token of weight {self.multi_token:g}"]
        return tail + ["recompute"] * self.recompute + ["overlapped experts"] * self.overlap


@cache
def registered_name(schedule: str) -> str:
    """Return a schedule's name as the registry lists it; ValueError for an unknown one.

    >>> registered_name("DualPipe V")
    'dualpipev'
    """
    from dualpipe_lab.pp import schedules

    wanted = schedules.builder(schedule)
    return next(name for name in schedules.names() if schedules.builder(name) is wanted)


@cache
def is_synchronous(schedule: str) -> bool:
    """Return whether a schedule computes the gradient with one version of the weights."""
    from dualpipe_lab.pp import schedules

    return schedules.is_synchronous(schedule)


@cache
def _lets_choose(schedule: str) -> bool:
    from dualpipe_lab.pp import schedules

    return "num_virtual_stages" in schedules.options_of(schedule)


_Sizes: TypeAlias = tuple[str, int, int, int | None]  # schedule, pp, microbatches, chunks


@cache
def _program(schedule: str, pp: int, num_microbatches: int, chunks: int | None) -> "Program | str":
    """Build a program with `chunks` stages per rank, or say why there is none: a search asks again and again."""
    from dualpipe_lab.pp import schedules

    options = {"num_virtual_stages": chunks} if chunks is not None and _lets_choose(schedule) else {}
    try:
        program = schedules.build(schedule, pp, num_microbatches, **options)
    except ValueError as error:
        return str(error)
    if chunks is None or program.num_stages == chunks * pp:
        return program
    free = ", ".join(name for name in schedules.names(synchronous=True) if _lets_choose(name))
    return (
        f"{schedule} has {program.num_stages} stages on {pp} ranks, got chunks={chunks}; leave chunks out, or use one "
        f"of {free}"
    )


def _legal(schedule: str, pp: int, num_microbatches: int, chunks: int | None) -> "Program":
    program = _program(schedule, pp, num_microbatches, chunks)
    if isinstance(program, str):
        raise ValueError(program)
    return program


@cache
def _stages(schedule: str, pp: int, num_microbatches: int, chunks: int | None) -> tuple[tuple[int, ...], ...]:
    program = _legal(schedule, pp, num_microbatches, chunks)
    return tuple(tuple(sorted({action.stage for action in program.actions(rank)})) for rank in range(pp))


@cache
def _has_pairs(schedule: str, pp: int, num_microbatches: int, chunks: int | None) -> bool:
    from dualpipe_lab.pp.program import Overlap

    program = _legal(schedule, pp, num_microbatches, chunks)
    return any(isinstance(step, Overlap) for steps in program.ranks for step in steps)


@cache
def _holders(schedule: str, pp: int, num_microbatches: int, chunks: int | None) -> dict[int, tuple[int, ...]]:
    ranks: dict[int, list[int]] = {}
    for rank, stages in enumerate(_stages(schedule, pp, num_microbatches, chunks)):
        for stage in stages:
            ranks.setdefault(stage, []).append(rank)
    return {stage: tuple(found) for stage, found in ranks.items()}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if type(value) is not type(choices[0]) or value not in choices:
        raise ValueError(f"a plan's {name} is one of {', '.join(map(str, choices))}, got {value!r}")
