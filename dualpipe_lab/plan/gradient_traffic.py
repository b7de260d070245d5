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
  mirrors   the gradients of a stage to the rank that has its copy (ZeRO-2 and 3: this rank's shards of them)
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple, TypeAlias

from dualpipe_lab.dp.layout import Layout
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig, stage_layers
from dualpipe_lab.models.v3_moe_config import V3MoEConfig
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.layer_traffic import ELEMENT_BYTES
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_second
from dualpipe_lab.pp.program import Action, B, F, I, Overlap, W
from dualpipe_lab.sharding import shard_slice
from dualpipe_lab.tp.latent_sizes import LatentSizes

TIED = "tied"  # the kind of a table that another stage holds too
BUCKET_BYTES = 25 * 2**20  # `dualpipe_lab.dp.buckets`, which imports torch


Held: TypeAlias = tuple[int, frozenset[str]]  # elements and kind of a parameter


class Part(NamedTuple):
    """A parameter of one rank: its stage, the unit of ZeRO-3 there, its elements here, and the kind of its bucket."""

    stage: int
    unit: int
    numel: int
    kind: frozenset[str]


def parts_of(plan: Plan, config: ModelConfig, rank: int) -> list[Part]:
    """Return the parameters of a rank, in the order of its modules."""
    here = plan.topology.at(rank)
    return parts_at(plan, config, here.rank("pp"), here.rank("tp"))


def parts_at(plan: Plan, config: ModelConfig, pp_rank: int, tp_rank: int) -> list[Part]:
    """Return the parameters of the ranks at a place along pp and tp: they are the same along all other axes."""
    shares = stage_layers(config, plan.num_stages, plan.layers, has_second(plan, config))
    maker = _Parts(plan, config, tp_rank)
    found: list[Part] = []
    for stage in plan.stages(pp_rank):
        is_mirror = plan.holders(stage)[0] != pp_rank
        ends = stage == 0, stage == plan.num_stages - 1
        for unit, (numel, kind) in maker.stage(shares[stage], *ends):
            found.append(Part(stage, unit, numel, kind | {"mirror"} if is_mirror else kind))
    return found


class _Parts:
    """Elements and kinds of the parameters of a stage on one rank of tp."""

    def __init__(self, plan: Plan, config: ModelConfig, tp_rank: int) -> None:
        self.overlap, self.has_second = plan.overlap, has_second(plan, config)
        self.has_copy = self.has_second and plan.num_stages > 1
        self.config = config if isinstance(config, LlamaConfig) else config.dense
        self.sparse = None if isinstance(config, LlamaConfig) else config
        self.tp, self.tp_rank, self.ep = plan.tp, tp_rank, plan.ep
        self.layers: dict[bool, list[Held]] = {}  # by whether they have experts

    def stage(self, layers: range, is_first: bool, is_last: bool) -> Iterator[tuple[int, Held]]:
        """Yield unit, elements and kind of every parameter, in order; a stage in pieces or with a tied table is one."""
        table = self.shard(self.config.vocabulary_size, self.config.hidden_size)
        numel, kind = table
        is_one = self.config.tied and is_first and is_last
        is_unit = is_one or self.overlap or (is_last and self.has_second)
        copy = numel, kind | {"replica", TIED}
        first = (numel, kind | {TIED}) if self.has_copy or (self.config.tied and not is_one) else table
        units = [[first]] if is_first else []
        units += [self.layer(number) for number in layers]
        if is_last:
            head = [] if is_first else [copy]
            units += [[(self.config.hidden_size, frozenset())], head if self.config.tied else [table]]
            units += [list(self.second([] if is_first else [copy]))] if self.has_second else []
        yield from ((0 if is_unit else number, held) for number, unit in enumerate(units) for held in unit)

    def second(self, table: list[Held]) -> Iterator[Held]:
        hidden = self.config.hidden_size
        norm = hidden, frozenset[str]()
        yield from [*table, norm, norm, self.shard(hidden, 2 * hidden), *self.layer(self.config.num_layers), norm]

    def layer(self, number: int) -> list[Held]:
        has_experts = self.sparse is not None and number >= self.sparse.num_dense_layers
        if has_experts not in self.layers:
            self.layers[has_experts] = list(self._layer(has_experts))
        return self.layers[has_experts]

    def _layer(self, has_experts: bool) -> Iterator[Held]:
        config, hidden = self.config, self.config.hidden_size
        latent = None if self.sparse is None else self.sparse.latent
        yield hidden, frozenset()
        yield from self.heads() if latent is None else self.latents(latent)
        yield hidden, frozenset()
        if self.sparse is None or not has_experts:
            yield from [self.shard(config.ffn_size, hidden)] * 3
        else:
            yield from self.experts(self.sparse)

    def heads(self) -> Iterator[Held]:
        config, inner = self.config, self.config.num_heads * self.config.size_of_head
        yield self.shard(inner, config.hidden_size)
        yield from [self.key_heads()] * 2
        yield self.shard(inner, config.hidden_size)
        yield from [(config.size_of_head, frozenset[str]())] * (2 * config.qk_norm)

    def latents(self, sizes: LatentSizes) -> Iterator[Held]:
        """Yield those of latent attention."""
        hidden, heads = self.config.hidden_size, self.config.num_heads
        copied = [(numel, frozenset[str]()) for numel in sizes.replicated(hidden)]
        yield from copied[:-2]
        yield self.shard(heads * sizes.key, sizes.query_rank or hidden)
        yield from copied[-2:]
        yield self.shard(heads * (sizes.content + sizes.value), sizes.kv_rank)
        yield self.shard(heads * sizes.value, hidden)

    def experts(self, config: V3MoEConfig) -> Iterator[Held]:
        yield config.num_experts * config.hidden_size, frozenset()
        kind = frozenset({"ep"}) if self.ep > 1 else frozenset[str]()
        yield from [(config.num_experts // self.ep * config.expert_ffn_size * config.hidden_size, kind)] * 3
        if config.num_shared_experts:
            yield from [self.shard(config.shared_ffn_size, config.hidden_size)] * 3

    def shard(self, length: int, *others: int) -> Held:
        part = shard_slice(length, self.tp, self.tp_rank)
        held = part.stop - part.start
        return held * prod(others), frozenset() if held == length else frozenset({"tp"})

    def key_heads(self) -> Held:
        config = self.config
        shards = min(self.tp, config.num_kv_heads)
        kind = {"tp"} if shards > 1 else set()
        kind |= {"replica"} if self.tp_rank * shards % self.tp >= shards else set()
        return config.num_kv_heads * config.size_of_head // shards * config.hidden_size, frozenset(kind)


class GradientTraffic:
    """Enters the sums of one rank's gradients and the gathers of its weights, for one step."""

    def __init__(self, plan: Plan, config: ModelConfig, calls: Calls) -> None:
        self.plan, self.config, self.calls = plan, config, calls
        self.parts = parts_of(plan, config, calls.rank)
        self.weight_bytes = ELEMENT_BYTES[plan.precision]
        self.grad_bytes = max(4, self.weight_bytes)  # bf16 gradients accumulate and travel in fp32
        self.buckets = buckets_of(plan, self.parts)
        numels = [[self.parts[index].numel for index in bucket] for bucket in self.buckets]
        dense, experts = (copies_of(plan, calls.rank, axes) for axes in (plan.copy_axes, plan.expert_copy_axes))
        self.copies = [experts if "ep" in self.parts[bucket[0]].kind else dense for bucket in self.buckets]
        self.layouts = [Layout(sizes, len(ranks)) for sizes, (ranks, _) in zip(numels, self.copies, strict=True)]

    def enter(self) -> None:
        """Enter the calls of a step."""
        if self.plan.zero == 3:
            self._each(self._actions(F), gathers=True)
            self._each(self._actions(B, I) - self._shared_pairs(), gathers=True)
            self._gather_again()
        if self.plan.zero > 1:
            self._each(self._actions(B, W), gathers=False)
        for (ranks, replicas), layout in zip(self.copies, self.layouts, strict=True):
            if self.plan.zero == 0:
                self.calls.all_reduce(ranks, layout.padded_numel, self.grad_bytes)
            elif self.plan.zero == 1:
                self.calls.reduce_scatter(ranks, layout.padded_numel, self.grad_bytes)
            if replicas is not None:
                self.calls.all_reduce(replicas, layout.shard_numel, self.grad_bytes)
            if self.plan.zero in (1, 2):
                self.calls.all_gather(ranks, layout.shard_numel, self.weight_bytes)
        self.enter_tied()

    def enter_tied(self) -> None:
        """Enter the sum of a tied table's gradient, where the first and the last stage are on different ranks."""
        first, last = self.plan.holders(0), self.plan.holders(self.plan.num_stages - 1)
        here = self.plan.topology.at(self.calls.rank)
        for bucket, layout in zip(self.buckets, self.layouts, strict=True):
            if first != last and TIED in self.parts[bucket[0]].kind:
                ranks = [here.ranks("pp")[rank] for rank in sorted({*first, *last})]
                numel = layout.shard_numel if self.plan.zero else layout.numel
                self.calls.all_reduce(ranks, numel, self.grad_bytes)

    def _each(self, counts: Counter[int], gathers: bool) -> None:
        """Gather or scatter the buckets of every stage so many times."""
        for bucket, (ranks, _), layout in zip(self.buckets, self.copies, self.layouts, strict=True):
            for stage in {self.parts[index].stage for index in bucket}:
                for _ in range(counts[stage]):
                    if gathers:
                        self.calls.all_gather(ranks, layout.shard_numel, self.weight_bytes)
                    else:
                        self.calls.reduce_scatter(ranks, layout.padded_numel, self.grad_bytes)

    def _gather_again(self) -> None:
        """Gather what a W needs for the weights of routers: no I has computed them, nor an embedding in pieces."""
        for stage, count in self._splits().items():
            units = self._router_units(stage)
            units |= {unit - 1 for unit in units if unit}
            if has_second(self.plan, self.config) and stage == self.plan.num_stages - 1:
                units = {0}  # the stage is one unit
            elif self.plan.overlap:
                units = {0} if units or stage == 0 else units
            for bucket, (ranks, _), layout in zip(self.buckets, self.copies, self.layouts, strict=True):
                first = self.parts[bucket[0]]
                for _ in range(count * (first.stage == stage and first.unit in units)):
                    self.calls.all_gather(ranks, layout.shard_numel, self.weight_bytes)

    def _router_units(self, stage: int) -> set[int]:
        """The units of a stage that have a router; the embedding is the first unit of the first stage."""
        if isinstance(self.config, LlamaConfig):
            return set()
        second = has_second(self.plan, self.config)
        layers = stage_layers(self.config, self.plan.num_stages, self.plan.layers, second)[stage]
        first = self.config.num_dense_layers
        return {number + (stage == 0) for number, layer in enumerate(layers) if layer >= first}

    def _splits(self) -> Counter[int]:
        """The number of I and W, by stage, that the runtime does not run as one: on a plain stage 0 it does so."""
        program = self.plan.program
        if program is None:
            return Counter()
        here = self.plan.topology.at(self.calls.rank).rank("pp")
        found = Counter(stage for stage, kind, _ in program.actions(here) if kind == W)
        for one, other in pairwise(program.ranks[here]) if not self.plan.overlap else ():
            if isinstance(one, Action) and one[:2] == (0, I) and other == one._replace(kind=W):
                found[0] -= 1
        return found

    def _shared_pairs(self) -> Counter[int]:
        if not self.plan.overlap or self.plan.program is None:
            return Counter()
        steps = self.plan.program.ranks[self.plan.topology.at(self.calls.rank).rank("pp")]
        pairs = [step for step in steps if isinstance(step, Overlap)]
        return Counter(pair.forward.stage for pair in pairs if pair.forward.stage == pair.backward.stage)

    def _actions(self, *kinds: str) -> Counter[int]:
        program = self.plan.program
        if program is None:
            return Counter({0: self.plan.num_microbatches})
        here = self.plan.topology.at(self.calls.rank).rank("pp")
        return Counter(stage for stage, kind, _ in program.actions(here) if kind in kinds)

    def enter_mirrors(self) -> None:
        """Enter the exchange of gradients between the two copies of a stage."""
        here = self.plan.topology.at(self.calls.rank)
        for stage in sorted({part.stage for part in self.parts}):
            for other in self.plan.holders(stage):
                held = self._held(stage)
                if other != here.rank("pp") and (held or self.plan.zero < 2):  # a shard may hold nothing of a stage
                    num_bytes = held * self.grad_bytes
                    self.calls.send(here.ranks("pp")[other], num_bytes)
                    self.calls.receive(here.ranks("pp")[other], num_bytes)

    def _held(self, stage: int) -> int:
        """The gradients of a stage that this rank has when mirrors add: all, or its shards under ZeRO-2 and 3."""
        if self.plan.zero < 2:
            return sum(part.numel for part in self.parts if part.stage == stage)
        return sum(
            piece.stop - piece.start
            for bucket, (ranks, _), layout in zip(self.buckets, self.copies, self.layouts, strict=True)
            for piece in layout.tensors_in(ranks.index(self.calls.rank))
            if self.parts[bucket[piece.tensor]].stage == stage
        )


def copies_of(plan: Plan, rank: int, axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the ranks that a gradient is summed over, and under hybrid ZeRO those with its shard on other nodes."""
    ranks = plan.topology.at(rank).ranks(*axes) if axes else (rank,)
    if not plan.hybrid or plan.ranks_per_node is None:
        return ranks, None
    size = plan.ranks_per_node
    nodes = [tuple(r for r in ranks if r // size == node) for node in sorted({r // size for r in ranks})]
    mine = next(part for part in nodes if rank in part)
    replicas = tuple(part[mine.index(rank)] for part in nodes)
    return mine, replicas if len(replicas) > 1 else None


def buckets_of(plan: Plan, parts: list[Part]) -> list[list[int]]:
    """Return the numbers of the parameters in every flat buffer: buckets, or under ZeRO-3 units."""
    return _units(parts) if plan.zero == 3 else _buckets(parts, ELEMENT_BYTES[plan.precision])


def _buckets(parts: list[Part], element_bytes: int) -> list[list[int]]:
    """Return the numbers of the parameters in every bucket, as `dp.buckets.assign_buckets` fills them."""
    buckets: list[list[int]] = []
    for _, run in groupby(reversed(range(len(parts))), key=lambda index: parts[index].kind):
        buckets.append([])
        num_bytes = 0
        for index in run:
            size = parts[index].numel * element_bytes
            if buckets[-1] and num_bytes + size > BUCKET_BYTES:
                buckets.append([])
                num_bytes = 0
            buckets[-1].append(index)
            num_bytes += size
    return buckets


def _units(parts: list[Part]) -> list[list[int]]:
    return [
        list(run) for _, run in groupby(range(len(parts)), key=lambda i: (parts[i].stage, parts[i].unit, parts[i].kind))
    ]
