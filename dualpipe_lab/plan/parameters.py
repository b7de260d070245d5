"""The parameters of one rank, in order, and the flat buffers that hold them: what sums, gathers and memory count.

Chapter: book/whole/sums.  In: a plan, a config, a place along pp and tp.  Out: elements, units of ZeRO-3, buckets.
  units      of ZeRO-3: embedding, layer, norm, head; a stage with overlapped experts, a second token, which uses its
             head twice, or a table that it ties is one unit
  buckets    of parameters of one kind, in the reverse of their order, at most 25 MiB
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, TypeAlias

from dualpipe_lab.models.parameters import (
    EXPERTS,
    KV_HEADS,
    ROWS,
    Parameter,
    end_parameters,
    layer_parameters,
)
from dualpipe_lab.models.stage_rules import ModelConfig, sizes_of
from dualpipe_lab.plan.fields import NUMBER_BYTES, PlanFields
from dualpipe_lab.plan.rules import contents, has_mtp
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


class _Place(NamedTuple):
    """All that the parameters of a stage depend on; many ranks and plans have equal ones."""

    model: ModelConfig
    held: tuple[int, ...]  # of `contents`
    is_mirror: bool
    has_mtp: bool
    overlap: bool
    tp: int
    tp_rank: int
    ep: int

    def parameters(self) -> Iterator[tuple[int, Held]]:
        """Yield unit, elements and kind of every parameter, in order."""
        first, dense, sparse, last, second = self.held
        is_tied, hidden = sizes_of(self.model).tied, self.model.hidden_size
        embedding, norm, head = map(self.local, end_parameters(self.model))
        copy = [] if first else [(embedding[0], embedding[1] | {"replica", TIED})]
        units: list[list[Held]] = []
        if first:
            shared = not last and (self.has_mtp or is_tied)
            units.append([(embedding[0], embedding[1] | {TIED}) if shared else embedding])
        units += [self.layer(has_experts=False)] * dense + [self.layer(has_experts=True)] * sparse
        if last:
            units += [[norm], copy if is_tied else [head]]
        if second:
            projection = self.local(Parameter("mtp.projection.weight", (hidden, 2 * hidden), ROWS, ""))
            units.append([*copy, norm, norm, projection, *self.layer(has_experts=True), norm])
        is_unit = self.overlap or second or (last and first and is_tied)
        mirror = {"mirror"} if self.is_mirror else frozenset[str]()
        for number, unit in enumerate(units):
            yield from ((0 if is_unit else number, (numel, kind | mirror)) for numel, kind in unit)

    def layer(self, has_experts: bool) -> list[Held]:
        return [self.local(parameter) for parameter in layer_parameters(self.model, has_experts)]

    def local(self, parameter: Parameter) -> Held:
        if parameter.sharded == EXPERTS:
            return parameter.numel // self.ep, frozenset({"ep"} if self.ep > 1 else ())
        num_kv_heads = sizes_of(self.model).num_kv_heads
        _, _, count = parameter.shard(self.tp, self.tp_rank, num_kv_heads)
        numel = local_numel(parameter, self.tp, self.tp_rank, num_kv_heads)
        kind = {"tp"} if numel < parameter.numel else set[str]()
        kind |= {"replica"} if parameter.sharded == KV_HEADS and self.tp_rank * count % self.tp >= count else set()
        return numel, frozenset(kind)


def local_numel(parameter: Parameter, tp: int, tp_rank: int, num_kv_heads: int) -> int:
    """Return the elements that a rank of tp has of a parameter."""
    axis, number, count = parameter.shard(tp, tp_rank, num_kv_heads)
    part = shard_slice(parameter.shape[axis], count, number)
    return parameter.numel // parameter.shape[axis] * int(part.stop - part.start)


def parts_of(plan: PlanFields, config: ModelConfig, rank: int) -> list[LocalParameter]:
    """Return the parameters of a rank, in the order of its modules."""
    here, found = plan.topology.at(rank), []
    for stage, place in _places(plan, config, here.rank("pp"), here.rank("tp")):
        found += [LocalParameter(stage, unit, *held) for unit, held in _parameters(place)]
    return found


def buffers_at(plan: PlanFields, config: ModelConfig, pp_rank: int, tp_rank: int) -> list[tuple[int, bool]]:
    """Return elements of every flat buffer of the ranks at a place along pp and tp, and whether it has experts."""
    places = tuple(place for _, place in _places(plan, config, pp_rank, tp_rank))
    return _buffers(places, plan.zero == 3, plan.precision)


def _places(plan: PlanFields, config: ModelConfig, pp_rank: int, tp_rank: int) -> Iterator[tuple[int, _Place]]:
    every, rest = contents(plan, config), (has_mtp(plan, config), plan.overlap, plan.tp, tp_rank, plan.ep)
    for stage in plan.stages(pp_rank):
        held = tuple(every[stage][kind] for kind in ("first", "dense", "sparse", "last", "second"))
        yield stage, _Place(config, held, plan.holders(stage)[0] != pp_rank, *rest)


@lru_cache(maxsize=1024)
def _parameters(place: _Place) -> list[tuple[int, Held]]:
    return list(place.parameters())


@lru_cache(maxsize=4096)
def _buffers(places: tuple[_Place, ...], is_zero3: bool, precision: str) -> list[tuple[int, bool]]:
    parts = [
        LocalParameter(number, unit, *held) for number, place in enumerate(places) for unit, held in _parameters(place)
    ]
    buckets = buckets_of(parts, is_zero3, precision)
    return [(sum(part.numel for part in bucket), "ep" in bucket[0].kind) for bucket in buckets]


def buckets_of(parts: list[LocalParameter], is_zero3: bool, precision: str) -> list[list[LocalParameter]]:
    """Return the parameters of every flat buffer: buckets as those of `dp.buckets`, or under ZeRO-3 units."""
    if is_zero3:
        return [list(run) for _, run in groupby(parts, key=lambda part: (part.stage, part.unit, part.kind))]
    buckets: list[list[LocalParameter]] = []
    most = BUCKET_BYTES // NUMBER_BYTES[precision][0]
    for _, run in groupby(reversed(parts), key=lambda part: part.kind):
        numel = most + 1
        for part in run:
            numel += part.numel
            if numel > most:
                buckets.append([])
                numel = part.numel
            buckets[-1].append(part)
    return buckets
