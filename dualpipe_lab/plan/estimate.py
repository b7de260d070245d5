"""`estimate`: the memory of every rank at the peak of its own list of actions, before a run and without an accelerator.

In: a model, a plan, a cluster, the shape of a step.  Out: bytes by what they are, each exact, assumed or fitted.
  states         parameters, gradients, master weights, moments: exact, `dualpipe_lab.plan.states`
  activations    of a rank's stages: what each of its forwards keeps, from that F to its B, or to its W where the
                 backward is split, in the order of its own actions: `dualpipe_lab.plan.kept_tensors`
  working        while an action runs: the loss, then the head's gradients, then a layer's: assumed
  received       inputs from other stages and their gradients that a framework holds until the next ones: assumed
  buffers        of ZeRO-2 two buckets of gradients, of ZeRO-3 the weights and gradients of two units, and what a
                 framework keeps for the gradients of weights and for products: assumed
  reserve        what allocator and driver take: fitted, `dualpipe_lab.plan.rank_memory`
The tokens of a rank's experts are assumed under ep: `imbalance` times their mean, which does not depend on ep.
Not in it: time; the buffers of ring attention; memory that a library takes for its messages beyond the reserve.  That
all of an activation lives to the W of a split backward is assumed: an I may free a part of it.
Elsewhere: Megatron `theoretical_memory_usage.py`; SimuMax; llm-analysis.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.kept_experts import EXPERTS, Tables, held_model
from dualpipe_lab.plan.kept_second import second_tensors, second_weights
from dualpipe_lab.plan.kept_tensors import LAB, Certainty, KeepRules, KeptTensor
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rank_memory import Peak, RankMemory
from dualpipe_lab.plan.rules import has_second
from dualpipe_lab.plan.states import AnyModel, ModelStates, NumberBytes, flat_layouts, model_states, parts_of_place
from dualpipe_lab.plan.traffic import check_traffic
from dualpipe_lab.pp.program import Action, B, F, I, W

_GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """The memory of every rank under one plan; it prints as a table, one row for ranks that are equal.

    Attributes:
        model, plan, cluster, sequence_length, global_batch, rules: what it is for.
        places: by place along pp, cp and tp.
    """

    model: AnyModel
    plan: Plan
    cluster: Cluster
    sequence_length: int
    global_batch: int
    rules: KeepRules
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
        return max(self.places.values(), key=lambda one: one.allocated)

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory, with the reserve as it is in the median."""
        return self.largest.total.num_bytes <= self.cluster.accelerator.memory_bytes

    def bytes_by_link(self) -> dict[str, int]:
        """Return the bytes that all ranks send in a step, inside of nodes and between them: `Plan.traffic`.

        The time grows with the number of ranks: a second or two for 64.

        Raises:
            ValueError: a GPT, which no runtime here trains.
        """
        if isinstance(self.model, GptConfig):
            raise ValueError(
                "messages are counted for models that the runtime trains, got a GptConfig; use LlamaConfig"
            )
        ledger = self.plan.traffic(self.model, self.global_batch, self.sequence_length).ledger
        between = ledger.between_nodes(min(self.cluster.ranks_per_node, self.plan.world_size))
        return {"inside": ledger.sent() - between, "between": between}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("ranks", "states", "activations", "logits", "working", "allocated", "with reserve", "peak at", "kept")
        ]
        for memory, places in self._rows():
            peak, kept = memory.peak, " ".join(f"{stage}:{count}" for stage, count in memory.peak.kept)
            working = peak.working + peak.received + memory.buffers
            parts = memory.states.total, peak.layers + peak.ends, peak.logits, working
            cells = [f"{part / _GIB:.2f}" for part in (*parts, memory.allocated, memory.total.num_bytes)]
            rows.append((places, *cells, peak.action, kept))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"{self.plan}; {self.rules.name}; GiB", *lines])

    def _rows(self) -> Iterator[tuple[RankMemory, str]]:
        """Yield the memories that differ, with their places."""
        found: dict[tuple[ModelStates, Peak], list[RankMemory]] = {}
        for memory in self.places.values():
            found.setdefault((memory.states, memory.peak), []).append(memory)
        for same in found.values():
            axes = [axis for axis in ("pp", "cp", "tp") if self.plan.sizes[axis] > 1]
            names = [f"{axis} {_spans(sorted({getattr(one, f'{axis}_rank') for one in same}))}" for axis in axes]
            yield same[0], ", ".join(names) or "all"


def estimate(
    model: AnyModel,
    plan: Plan,
    cluster: Cluster,
    sequence_length: int,
    global_batch: int,
    rules: KeepRules = LAB,
    numbers: NumberBytes | None = None,
    imbalance: float = 1.0,
) -> Estimate:
    """Return the memory of every rank of a plan.

    Args:
        model: a `LlamaConfig`, a `V3MoEConfig` or a `GptConfig`.
        plan: for as many ranks as the cluster has.
        cluster: whose accelerators have the memory.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step, over all data ranks and microbatches.
        rules: what the framework keeps for the backward (default: this library).
        numbers: bytes per parameter (default: those of the plan's precision).
        imbalance: tokens for the experts of a rank, divided by their mean: every rank is as full as the fullest one.

    Raises:
        ValueError: as `Plan.check`, sequences that do not divide, or an imbalance below 1.

    >>> from dualpipe_lab.models import LlamaConfig
    >>> llama3_8b = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
    >>> plan = Plan(dp=8, zero=1, num_microbatches=2, precision="bfloat16")
    >>> found = estimate(llama3_8b, plan, Cluster.of("h100", 8), sequence_length=8192, global_batch=16)
    >>> print(*found.of(0).figures[:4], found.fits, sep="; ")
    parameters 14.96 GiB (exact); gradients 29.92 GiB (exact); masters 3.74 GiB (exact); moments 7.48 GiB (exact); False
    """
    if not 1 <= imbalance < inf:
        raise ValueError(f"the fullest rank has the mean of tokens or more, got imbalance={imbalance}; use 1 or more")
    plan.check(model.outline if isinstance(model, GptConfig) else model, sequence_length, cluster.num_ranks)
    plan = _with_nodes(plan, cluster)
    num_rows = check_traffic(plan, global_batch)
    maker = _Maker(model, plan, rules, num_rows, _lengths(plan, sequence_length), numbers, imbalance)
    return Estimate(model, plan, cluster, sequence_length, global_batch, rules, dict(maker.places()))


class _Maker:
    """The memory of each place: states by pp and tp, tables by cp and tp, peaks by the program."""

    def __init__(
        self,
        model: AnyModel,
        plan: Plan,
        rules: KeepRules,
        num_rows: int,
        lengths: list[int],
        numbers: NumberBytes | None,
        imbalance: float,
    ) -> None:
        self.model, self.rules, self.num_rows, self.imbalance = model, rules, num_rows, imbalance
        self.lengths, self.numbers = lengths, numbers or NumberBytes.of(plan.precision)
        config = model.outline if isinstance(model, GptConfig) else model
        self.layers = [list(layers) for layers in plan.stage_layers(config)]
        # the search for the best split takes its time
        self.plan = replace(plan, layers=tuple(map(len, self.layers)))
        self.has_second = has_second(plan, config)
        if self.has_second:
            self.layers[-1].append(config.num_layers)
        self.held = held_model(model, plan, rules)

    def places(self) -> Iterator[tuple[tuple[int, int, int], RankMemory]]:
        """Yield every place along pp, cp and tp with its memory."""
        for pp_rank in range(self.plan.pp):
            actions = self._actions(pp_rank)
            is_split = any(action.kind == I for action in actions)  # an I may free what is counted until its W
            is_assumed = is_split or self.plan.overlap or self.plan.ep > 1  # the router sends the rows of ep
            certainty: Certainty = "assumed" if is_assumed else self.rules.certainty
            for tp_rank in range(self.plan.tp):
                states = model_states(self.held, self.plan, pp_rank, tp_rank, self.numbers)
                zero = self._buffers(pp_rank, tp_rank)
                for cp_rank, length in enumerate(self.lengths):
                    how = self.model, self.plan, self.rules, self.num_rows, length, tp_rank, self.imbalance
                    tables = Tables.of(*how)
                    peak, received = self._peak(actions, tables), self._received(Counter(), actions, tables)
                    place, staying = (pp_rank, cp_rank, tp_rank), self._staying(actions, tables)
                    yield place, RankMemory(*place, states, peak, zero + staying, certainty, staying + received)

    def _actions(self, pp_rank: int) -> list[Action]:
        program = self.plan.program
        if program is None:  # one microbatch after the other: all peaks are those of the first
            return [Action(0, F, 0), Action(0, B, 0)]
        return list(program.actions(pp_rank))

    def _peak(self, actions: list[Action], tables: Tables) -> Peak:
        """Walk through a rank's actions, and return what is kept when most is."""
        kept: Counter[int] = Counter()
        tensors = {stage: self._stage(stage, tables) for stage in {action.stage for action in actions}}
        best = Peak()
        for action in actions:
            if action.kind == F:
                kept[action.stage] += 1
            parts = [sum(count * tensors[stage][part] for stage, count in kept.items()) for part in range(3)]
            held = tuple(sorted((+kept).items()))
            working = self._working(action, tables, tensors[action.stage][2])
            received = self._received(kept, actions, tables)
            found = Peak(str(action), held, parts[0], parts[1], parts[2], working, received)
            best = max(best, found, key=lambda peak: peak.total)
            if action.kind in (B, W):
                kept[action.stage] -= 1
        return best

    def _received(self, kept: Counter[int], actions: list[Action], tables: Tables) -> int:
        """Return the bytes of old inputs and their gradients, of stages that keep the activations of no microbatch."""
        stages = {action.stage for action in actions} - {0}
        idle = [stage for stage in stages if self.rules.keeps_received and not kept[stage]]
        return 2 * len(idle) * tables.dense.boundary_bytes

    def _staying(self, actions: list[Action], tables: Tables) -> int:
        """Return the bytes of what stays for the gradients of a rank's weights, one of each shape, and for products."""
        stages, weights = {action.stage for action in actions}, dict[str, int]()
        for number in {number for stage in stages for number in self.layers[stage]}:
            weights |= tables.layer(number).weights
        products = self.rules.workspace_bytes
        if weights.keys() & EXPERTS:
            products += self.rules.expert_workspace_bytes
        if self.rules.weight_gradients == "one":
            return products
        weights = {name: size for name, size in weights.items() if self.rules.buffers_experts or name not in EXPERTS}
        if self._is_last(max(stages)):
            weights |= {"head": tables.dense.head_weight} if self.rules.buffers_head else {}
            weights |= second_weights(tables.dense) if self.has_second else {}
        return sum(weights.values()) * tables.dense.element + products

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.layers) - 1

    def _stage(self, stage: int, tables: Tables) -> tuple[int, int, int]:
        """Return the bytes that a forward of a stage keeps: layers, ends, logits."""
        ends: list[KeptTensor] = list(tables.dense.first()) if stage == 0 else []
        ends += tables.dense.last() if self._is_last(stage) else []
        ends += second_tensors(tables.dense, stage > 0) if self._is_last(stage) and self.has_second else []
        logits = sum(tensor.num_bytes for tensor in ends if tensor.name == "logits")
        others = sum(tensor.num_bytes for tensor in ends) - logits
        return sum(tables.layer(number).stored_bytes for number in self.layers[stage]), others, logits

    def _working(self, action: Action, tables: Tables, logits: int) -> int:
        """Return the bytes that an action takes while it runs, above what is kept when it begins.

        A backward goes through the loss, the head, which frees the logits, and layers, of which one may be run again.
        """
        is_last, is_backward = self._is_last(action.stage), action.kind in (B, I)
        phases = [tables.dense.loss_bytes] if is_last and action.kind != W else [0]
        if is_last and is_backward:
            phases.append(tables.dense.head_bytes - logits)
        for table in {tables.layer(number) for number in self.layers[action.stage]} if is_backward else ():
            again = table.layer_bytes - table.stored_bytes
            phases.append(table.backward_bytes + again - (logits if is_last else 0))
        return max(phases)

    def _buffers(self, pp_rank: int, tp_rank: int) -> int:
        """Return the bytes of the two largest buckets of gradients, or units of weights and gradients."""
        if self.plan.zero < 2:
            return 0
        layouts = flat_layouts(self.plan, parts_of_place(self.held, self.plan, pp_rank, tp_rank))
        largest = sum(sorted(layout.padded_numel for layout in layouts)[-2:])
        return largest * (self.numbers.gradient + self.numbers.parameter * (self.plan.zero == 3))


def _with_nodes(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with the cluster's nodes; a plan on one node has none."""
    size = min(cluster.ranks_per_node, cluster.num_ranks)
    if plan.ranks_per_node not in (None, size):
        raise ValueError(
            f"the cluster has {size} ranks per node, got a plan with ranks_per_node={plan.ranks_per_node}; leave it out"
        )
    return plan if plan.ranks_per_node else replace(plan, ranks_per_node=size)


def _lengths(plan: Plan, sequence_length: int) -> list[int]:
    """Return the tokens of a sequence on each rank of cp."""
    if plan.cp == 1:
        return [sequence_length]
    layout = make_layout(plan.layout, sequence_length, plan.cp)
    return [layout.size(rank) for rank in range(plan.cp)]


def _spans(numbers: list[int]) -> str:
    """Return ascending numbers as text.

    >>> _spans([0, 1, 2, 5])
    '0-2 5'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
