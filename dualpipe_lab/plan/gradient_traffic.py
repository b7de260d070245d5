"""`GradientTraffic`: the calls by which one rank sums gradients and gathers weights: mirrors, data ranks, ZeRO.

Chapter: book/whole/sums.  In: a plan, a config, a rank.  Out: calls, entered by `Calls`.
  buckets   of parameters of one kind, in the reverse of their order, at most 25 MiB; padded for the ranks of the sum
  ZeRO-0    an all-reduce of every bucket          ZeRO-1   a reduce-scatter, and an all-gather of the weights
  ZeRO-2    a reduce-scatter of the buckets of a stage in each of its backwards, and an all-gather of the weights
  ZeRO-3    for each unit (embedding, layer, norm, head) an all-gather in every forward and backward, and a
            reduce-scatter in every backward; of I and W, the first gathers and the second scatters, and W gathers
            layers with a router again, whose weight it computes, and prefetches the unit before each
            overlapped experts: a stage is one unit, which an F&B pair with both halves of it gathers once; so is the
            stage of a second token, which uses its head twice
  tied      a sum of the table's gradient among the ranks that hold the first or the last stage, if those differ
  mirrors   an all-reduce of a stage's gradients over its two copies (ZeRO-2 and 3: of this rank's shards of them)
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple, TypeAlias

from dualpipe_lab.dp.layout import Layout
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.rules import has_mtp, layers_of, sizes_of
from dualpipe_lab.plan.stage_traffic import ELEMENT_BYTES
from dualpipe_lab.pp.program import Action, B, F, I, Overlap, W
from dualpipe_lab.sharding import shard_slice

TIED = "tied"  # the kind of a table that another stage holds too
BUCKET_BYTES = 25 * 2**20  # `dualpipe_lab.dp.buckets`, which imports torch


Held: TypeAlias = tuple[int, frozenset[str]]  # elements and kind of a parameter


class LocalParameter(NamedTuple):
    """A parameter of one rank: its stage, the unit of ZeRO-3 there, its elements here, and the kind of its bucket."""

    stage: int
    unit: int
    numel: int
    kind: frozenset[str]


class _Stage(NamedTuple):
    num_dense: int  # layers
    num_sparse: int
    is_first: bool
    is_last: bool
    is_mirror: bool


class _Place(NamedTuple):
    """All that the parameters of a rank depend on; many places and plans have equal ones."""

    model: ModelConfig
    stages: tuple[_Stage, ...]
    tp: int
    tp_rank: int
    ep: int
    overlap: bool
    has_mtp: bool

    def stage(self, stage: _Stage) -> Iterator[tuple[int, Held]]:
        """Yield unit, elements and kind of every parameter, in order; a stage in pieces or with a tied table is one."""
        _, _, is_first, is_last, _ = stage
        config = sizes_of(self.model)
        (numel, kind), tied = self.shard(config.vocabulary_size, config.hidden_size), config.tied
        norm: Held = config.hidden_size, frozenset()
        copy = [] if is_first else [(numel, kind | {"replica", TIED})]
        units: list[list[Held]] = []
        if is_first:
            units.append([(numel, kind | {TIED} if not is_last and (self.has_mtp or tied) else kind)])
        units += [self.layer(has_experts=False)] * stage.num_dense + [self.layer(has_experts=True)] * stage.num_sparse
        if is_last:
            units += [[norm], copy if tied else [(numel, kind)]]
        if is_last and self.has_mtp:
            projection = self.shard(config.hidden_size, 2 * config.hidden_size)
            units.append([*copy, norm, norm, projection, *self.layer(has_experts=True), norm])
        is_unit = self.overlap or (is_last and (self.has_mtp or (tied and is_first)))
        yield from ((0 if is_unit else number, held) for number, unit in enumerate(units) for held in unit)

    def layer(self, has_experts: bool) -> list[Held]:
        norm: Held = sizes_of(self.model).hidden_size, frozenset()
        return [norm, *self.attention(sizes_of(self.model)), norm, *self.network(has_experts)]

    def attention(self, config: LlamaConfig) -> Iterator[Held]:
        hidden, head = config.hidden_size, config.size_of_head
        sizes = None if isinstance(self.model, LlamaConfig) else self.model.latent
        if sizes is None:
            product = self.shard(config.num_heads * head, hidden)
            yield from [product, *[self.key_heads(config)] * 2, product]
            yield from [(head, frozenset[str]())] * (2 * config.qk_norm)
            return
        *queries, latent, norm = ((numel, frozenset[str]()) for numel in sizes.replicated(hidden))
        yield from [*queries, self.shard(config.num_heads * sizes.key, sizes.query_rank or hidden), latent, norm]
        yield self.shard(config.num_heads * (sizes.content + sizes.value), sizes.kv_rank)
        yield self.shard(config.num_heads * sizes.value, hidden)

    def network(self, has_experts: bool) -> Iterator[Held]:
        model, hidden = self.model, self.model.hidden_size
        if isinstance(model, LlamaConfig) or not has_experts:
            yield from [self.shard(model.ffn_size, hidden)] * 3
            return
        yield model.num_experts * hidden, frozenset()
        kind = frozenset({"ep"}) if self.ep > 1 else frozenset[str]()
        yield from [(model.num_experts // self.ep * model.expert_ffn_size * hidden, kind)] * 3
        if model.num_shared_experts:
            yield from [self.shard(model.shared_ffn_size, hidden)] * 3

    def shard(self, length: int, other: int) -> Held:
        """Return what a rank has of a weight whose dimension of this length is sharded along tp."""
        part = shard_slice(length, self.tp, self.tp_rank)
        held = part.stop - part.start
        return held * other, frozenset() if held == length else frozenset({"tp"})

    def key_heads(self, config: LlamaConfig) -> Held:
        shards = min(self.tp, config.num_kv_heads)
        kind = {"tp"} if shards > 1 else set()
        kind |= {"replica"} if self.tp_rank * shards % self.tp >= shards else set()
        return config.num_kv_heads * config.size_of_head // shards * config.hidden_size, frozenset(kind)


def parts_of(plan: PlanFields, config: ModelConfig, rank: int) -> list[LocalParameter]:
    """Return the parameters of a rank, in the order of its modules."""
    here = plan.topology.at(rank)
    stages = plan.stages(here.rank("pp"))
    parts = _parts_at(_place(plan, config, here.rank("pp"), here.rank("tp")))
    return [part._replace(stage=stages[part.stage]) for part in parts]


def buffers_at(plan: PlanFields, config: ModelConfig, pp_rank: int, tp_rank: int) -> list[tuple[int, bool]]:
    """Return elements of every flat buffer of the ranks at a place along pp and tp, and whether it has experts."""
    return _buffers_at(_place(plan, config, pp_rank, tp_rank), plan.zero == 3, plan.precision)


def _place(plan: PlanFields, config: ModelConfig, pp_rank: int, tp_rank: int) -> _Place:
    shares, first, stages = layers_of(plan, config), getattr(config, "num_dense_layers", config.num_layers), []
    for stage in plan.stages(pp_rank):
        num_dense = max(min(first, shares[stage].stop) - shares[stage].start, 0)
        ends = stage == 0, stage == plan.num_stages - 1
        stages.append(_Stage(num_dense, len(shares[stage]) - num_dense, *ends, plan.holders(stage)[0] != pp_rank))
    return _Place(config, tuple(stages), plan.tp, tp_rank, plan.ep, plan.overlap, has_mtp(plan, config))


@lru_cache(maxsize=1024)
def _parts_at(place: _Place) -> list[LocalParameter]:
    """Return the parameters of a place; their stages are counted from 0 there."""
    found = []
    for number, stage in enumerate(place.stages):
        mirror = frozenset({"mirror"} if stage.is_mirror else ())
        found += [LocalParameter(number, unit, numel, kind | mirror) for unit, (numel, kind) in place.stage(stage)]
    return found


@lru_cache(maxsize=4096)
def _buffers_at(place: _Place, is_zero3: bool, precision: str) -> list[tuple[int, bool]]:
    buckets = buckets_of(_parts_at(place), is_zero3, precision)
    return [(sum(part.numel for part in parts), "ep" in parts[0].kind) for parts in buckets]


class PlannedBucket(NamedTuple):
    """Parameters in one flat buffer, the ranks of its sum, and under hybrid ZeRO those with its shard elsewhere."""

    parts: list[LocalParameter]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...] | None
    layout: Layout


class GradientTraffic:
    """Enters the sums of one rank's gradients and the gathers of its weights, for one step."""

    def __init__(self, plan: PlanFields, config: ModelConfig, calls: Calls) -> None:
        self.plan, self.config, self.calls, self.here = plan, config, calls, plan.topology.at(calls.rank)
        self.parts = parts_of(plan, config, calls.rank)
        self.weight_bytes = ELEMENT_BYTES[plan.precision]
        self.grad_bytes = max(4, self.weight_bytes)  # bf16 gradients accumulate and travel in fp32
        dense, experts = (copies_of(plan, calls.rank, axes) for axes in (plan.copy_axes, plan.expert_copy_axes))
        self.buckets = []
        for parts in buckets_of(self.parts, plan.zero == 3, plan.precision):
            ranks, replicas = experts if "ep" in parts[0].kind else dense
            layout = Layout([part.numel for part in parts], len(ranks))
            self.buckets.append(PlannedBucket(parts, ranks, replicas, layout))

    def enter(self) -> None:
        if self.plan.zero == 3:
            self._each(self._actions(F), gathers=True)
            self._each(self._actions(B, I) - self._shared_pairs(), gathers=True)
            self._gather_again()
        if self.plan.zero > 1:
            self._each(self._actions(B, W), gathers=False)
        for bucket in self.buckets:
            if self.plan.zero == 0:
                self.calls.all_reduce(bucket.ranks, bucket.layout.padded_numel, self.grad_bytes)
            elif self.plan.zero == 1:
                self.scatter(bucket)
            if bucket.replicas is not None:
                self.calls.all_reduce(bucket.replicas, bucket.layout.shard_numel, self.grad_bytes)
            if self.plan.zero in (1, 2):
                self.gather(bucket)
        self.enter_tied()

    def gather(self, bucket: PlannedBucket) -> None:
        self.calls.all_gather(bucket.ranks, bucket.layout.shard_numel, self.weight_bytes)

    def scatter(self, bucket: PlannedBucket) -> None:
        self.calls.reduce_scatter(bucket.ranks, bucket.layout.padded_numel, self.grad_bytes)

    def enter_tied(self) -> None:
        """Enter the sum of a tied table's gradient, where the first and the last stage are on different ranks."""
        first, last = self.plan.holders(0), self.plan.holders(self.plan.num_stages - 1)
        for bucket in self.buckets:
            if first != last and TIED in bucket.parts[0].kind:
                ranks = [self.here.ranks("pp")[rank] for rank in sorted({*first, *last})]
                numel = bucket.layout.shard_numel if self.plan.zero else bucket.layout.numel
                self.calls.all_reduce(ranks, numel, self.grad_bytes)

    def _each(self, counts: Counter[int], gathers: bool) -> None:
        for bucket in self.buckets:
            for _ in range(sum(counts[stage] for stage in {part.stage for part in bucket.parts})):
                self.gather(bucket) if gathers else self.scatter(bucket)

    def _gather_again(self) -> None:
        """Gather what a W needs for the weights of routers: no I has computed them, nor an embedding in pieces."""
        for stage, count in self._splits().items():
            units = self._router_units(stage)
            units |= {unit - 1 for unit in units if unit}
            if has_mtp(self.plan, self.config) and stage == self.plan.num_stages - 1:
                units = {0}  # the stage is one unit
            elif self.plan.overlap:
                units = {0} if units or stage == 0 else units
            for bucket in self.buckets:
                first = bucket.parts[0]
                for _ in range(count * (first.stage == stage and first.unit in units)):
                    self.gather(bucket)

    def _router_units(self, stage: int) -> set[int]:
        if isinstance(self.config, LlamaConfig):
            return set()
        layers, first = layers_of(self.plan, self.config)[stage], self.config.num_dense_layers
        return {number + (stage == 0) for number, layer in enumerate(layers) if layer >= first}

    def _splits(self) -> Counter[int]:
        """The number of I and W, by stage, that the runtime does not run as one: on a plain stage 0 it does so."""
        program = self.plan.program
        if program is None:
            return Counter()
        found = self._actions(W)
        for one, other in pairwise(program.ranks[self.here.rank("pp")]) if not self.plan.overlap else ():
            if isinstance(one, Action) and one[:2] == (0, I) and other == one._replace(kind=W):
                found[0] -= 1
        return found

    def _shared_pairs(self) -> Counter[int]:
        if not self.plan.overlap or self.plan.program is None:
            return Counter()
        steps = self.plan.program.ranks[self.here.rank("pp")]
        pairs = [step for step in steps if isinstance(step, Overlap)]
        return Counter(pair.forward.stage for pair in pairs if pair.forward.stage == pair.backward.stage)

    def _actions(self, *kinds: str) -> Counter[int]:
        actions = rank_actions(self.plan, self.calls.rank)
        return Counter(stage for stage, kind, _ in actions if kind in kinds)

    def enter_mirrors(self) -> None:
        """Enter the sum of gradients over the two copies of a stage."""
        for stage in sorted({part.stage for part in self.parts}):
            ranks, held = [self.here.ranks("pp")[rank] for rank in self.plan.holders(stage)], self._held(stage)
            if len(ranks) > 1 and (held or self.plan.zero < 2):  # a shard may hold none of a stage
                self.calls.all_reduce(ranks, held, self.grad_bytes)

    def _held(self, stage: int) -> int:  # gradients of this rank when mirrors add
        if self.plan.zero < 2:
            return sum(part.numel for part in self.parts if part.stage == stage)
        return sum(
            piece.stop - piece.start
            for parts, ranks, _, layout in self.buckets
            for piece in layout.tensors_in(ranks.index(self.calls.rank))
            if parts[piece.tensor].stage == stage
        )


def rank_actions(plan: PlanFields, rank: int) -> list[Action]:
    """Return the actions of a rank; without pp every microbatch has an F and a B of the one stage."""
    program = plan.program
    if program is None:
        return [Action(0, kind, number) for number in range(plan.num_microbatches) for kind in (F, B)]
    return list(program.actions(plan.topology.at(rank).rank("pp")))


def copies_of(plan: PlanFields, rank: int, axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the ranks that a gradient is summed over, and under hybrid ZeRO those with its shard on other nodes."""
    ranks = plan.topology.at(rank).ranks(*axes) if axes else (rank,)
    if not plan.hybrid or plan.ranks_per_node is None:
        return ranks, None
    size = plan.ranks_per_node
    nodes = [tuple(r for r in ranks if r // size == node) for node in sorted({r // size for r in ranks})]
    mine = next(part for part in nodes if rank in part)
    replicas = tuple(part[mine.index(rank)] for part in nodes)
    return mine, replicas if len(replicas) > 1 else None


def buckets_of(parts: list[LocalParameter], is_zero3: bool, precision: str) -> list[list[LocalParameter]]:
    """Return the parameters of every flat buffer: buckets as those of `dp.buckets`, or under ZeRO-3 units."""
    if is_zero3:
        return [list(run) for _, run in groupby(parts, key=lambda part: (part.stage, part.unit, part.kind))]
    buckets: list[list[LocalParameter]] = []
    most = BUCKET_BYTES // ELEMENT_BYTES[precision]
    for _, run in groupby(reversed(parts), key=lambda part: part.kind):
        numel = most + 1
        for part in run:
            numel += part.numel
            if numel > most:
                buckets.append([])
                numel = part.numel
            buckets[-1].append(part)
    return buckets
