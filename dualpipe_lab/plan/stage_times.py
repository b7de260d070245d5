"""`StageTimes`: the seconds of each kind of action on each stage of a plan, by what they are spent on.

In: a model, a plan, a cluster, rules.  Out: seconds of F, I and W of every stage.
  F    products, attention, elementwise work, calls along tp, cp and ep
  I    the input's half of the products' backward, attention's, elementwise work and all calls; recomputation first, of
       overlapped experts that of what is before their exchanges
  W    the weights' half of the products' backward
A product takes its FLOPs at the peak times the efficiency of its size, or its bytes at the memory's rate if that is
longer, and the overhead of a kernel; attention and elementwise work likewise.
Elsewhere: SimuMax's `compute_op_accuracy_time`; calculon's `Processor`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple, TypeAlias

from dualpipe_lab.cp.layouts import SequenceLayout, make_layout
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import stage_layers
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.call_times import CallTimes, Group, Links
from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.expert_traffic import ExpertTraffic
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.latent_traffic import LatentTraffic
from dualpipe_lab.plan.layer_traffic import ELEMENT_BYTES, StageTraffic
from dualpipe_lab.plan.products import Product, RankWork, Work
from dualpipe_lab.plan.rules import has_second
from dualpipe_lab.plan.second_traffic import second_backward, second_forward
from dualpipe_lab.plan.states import AnyModel, config_of, sizes_of
from dualpipe_lab.plan.time_rules import TimeRules
from dualpipe_lab.plan.token_nodes import nodes_of_token

_AXES = ("tp", "cp", "ep")
Seconds: TypeAlias = dict[str, float]  # by what they are spent on


class Machine:
    """How long one accelerator takes for products of one type of number.

    Raises:
        ValueError: no peak for a type of number.
    """

    def __init__(self, cluster: Cluster, kind: str) -> None:
        unit = cluster.accelerator
        if kind not in unit.peaks:
            raise ValueError(
                f"{unit.name} has no peak for {kind}, known are {', '.join(unit.peaks)}; use a plan with one of these, "
                f'or give the accelerator peaks={{"{kind}": ...}} in FLOP/s'
            )
        self.kind, self.peak, self.unit = kind, unit.peaks[kind], unit

    def product(self, product: Product, element: int) -> float:
        """Return the seconds of a product, or of many as one kernel."""
        rows, inner, outer, times = product[1:]
        num_bytes = (rows * inner + inner * outer + rows * outer) * times * element
        computed = product.flops / self.unit.product_rate(product.flops / times, self.kind)
        return max(computed, self.unit.memory_seconds(num_bytes)) + self.unit.overhead


class StageKind(NamedTuple):
    """The layers of a stage, those with experts apart, and whether it has the embedding or the head."""

    num_dense: int
    num_sparse: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class StageTimes:
    """Seconds of the actions of a plan, for microbatches of one shape.

    Attributes:
        model, plan, cluster, rules: what is trained, how, on what.
        num_rows: sequences of a microbatch.
        sequence_length: tokens of a full sequence.
    """

    model: AnyModel
    plan: PlanFields
    cluster: Cluster
    rules: TimeRules
    num_rows: int
    sequence_length: int

    @cached_property
    def layers(self) -> tuple[range, ...]:
        """The layers of every stage."""
        config = config_of(self.model)
        return stage_layers(config, self.plan.num_stages, self.plan.layers, has_second(self.plan, config))

    def kind(self, stage: int) -> StageKind:
        """Return all that the seconds of a stage depend on: stages of one kind have the same."""
        layers = self.layers[stage]
        num_dense = self.model.num_dense_layers if isinstance(self.model, V3MoEConfig) else len(layers) + layers.start
        dense = min(max(num_dense - layers.start, 0), len(layers))
        return StageKind(dense, len(layers) - dense, stage == 0, stage == len(self.layers) - 1)

    def of(self, stage: int) -> dict[str, Seconds]:
        """Return the seconds of F, I and W of a stage, by what they are spent on."""
        kind = self.kind(stage)
        found: dict[str, Seconds] = {kind: {} for kind in "FIW"}
        for is_sparse, count in ((False, kind.num_dense), (True, kind.num_sparse)):
            for _ in range(count):
                _add(found, self._layer(is_sparse))
        if kind.is_first:
            _add(found, self._embedding)
        if kind.is_last:
            _add(found, self._head)
            if self.plan.multi_token is not None:
                _add(found, self._second)
        return found

    @cached_property
    def config(self) -> LlamaConfig:
        """The sizes of attention, embedding and head."""
        return sizes_of(self.model)

    @property
    def element(self) -> int:
        """Bytes per number of weights and activations."""
        return ELEMENT_BYTES[self.plan.precision]

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The groups of every axis of a stage; those of ep have the ranks of tp that share out their experts."""
        found = {axis: self.along(axis) for axis in _AXES}
        if self.rules.splits_routing:
            one, other = found["ep"], found["tp"]
            found["ep"] = Group("ep", one.size * other.size, one.per_node * other.per_node)
        return found

    def along(self, axis: str, over: Sequence[str] = ()) -> Group:
        """Return the groups along an axis, or along those that they are over."""
        return Group.along(self.plan, axis, self.node_size, over)

    @cached_property
    def links(self) -> Links:
        """The links of the cluster."""
        return Links(self.cluster)

    @cached_property
    def layout(self) -> SequenceLayout | None:
        """How cp shares out a sequence; None without cp."""
        return make_layout(self.plan.layout, self.sequence_length, self.plan.cp) if self.plan.cp > 1 else None

    @cached_property
    def hops(self) -> Counter[int]:
        """How many blocks of a sequence have so many positions."""
        return Counter() if self.layout is None else Counter(map(self.layout.size, range(self.plan.cp)))

    @cached_property
    def work(self) -> RankWork:
        """What the slowest rank computes."""
        return RankWork(self.model, self.plan, self.num_rows, self.sequence_length, self.rules.splits_routing)

    @cached_property
    def boundary_bytes(self) -> int:
        """Bytes of what one stage sends to the next."""
        tokens = self.work.num_tokens // (self.plan.tp if self.plan.sequence_parallel else 1)
        return tokens * self.config.hidden_size * self.element

    @cached_property
    def _layers_by_kind(self) -> dict[bool, dict[str, Seconds]]:
        return {}

    def layer(self, number: int) -> dict[str, Seconds]:
        """Return the seconds of F, I and W of a layer."""
        return self._layer(isinstance(self.model, V3MoEConfig) and number >= self.model.num_dense_layers)

    def _layer(self, is_sparse: bool) -> dict[str, Seconds]:
        known = self._layers_by_kind
        if is_sparse not in known:
            number = self.model.num_dense_layers if is_sparse and isinstance(self.model, V3MoEConfig) else 0
            found = known[is_sparse] = self._of(
                self.work.layer(number),
                lambda traffic: traffic.layer_forward(number),
                lambda traffic: traffic.layer_backward(number),
            )
            if self.plan.recompute or self.rules.recomputes:
                again = self._pass("F", self.work.again(number, self.rules.recomputes), self._calls_again(number))
                found["I"]["again"] = sum(again.values())
        return known[is_sparse]

    def _calls_again(self, number: int) -> Callable[[StageTraffic], None]:
        """Return what enters the calls of a layer that is run again; those of parts of it are left out."""
        return (lambda traffic: traffic.layer_again(number)) if self.plan.recompute else _no_calls

    @cached_property
    def _embedding(self) -> dict[str, Seconds]:
        rows = 2 * self.work.num_tokens * self.config.hidden_size * self.element
        return self._of(Work((), 0, rows, 2 * rows), StageTraffic.sum_output, StageTraffic.gather_output_grad)

    @cached_property
    def _head(self) -> dict[str, Seconds]:
        return self._of(self.work.head(), StageTraffic.head_forward, StageTraffic.head_backward)

    @cached_property
    def _second(self) -> dict[str, Seconds]:
        number = self.config.num_layers
        found = self._of(
            self.work.second(),
            lambda traffic: second_forward(traffic, number),
            lambda traffic: second_backward(traffic, number, has_table=self.plan.num_stages > 1),
        )
        if self.plan.recompute:  # the backward's calls have those of what is run again
            again = self._pass("F", self.work.second_again(), _no_calls)
            found["I"]["again"] = sum(again.values())
        return found

    def _of(
        self, work: Work, forward: Callable[[StageTraffic], None], backward: Callable[[StageTraffic], None]
    ) -> dict[str, Seconds]:
        """Return the seconds of a part of a stage, of its work and the calls that it makes."""
        found = {"F": self._pass("F", work, forward), "I": self._pass("I", work, backward)}
        return found | {"W": {"products": found["F"]["products"]}}

    def _pass(self, kind: str, work: Work, calls: Callable[[StageTraffic], None]) -> Seconds:
        """Return the seconds of one pass through a part of a stage: of F or of I."""
        machine, is_forward = self.machine, kind == "F"
        each = sum(machine.product(product, self.element) for product in work.products)
        core = self._core(work.core_flops, is_forward)
        launches = work.num_kernels * (1 if is_forward else 2) * machine.unit.overhead
        moved = machine.unit.memory_seconds(work.forward_bytes if is_forward else work.backward_bytes)
        own = {"products": each, "attention": core, "elementwise": moved + launches}
        return own | self._exposed(self._calls(calls), core)

    def _core(self, flops: int, is_forward: bool) -> float:
        """Return the seconds of attention between its products; backward a kernel computes 5 products instead of 2."""
        if not flops:
            return 0.0
        if self.rules.core == "unfused":
            products = sum(self.machine.product(one, self.element) for one in self.work.core_products(is_forward))
            return products + self.machine.unit.memory_seconds(self.work.score_bytes(is_forward))
        peak = Machine(self.cluster, self.plan.precision).peak
        part_of_peak = self.rules.attention_at(self.sequence_length)[not is_forward]
        return flops * (1.0 if is_forward else 2.5) / (peak * part_of_peak) + self.cluster.accelerator.overhead

    def _exposed(self, calls: Seconds, attention: float) -> Seconds:
        """Return the seconds of calls without what runs behind computation."""
        ring = max(0.0, calls["cp"] - attention) if self.rules.hides_ring else calls["cp"]
        return {"tp": calls["tp"] * (1 - self.rules.tensor_hidden), "cp": ring, "ep": calls["ep"]}

    def _calls(self, enter: Callable[[StageTraffic], None]) -> Seconds:
        calls = CallTimes(self.links, self.groups)
        enter(_timed(self, calls))
        return calls.seconds

    @cached_property
    def machine(self) -> Machine:
        """The accelerator, for products."""
        return Machine(self.cluster, self.rules.product_type or self.plan.precision)

    @property
    def node_size(self) -> int:
        """The ranks of a node."""
        return min(self.cluster.ranks_per_node, self.cluster.num_ranks)


def _add(total: dict[str, Seconds], part: dict[str, Seconds]) -> None:
    for kind, seconds in part.items():
        for name, value in seconds.items():
            total[kind][name] = total[kind].get(name, 0.0) + value


def _no_calls(traffic: StageTraffic) -> None:
    """Enter nothing."""


def _timed(times: StageTimes, calls: CallTimes) -> StageTraffic:
    """Return the calls of a stage at a place that needs no topology: groups are known by their axis."""
    kind = _TimedExperts if isinstance(times.model, V3MoEConfig) else _TimedStage
    return kind(times, calls)


class _Timed(StageTraffic):
    """What both kinds of stages have: sizes, and groups in place of ranks."""

    def _prepare(self, times: StageTimes, calls: CallTimes) -> None:
        plan = self.plan = times.plan
        self.times, self.timed = times, calls
        self.config, self.calls, self.num_rows, self.rules = times.config, calls, times.num_rows, times.rules
        self.tp, self.cp, self.place = calls.ranks["tp"], calls.ranks["cp"], 0
        self.layout = times.layout
        self.num_tokens, self.element = times.work.num_tokens, times.element
        self.wide = max(4, self.element)
        self.kv_copies = max(plan.tp // self.config.num_kv_heads, 1)

    def ring(self, direction: str) -> None:
        """Add the hops of all blocks of a sequence, those of one size at once: there are as many as ranks."""
        if self.layout is None:
            return
        for length, count in self.times.hops.items():
            numel = self.num_rows * self.position_numbers * length
            self.timed.hop(numel * self.element, count - (length == self.layout.size(1)))  # the last one stays
            if direction == "backward":
                self.timed.hop(numel * self.wide, count)

    def sum_norm(self) -> None:
        """Sum the gradient of a norm's weight, where that is done in every backward."""
        if self.rules.sums_norms:
            super().sum_norm()


class _TimedStage(_Timed):
    def __init__(self, times: StageTimes, calls: CallTimes) -> None:
        self._prepare(times, calls)


class _TimedExperts(_Timed, ExpertTraffic):
    """Stages with experts: rows go to them in the call that dispatches them, spread evenly."""

    def __init__(self, times: StageTimes, calls: CallTimes) -> None:
        self._prepare(times, calls)
        assert isinstance(times.model, V3MoEConfig)
        self.sparse, self.ep = times.model, calls.ranks["ep"]
        self.latent = None if times.model.latent is None else LatentTraffic(self, times.model.latent)
        self.slots = times.work.slots

    def _exchange_twice(self) -> None:
        group, row = self.times.groups["ep"], self.config.hidden_size * self.element
        if self.rules.by_node and group.crosses:
            num_nodes = ceil(group.size / group.per_node)
            others = nodes_of_token(self.sparse, num_nodes) * (num_nodes - 1) / num_nodes
            crossing = self.slots / self.sparse.num_experts_per_token * others * row
            for _ in range(2):
                self.timed.all_to_all_by_node(self.slots * row, crossing)
            return
        rows = [self.slots * row // len(self.ep)] * len(self.ep)
        for _ in range(2):
            self.calls.all_to_all(self.ep, rows, rows)
