"""`memory`: the memory of every rank at the peak of its own list of actions, before a run and without an accelerator.

Chapter: book/whole/plan-your-run.  In: a model, a plan, the shape of a step.  Out: bytes of every rank, by kind.
  states        parameters, gradients, master weights, moments        `dualpipe_lab.plan.states`
  activations   of a rank's stages: what each of its forwards keeps, from that F to its B, or to its W where the
                backward is split, in the order of its own actions    `dualpipe_lab.plan.kept`
  logits        from the last stage's F to its backward
  working       while an action runs: the loss, then the head's gradients, then a layer's
  buffers       of ZeRO-2 two buckets of gradients, of ZeRO-3 the weights and gradients of two units
All of it by the rules of this library's runtime.  Along ep every rank is as full as the fullest one: `imbalance`.
Not in it: the buffers of ring attention, and what an allocator or a library of messages takes on top.  An I may free
some of an activation that is counted until its W.
Elsewhere: Megatron `theoretical_memory_usage.py`; SimuMax; llm-analysis.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dualpipe_lab.plan.fields import text_table
from dualpipe_lab.pp.program import Action, B, F, I, W

if TYPE_CHECKING:
    from dualpipe_lab.models.stage_rules import ModelConfig
    from dualpipe_lab.plan.kept import Tables
    from dualpipe_lab.plan.plan import Plan
    from dualpipe_lab.plan.states import ModelStates

Kept: TypeAlias = tuple[tuple[int, int], ...]  # by stage, microbatches


class KeptAt(NamedTuple):
    """An action, and by stage the microbatches that are kept while it runs."""

    action: Action
    kept: Kept


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks at one place along pp, cp and tp, in bytes: they are equal along the other axes.

    Attributes:
        states: between steps.
        peak_action: at which most is kept, as the program prints it; empty for a rank without actions.
        kept: at that action, by stage, the number of microbatches whose activations are kept.
        activations: of layers, embedding, last norm and head.
        logits: of the last stage.
        working: on top, while the action runs.
        buffers: of ZeRO.
    """

    states: "ModelStates"
    peak_action: str
    kept: Kept
    activations: int
    logits: int
    working: int
    buffers: int

    @property
    def total(self) -> int:
        """All bytes at the peak."""
        return self.states.total + self.activations + self.logits + self.working + self.buffers


@dataclass(frozen=True)
class Memory:
    """The memory of every rank under one plan; it prints as a table, one row for ranks that are equal.

    Attributes:
        plan: that it is for.
        places: by place along pp, cp and tp.
    """

    plan: "Plan"
    places: dict[tuple[int, int, int], RankMemory]

    def of(self, rank: int) -> RankMemory:
        """Return the memory of a rank.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.plan.world_size:
            raise ValueError(f"the plan has ranks 0 to {self.plan.world_size - 1}, got {rank}")
        here = self.plan.topology.coordinates(rank)
        return self.places[here.get("pp", 0), here.get("cp", 0), here.get("tp", 0)]

    @property
    def ranks(self) -> list[RankMemory]:
        """The memory of every rank, in order."""
        return [self.of(rank) for rank in range(self.plan.world_size)]

    @cached_property
    def largest(self) -> RankMemory:
        """The memory of the first of the ranks that need most."""
        return max(self.places.values(), key=lambda one: one.total)

    def fits(self, num_bytes: float) -> bool:
        """Return whether every rank needs at most `limit` bytes."""
        return self.largest.total <= num_bytes

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("ranks", "states", "activations", "logits", "working", "buffers", "total", "peak at", "kept")
        ]
        alike: dict[RankMemory, list[tuple[int, int, int]]] = {}
        for place, one in self.places.items():
            alike.setdefault(one, []).append(place)
        for one, places in alike.items():
            along = zip(("pp", "cp", "tp"), zip(*places, strict=True), strict=True)
            names = [f"{axis} {_spans(sorted(set(ranks)))}" for axis, ranks in along if self.plan.sizes[axis] > 1]
            parts = one.states.total, one.activations, one.logits, one.working, one.buffers, one.total
            kept = " ".join(f"{stage}:{count}" for stage, count in one.kept)
            rows.append((", ".join(names) or "all", *(f"{part / 1e9:.2f}" for part in parts), one.peak_action, kept))
        return f"{self.plan}; GB\n{text_table(rows)}"


def memory(
    model: "ModelConfig", plan: "Plan", sequence_length: int, global_batch: int, *, imbalance: float = 1.0
) -> Memory:
    """Return the memory of every rank of a plan.

    Args:
        model: a `LlamaConfig` or a `V3MoEConfig`.
        plan: that fits it.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step, over all data ranks and microbatches.
        imbalance: tokens for the experts of a rank, divided by their mean.

    Raises:
        ValueError: as `Plan.check`, sequences that do not divide, or an imbalance below 1.

    >>> from dualpipe_lab.models import LlamaConfig
    >>> from dualpipe_lab.plan import Plan
    >>> llama3_8b = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
    >>> plan = Plan(dp=8, zero=1, num_microbatches=2, precision="bfloat16")
    >>> found = memory(llama3_8b, plan, sequence_length=8192, global_batch=16)
    >>> states = found.of(0).states
    >>> states.parameters, states.moments, found.fits(80e9)
    (16060522496, 8030261248, False)
    """
    is_number = isinstance(imbalance, int | float) and not isinstance(imbalance, bool)
    if not is_number or not 1 <= imbalance < inf:
        raise ValueError(f"the fullest rank has the mean of tokens or more, got imbalance={imbalance!r}; use 1 or more")
    plan.check(model, sequence_length)
    return Memory(plan, dict(RankMemories(model, plan, sequence_length, global_batch, imbalance).places()))


def fitting_bytes(
    model: "ModelConfig", plan: "Plan", sequence_length: int, global_batch: int, most: float
) -> int | None:
    """Return the bytes of the fullest rank of a legal plan, or None where they are more than `most`."""
    largest = 0
    for _, one in RankMemories(model, plan, sequence_length, global_batch, 1.0).places(every=False):
        if one.total > most:
            return None
        largest = max(largest, one.total)
    return largest


class RankMemories:
    """The memory of each place: states by pp and tp, tables by cp and tp, peaks by the program."""

    def __init__(
        self, model: "ModelConfig", plan: "Plan", sequence_length: int, global_batch: int, imbalance: float
    ) -> None:
        from dualpipe_lab.plan.rules import has_second, lengths_of
        from dualpipe_lab.plan.traffic import check_traffic

        self.model, self.num_rows, self.imbalance = model, check_traffic(plan, global_batch), imbalance
        self.lengths = lengths_of(plan, sequence_length)
        self.layers = [list(layers) for layers in plan.stage_layers(model)]
        self.plan = replace(plan, layers=tuple(map(len, self.layers)))  # the search for the best split takes its time
        self.has_second = has_second(plan, model)
        if self.has_second:
            self.layers[-1].append(model.num_layers)
        self._known: dict[tuple[object, ...], tuple[ModelStates, int]] = {}  # by what a place holds

    def places(self, every: bool = True) -> Iterator[tuple[tuple[int, int, int], RankMemory]]:
        """Yield every place along pp, cp and tp with its memory; or of cp and tp only one of the fullest ranks."""
        from dualpipe_lab.plan.kept import Tables

        fullest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        cp_ranks = range(len(self.lengths)) if every else (fullest,)
        tp_ranks = range(self.plan.tp if every else 1)
        tables = {
            (length, tp_rank): Tables.of(self.model, self.plan, self.num_rows, length, tp_rank, self.imbalance)
            for length in {self.lengths[cp_rank] for cp_rank in cp_ranks}
            for tp_rank in tp_ranks
        }
        for pp_rank in range(self.plan.pp):
            moments = kept_counts(self.plan, pp_rank)
            stages = {moment.action.stage for moment in moments}
            for tp_rank in tp_ranks:
                states, buffers = self._held(pp_rank, tp_rank, stages)
                for cp_rank in cp_ranks:
                    table = tables[self.lengths[cp_rank], tp_rank]
                    action, kept, activations, logits, working = self._peak(moments, table)
                    one = RankMemory(states, action, kept, activations, logits, working, buffers)
                    yield (pp_rank, cp_rank, tp_rank), one

    def _peak(self, moments: "Sequence[KeptAt]", tables: "Tables") -> tuple[str, Kept, int, int, int]:
        """Return the first of the moments at which most is kept: action, counts, activations, logits, working bytes."""
        tensors = {stage: self.stage(stage, tables) for stage in {moment.action.stage for moment in moments}}
        best: tuple[str, Kept, int, int, int] = ("", (), 0, 0, 0)
        for action, held in moments:
            activations, logits = (sum(count * tensors[stage][part] for stage, count in held) for part in (0, 1))
            found = str(action), held, activations, logits, self._working(action, tables, tensors[action.stage][1])
            best = max(best, found, key=lambda peak: sum(peak[2:]))
        return best

    def stage(self, stage: int, tables: "Tables") -> tuple[int, int]:
        """Return the bytes that a forward of a stage keeps: activations, logits."""
        dense, is_last = tables.dense, self._is_last(stage)
        ends = list(dense.first()) if stage == 0 else []
        ends += dense.last() if is_last else []
        ends += dense.second(stage > 0) if is_last and self.has_second else []
        logits = sum(tensor.num_bytes for tensor in ends if tensor.name == "logits")
        layers = sum(tables.layer(number).stored_bytes for number in self.layers[stage])
        others = sum(tensor.num_bytes for tensor in ends) - logits
        if self.plan.overlap:  # such stages keep an output to its backward, of logits their gradient
            others += dense.output_grad_bytes if is_last else dense.boundary_bytes
        return layers + others, logits

    def _working(self, action: Action, tables: "Tables", logits: int) -> int:
        """Return the bytes that an action takes while it runs, above what is kept when it begins.

        A backward goes through the loss, the head, which frees the logits, and layers, of which one may be run again.
        """
        is_last, is_backward = self._is_last(action.stage), action.kind in (B, I)
        phases = [tables.dense.loss_bytes] if is_last and action.kind != W else [0]
        if is_last and is_backward:
            phases.append(tables.dense.head_bytes - logits)
        for table in tables.of_layers(self.layers[action.stage]) if is_backward else ():
            phases.append(table.working_bytes - (logits if is_last else 0))
        return max(phases)

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.layers) - 1

    def _held(self, pp_rank: int, tp_rank: int, stages: set[int]) -> "tuple[ModelStates, int]":
        """Return the states of a place and its buffers; ranks whose stages have the same layers have the same."""
        from dualpipe_lab.plan.gradient_traffic import parts_at
        from dualpipe_lab.plan.states import buffer_bytes, flat_layouts, states_of

        num_dense = getattr(self.model, "num_dense_layers", 0)
        sizes = tuple(
            (
                (stage == 0, self._is_last(stage), self.plan.holders(stage)[0] == pp_rank),
                (len(self.layers[stage]), sum(number < num_dense for number in self.layers[stage])),
            )
            for stage in sorted(stages)
        )
        if (tp_rank, sizes) not in self._known:
            layouts = flat_layouts(self.plan, parts := parts_at(self.plan, self.model, pp_rank, tp_rank))
            states = states_of(self.plan, sum(part.numel for part in parts), layouts)
            self._known[tp_rank, sizes] = states, buffer_bytes(self.plan, layouts)
        return self._known[tp_rank, sizes]


def kept_counts(plan: "Plan", pp_rank: int) -> tuple[KeptAt, ...]:
    """Return the moments of a rank of pp at which its memory can be largest, in their order.

    At an action a rank keeps the activations of every F that has not met its B, or its W where the backward is split,
    and takes what the action itself works with, which depends on its stage and kind.  So of all actions of one stage
    and kind only those matter at which no other keeps at least as much of every stage.
    Without pp one microbatch follows the other, and all peaks are those of the first.

    >>> from dualpipe_lab.plan import Plan
    >>> found = kept_counts(Plan(pp=4, num_microbatches=8), 1)
    >>> [(str(moment.action), moment.kept) for moment in found]
    [('1F2', ((1, 3),)), ('1B0', ((1, 3),))]
    """
    if plan.pp == 1:
        return KeptAt(Action(0, F, 0), ((0, 1),)), KeptAt(Action(0, B, 0), ((0, 1),))
    return _kept_counts(plan.schedule, plan.pp, plan.num_microbatches, plan.chunks, pp_rank)


@lru_cache(maxsize=4096)
def _kept_counts(schedule: str, pp: int, num_microbatches: int, chunks: int | None, pp_rank: int) -> tuple[KeptAt, ...]:
    from dualpipe_lab.plan.plan import Plan

    program = Plan(pp=pp, num_microbatches=num_microbatches, schedule=schedule, chunks=chunks).program
    assert program is not None
    kept: dict[int, int] = {}
    firsts: dict[tuple[int, str], dict[tuple[tuple[int, ...], Kept], tuple[int, Action]]] = {}
    for index, action in enumerate(program.actions(pp_rank)):
        if action.kind == F:
            kept[action.stage] = kept.get(action.stage, 0) + 1
        now = tuple((stage, count) for stage, count in sorted(kept.items()) if count)
        key = tuple(stage for stage, _ in now), now
        firsts.setdefault((action.stage, action.kind), {}).setdefault(key, (index, action))
        if action.kind in (B, W):
            kept[action.stage] -= 1
    found = []
    for moments in firsts.values():
        for (stages, now), (index, action) in moments.items():
            others = (other for held, other in moments if held == stages and other != now)
            if not any(all(one[1] >= mine[1] for one, mine in zip(other, now, strict=True)) for other in others):
                found.append((index, KeptAt(action, now)))
    return tuple(moment for _, moment in sorted(found))


def _spans(numbers: list[int]) -> str:
    """Return ascending numbers as text.

    >>> _spans([0, 1, 2, 5])
    '0-2 5'
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda one: one[1] - one[0])]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
