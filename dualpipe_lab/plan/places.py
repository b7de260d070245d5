"""The memory of each place along pp, cp and tp, at the moments of a rank's actions that can be its peak.

In: a model, a plan, rules for what is kept, the shape of a microbatch.  Out: a `RankMemory` per place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.kept_counts import KeptAt, kept_counts
from dualpipe_lab.plan.kept_experts import EXPERTS, Tables, held_model
from dualpipe_lab.plan.kept_second import second_tensors, second_weights
from dualpipe_lab.plan.kept_tensors import Certainty, KeepRules, KeptTensor
from dualpipe_lab.plan.memory import Peak, RankMemory
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_second
from dualpipe_lab.plan.states import (
    AnyModel,
    ModelStates,
    NumberBytes,
    config_of,
    flat_layouts,
    model_states,
    parts_of_place,
)
from dualpipe_lab.pp.program import Action, B, I, W


class MemoryMaker:
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
        config = config_of(model)
        self.layers = [list(layers) for layers in plan.stage_layers(config)]
        # the search for the best split takes its time
        self.plan = replace(plan, layers=tuple(map(len, self.layers)))
        self.has_second = has_second(plan, config)
        if self.has_second:
            self.layers[-1].append(config.num_layers)
        self.held = held_model(model, plan, rules.experts)
        self._known: dict[tuple[object, ...], tuple[ModelStates, int]] = {}  # by what a place holds
        self._known_tables: dict[tuple[int, int], Tables] = {}

    def places(self, every: bool = True) -> Iterator[tuple[tuple[int, int, int], RankMemory]]:
        """Yield every place along pp, cp and tp with its memory; or of cp and tp only the fullest ranks.

        The first rank of tp has the largest shards, and that of cp with the most tokens keeps most.
        """
        tp_ranks = range(self.plan.tp if every else 1)
        fullest = max(range(len(self.lengths)), key=self.lengths.__getitem__)
        cp_ranks = range(len(self.lengths)) if every else (fullest,)
        for pp_rank in range(self.plan.pp):
            moments = kept_counts(self.plan, pp_rank)
            is_split = any(moment.action.kind == I for moment in moments)  # an I may free what is counted until its W
            is_assumed = is_split or self.plan.ep > 1  # the router sends the rows of ep
            certainty: Certainty = "assumed" if is_assumed else self.rules.certainty
            stages = {moment.action.stage for moment in moments}
            for tp_rank in tp_ranks:
                states, zero = self._held(pp_rank, tp_rank, stages)
                for cp_rank in cp_ranks:
                    tables = self._tables(self.lengths[cp_rank], tp_rank)
                    peak, received = self._peak(moments, tables), self._received(stages, {}, tables)
                    place, staying = (pp_rank, cp_rank, tp_rank), self._staying(stages, tables)
                    yield place, RankMemory(*place, states, peak, zero + staying, certainty, staying + received)

    def _tables(self, length: int, tp_rank: int) -> Tables:
        """Return the tables of a place; they are the same on all ranks of pp."""
        key = length, tp_rank
        if key not in self._known_tables:
            how = self.model, self.plan, self.rules, self.num_rows, length, tp_rank, self.imbalance
            self._known_tables[key] = Tables.of(*how)
        return self._known_tables[key]

    def _peak(self, moments: Sequence[KeptAt], tables: Tables) -> Peak:
        """Return what is kept at the first of the moments at which most is."""
        stages = {moment.action.stage for moment in moments}
        tensors = {stage: self._stage(stage, tables) for stage in stages}
        working: dict[tuple[int, str], int] = {}
        best = Peak()
        for action, held in moments:
            parts = [sum(count * tensors[stage][part] for stage, count in held) for part in range(3)]
            key = action.stage, action.kind
            if key not in working:
                working[key] = self._working(action, tables, tensors[action.stage][2])
            received = self._received(stages, dict(held), tables)
            found = Peak(str(action), held, parts[0], parts[1], parts[2], working[key], received)
            best = max(best, found, key=lambda peak: peak.total)
        return best

    def _received(self, stages: set[int], kept: Mapping[int, int], tables: Tables) -> int:
        """Return the bytes of old inputs and their gradients, of stages that keep the activations of no microbatch."""
        if not self.rules.keeps_received:
            return 0
        return 2 * len(stages - {0} - set(kept)) * tables.dense.boundary_bytes

    def _staying(self, stages: set[int], tables: Tables) -> int:
        """Return the bytes of what stays for the gradients of a rank's weights, one of each shape, and for products."""
        weights: dict[str, int] = {}
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
        layers = sum(tables.layer(number).stored_bytes for number in self.layers[stage])
        return layers, others + self._output(stage, tables), logits

    def _output(self, stage: int, tables: Tables) -> int:
        """Return the bytes of an output that overlapped stages keep to its backward: of logits their gradient."""
        if not self.plan.overlap:
            return 0
        if not self._is_last(stage):
            return tables.dense.boundary_bytes
        return tables.dense.output_grad_bytes

    def _working(self, action: Action, tables: Tables, logits: int) -> int:
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

    def _held(self, pp_rank: int, tp_rank: int, stages: set[int]) -> tuple[ModelStates, int]:
        """Return the states of a place and its buckets; ranks whose stages have the same layers have the same."""
        sizes = tuple(
            (stage == 0, self._is_last(stage), self.plan.holders(stage)[0] == pp_rank, *self._numbers_of(stage))
            for stage in sorted(stages)
        )
        key = tp_rank, sizes
        if key not in self._known:
            states = model_states(self.held, self.plan, pp_rank, tp_rank, self.numbers)
            self._known[key] = states, self._buffers(pp_rank, tp_rank)
        return self._known[key]

    def _numbers_of(self, stage: int) -> tuple[int, int]:
        """Return how many layers a stage has, and how many of these are dense."""
        layers = self.layers[stage]
        num_dense = self.model.num_dense_layers if isinstance(self.model, V3MoEConfig) else 0
        return len(layers), sum(number < num_dense for number in layers)

    def _buffers(self, pp_rank: int, tp_rank: int) -> int:
        """Return the bytes of the two largest buckets of gradients, or units of weights and gradients."""
        if self.plan.zero < 2:
            return 0
        layouts = flat_layouts(self.plan, parts_of_place(self.held, self.plan, pp_rank, tp_rank))
        largest = sum(sorted(layout.padded_numel for layout in layouts)[-2:])
        return largest * (self.numbers.gradient + self.numbers.parameter * (self.plan.zero == 3))
