"""`memory`: the memory of every rank at the peak of its own list of actions, before a run and without an accelerator.

Chapter: book/whole/plan-your-run, book/dp/zero-3.  In: a model, a plan, the shape of a step.  Out: bytes of every rank.
  states        weights, gradients, masters and moments in flat buffers: `model_states`
  activations   what each forward of a rank's stages saves, from its F to its B, or to its W where the backward is split
  logits        from the last stage's F to its backward
  working       while an action runs: the loss, then the head's gradients, then a layer's
  buffers       of ZeRO-2 two buckets of gradients, of ZeRO-3 the weights and gradients of two units
Not in it: the buffers of ring attention, and what an allocator or a library of messages takes on top.
Elsewhere: Megatron `theoretical_memory_usage.py`; SimuMax; llm-analysis; DeepSpeed's estimators.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), sections 3.1 and 5.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from dualpipe_lab.plan.fields import NUMBER_BYTES, text_table
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.pp.program import Action, B, F, I, W

if TYPE_CHECKING:  # they import models
    from dualpipe_lab.models.stage_rules import ModelConfig
    from dualpipe_lab.plan.saved_activations import Tables

Kept: TypeAlias = tuple[tuple[int, int], ...]  # by stage, microbatches
KeptAt: TypeAlias = tuple[Action, Kept]  # what is kept while an action runs
Peak: TypeAlias = tuple[str, Kept, int, int, int]  # action, kept there; bytes: activations, logits, working


class ModelStates(NamedTuple):
    """Bytes that one rank holds between steps, in flat buffers with their padding."""

    num_parameters: int  # elements, without padding and before ZeRO shards them
    parameters: int
    gradients: int
    masters: int
    moments: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self[1:])


@dataclass(frozen=True)
class RankMemory:
    """The memory of the ranks at one place along pp, cp and tp, in bytes: they are equal along the other axes."""

    states: ModelStates  # between steps
    peak_action: str  # at which most is kept, as the program prints it; empty for a rank without actions
    kept: Kept  # at that action, by stage, the number of microbatches whose activations are kept
    activations: int  # of layers, embedding, last norm and head
    logits: int  # of the last stage
    working: int  # on top, while the action runs
    buffers: int  # of ZeRO

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

    plan: Plan
    places: dict[tuple[int, int, int], RankMemory]

    def of(self, rank: int) -> RankMemory:
        """Return the memory of a rank; ValueError if there is no such rank."""
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
        """Return whether every rank needs at most so many bytes."""
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


def memory(model: "ModelConfig", plan: Plan, sequence_length: int, global_batch: int) -> Memory:
    """Return the memory of every rank of a plan; experts have as many rows on each rank as on average.

    Args:
        model: a `LlamaConfig` or a `V3MoEConfig`.
        plan: that fits it.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step, over all data ranks and microbatches.

    Raises:
        ValueError: as `Plan.check`, or sequences that do not divide.

    >>> from dualpipe_lab.models import LlamaConfig
    >>> llama3_8b = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
    >>> plan = Plan(dp=8, zero=1, num_microbatches=2, precision="bfloat16")
    >>> found = memory(llama3_8b, plan, sequence_length=8192, global_batch=16)
    >>> states = found.of(0).states
    >>> states.parameters, states.moments, found.fits(80e9)
    (16060522496, 8030261248, False)
    """
    plan.check(model, sequence_length)
    return Memory(plan, dict(RankMemories(model, plan, sequence_length, global_batch).places()))


def fitting_bytes(model: "ModelConfig", plan: Plan, sequence_length: int, global_batch: int, most: float) -> int | None:
    """Return the bytes of the fullest rank of a legal plan, or None where they are more than `most`."""
    largest = 0
    for _, one in RankMemories(model, plan, sequence_length, global_batch).places(every=False):
        if one.total > most:
            return None
        largest = max(largest, one.total)
    return largest


class RankMemories:
    """The memory of each place: states by pp and tp, tables by cp and tp, peaks by the program."""

    def __init__(self, model: "ModelConfig", plan: Plan, sequence_length: int, global_batch: int) -> None:
        from dualpipe_lab.plan.rules import has_mtp, lengths_of
        from dualpipe_lab.plan.traffic import check_traffic

        self.model, self.num_rows = model, check_traffic(plan, global_batch)
        self.lengths = lengths_of(plan, sequence_length)
        self.layers = [list(layers) for layers in plan.stage_layers(model)]
        self.plan = replace(plan, layers=tuple(map(len, self.layers)))  # the search for the best split takes its time
        self.has_mtp = has_mtp(plan, model)
        if self.has_mtp:
            self.layers[-1].append(model.num_layers)

    def places(self, every: bool = True) -> Iterator[tuple[tuple[int, int, int], RankMemory]]:
        """Yield (pp, cp, tp) and the memory of that rank; `every=False`: per pp rank only the fullest."""
        from dualpipe_lab.plan.saved_activations import Tables

        fullest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        cp_ranks = range(len(self.lengths)) if every else (fullest,)
        tp_ranks = range(self.plan.tp if every else 1)
        tables = {
            (length, tp_rank): Tables.of(self.model, self.plan, self.num_rows, length, tp_rank)
            for length in {self.lengths[cp_rank] for cp_rank in cp_ranks}
            for tp_rank in tp_ranks
        }
        for pp_rank in range(self.plan.pp):
            moments = kept_counts(self.plan, pp_rank)
            for tp_rank in tp_ranks:
                states = model_states(self.model, self.plan, pp_rank, tp_rank)
                buffers = buffer_bytes(self.model, self.plan, pp_rank, tp_rank)
                for cp_rank in cp_ranks:
                    peak = self._peak(moments, tables[self.lengths[cp_rank], tp_rank])
                    yield (pp_rank, cp_rank, tp_rank), RankMemory(states, *peak, buffers)

    def _peak(self, moments: Sequence[KeptAt], tables: "Tables") -> Peak:
        """Return the first of the moments at which most is kept."""
        tensors = {stage: self.stage(stage, tables) for stage in {action.stage for action, _ in moments}}
        best: Peak = ("", (), 0, 0, 0)
        for action, held in moments:
            activations, logits = (sum(count * tensors[stage][part] for stage, count in held) for part in (0, 1))
            found = str(action), held, activations, logits, self._working(action, tables, tensors[action.stage][1])
            best = max(best, found, key=lambda peak: sum(peak[2:]))
        return best

    def stage(self, stage: int, tables: "Tables") -> tuple[int, int]:
        """Return the bytes that a forward of a stage keeps: activations, logits."""
        dense, is_last = tables.dense, self._is_last(stage)
        ends = [dense.first()] if stage == 0 else []
        ends += [dense.last()] if is_last else []
        ends += [dense.mtp(stage > 0)] if is_last and self.has_mtp else []
        logits = sum(end.get("logits", 0) for end in ends)
        layers = sum(tables.layer(number).stored_bytes for number in self.layers[stage])
        others = sum(sum(end.values()) for end in ends) - logits
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


def model_states(model: "ModelConfig", plan: Plan, pp_rank: int = 0, tp_rank: int = 0) -> ModelStates:
    """Return the states of the ranks at a place along pp and tp: they are equal along all other axes.

    Of n elements in flat buffers, each padded for the N ranks with copies of its parameters (fewer for an expert's), a
    rank of ZeRO-1 has n / N of masters and moments, of ZeRO-2 of gradients too, of ZeRO-3 of all.  A rank with two
    stages counts both, and a table of two stages counts on both.
    """
    numels, full, shard = map(sum, zip(*_flat_buffers(model, plan, pp_rank, tp_rank), strict=True))
    parameter, gradient, master, moments = NUMBER_BYTES[plan.precision]
    held = shard if plan.zero else full
    weights, gradients = (shard if plan.zero == 3 else full), (shard if plan.zero > 1 else full)
    return ModelStates(numels, weights * parameter, gradients * gradient, held * master, held * moments)


def buffer_bytes(model: "ModelConfig", plan: Plan, pp_rank: int, tp_rank: int) -> int:
    """Return the bytes of ZeRO's two largest buckets of gradients, or units of weights and gradients."""
    if plan.zero < 2:
        return 0
    parameter, gradient, _, _ = NUMBER_BYTES[plan.precision]
    padded = sorted(full for _, full, _ in _flat_buffers(model, plan, pp_rank, tp_rank))
    return sum(padded[-2:]) * (gradient + parameter * (plan.zero == 3))


def _flat_buffers(model: "ModelConfig", plan: Plan, pp_rank: int, tp_rank: int) -> list[tuple[int, int, int]]:
    """Return the elements of every flat buffer: without padding, with it, and of a shard."""
    from dualpipe_lab.dp.sums import copy_ranks
    from dualpipe_lab.plan.parameters import buffers_at

    shards = plan.num_copies, plan.num_copies // plan.ep
    if plan.hybrid:  # within a node
        here = plan.topology.at(0)
        shards = len(copy_ranks(here, plan.copy_axes, True)[0]), len(copy_ranks(here, plan.expert_copy_axes, True)[0])
    found = []
    for numel, has_experts in buffers_at(plan, model, pp_rank, tp_rank):
        size = -(-numel // shards[has_experts])
        found.append((numel, size * shards[has_experts], size))
    return found


def kept_counts(plan: Plan, pp_rank: int) -> tuple[KeptAt, ...]:
    """Return the moments of a rank of pp at which its memory can be largest, in their order.

    What an action works with depends on its stage and kind.  So of all actions of one stage and kind only those matter
    at which no other keeps at least as much of every stage.  Without pp all peaks are those of the first microbatch.
    """
    if plan.pp == 1:
        return (Action(0, F, 0), ((0, 1),)), (Action(0, B, 0), ((0, 1),))
    return _kept_counts(plan.schedule, plan.pp, plan.num_microbatches, plan.chunks, pp_rank)


@lru_cache(maxsize=4096)
def _kept_counts(schedule: str, pp: int, num_microbatches: int, chunks: int | None, pp_rank: int) -> tuple[KeptAt, ...]:
    program = Plan(pp=pp, num_microbatches=num_microbatches, schedule=schedule, chunks=chunks).program
    assert program is not None
    kept: dict[int, int] = {}
    firsts: dict[tuple[int, str], dict[Kept, tuple[int, Action]]] = {}
    for index, action in enumerate(program.actions(pp_rank)):
        if action.kind == F:
            kept[action.stage] = kept.get(action.stage, 0) + 1
        now = tuple((stage, count) for stage, count in sorted(kept.items()) if count)
        firsts.setdefault((action.stage, action.kind), {}).setdefault(now, (index, action))
        if action.kind in (B, W):  # an I may free some before, which is not counted
            kept[action.stage] -= 1
    found = []
    for moments in firsts.values():
        for now, (index, action) in moments.items():
            others = (dict(other) for other in moments if other != now)
            if not any(all(other.get(stage, 0) >= count for stage, count in now) for other in others):
                found.append((index, (action, now)))
    return tuple(moment for _, moment in sorted(found))


def _spans(numbers: list[int]) -> str:
    """Return ascending numbers as text, such as 0-2 5."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda one: one[1] - one[0])]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
