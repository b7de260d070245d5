"""`gradient_traffic`: the calls by which a rank sums gradients and gathers weights: mirrors, data ranks, ZeRO, ties.

Chapter: book/whole/sums.  In: a plan, a config, a rank.  Out: `Calls` of one step.
  ZeRO-0    an all-reduce of every bucket          ZeRO-1   a reduce-scatter, and an all-gather of the weights
  ZeRO-2    a reduce-scatter of the buckets of a stage in each of its backwards, and an all-gather of the weights
  ZeRO-3    of each unit an all-gather in every forward and backward, and a reduce-scatter in every backward; of I and W
            the first gathers and the second scatters
  tied      a sum of the table's gradient among the ranks that hold the first or the last stage, if those differ
"""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from dualpipe_lab.dp.layout import Layout
from dualpipe_lab.dp.sums import copy_ranks
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.fields import NUMBER_BYTES, PlanFields
from dualpipe_lab.plan.parameters import TIED, LocalParameter, buckets_of, parts_of
from dualpipe_lab.plan.rules import contents
from dualpipe_lab.pp.program import Action, B, F, I, Overlap, W


def gradients(plan: PlanFields, config: ModelConfig, rank: int) -> Calls:
    """Return the sums of a rank's gradients over data ranks and tied stages, and the gathers of its weights."""
    calls, here = Calls(rank), plan.topology.at(rank)
    first, last = plan.holders(0), plan.holders(plan.num_stages - 1)
    ends = tuple(here.ranks("pp")[place] for place in sorted({*first, *last})) if first != last else ()
    weight, grad, *_ = NUMBER_BYTES[plan.precision]
    passes = passes_of(plan, here.rank("pp"))
    for parts, ranks, replicas, layout in buckets_at(plan, config, rank):
        if plan.zero == 0:
            calls.all_reduce(ranks, layout.padded_numel, grad)
        if plan.zero == 3:
            calls.all_gather(ranks, layout.shard_numel, weight, _gathers(plan, config, parts[0], passes))
        if plan.zero:
            scatters = sum(passes.scatters[stage] for stage in {part.stage for part in parts})
            calls.reduce_scatter(ranks, layout.padded_numel, grad, 1 if plan.zero == 1 else scatters)
        if plan.zero in (1, 2):
            calls.all_gather(ranks, layout.shard_numel, weight)
        if replicas:
            calls.all_reduce(replicas, layout.shard_numel, grad)
        if ends and TIED in parts[0].kind:
            calls.all_reduce(ends, layout.shard_numel if plan.zero else layout.numel, grad)
    return calls


def mirrors(plan: PlanFields, config: ModelConfig, rank: int) -> Calls:
    """Return the sums of gradients over the two copies of a stage: under ZeRO-2 and 3 of shards."""
    calls, here, held = Calls(rank), plan.topology.at(rank), Counter[int]()
    me, ranks = here.rank("pp"), here.ranks("pp")
    copied = [stage for stage in plan.stages(me) if len(plan.holders(stage)) > 1]
    if not copied:
        return calls
    if plan.zero < 2:
        for part in parts_of(plan, config, rank):
            held[part.stage] += part.numel
    else:
        for bucket in buckets_at(plan, config, rank):
            for piece in bucket.layout.tensors_in(bucket.ranks.index(rank)):
                held[bucket.parts[piece.tensor].stage] += piece.stop - piece.start
    _, grad_bytes, *_ = NUMBER_BYTES[plan.precision]
    for stage in copied:
        if held[stage]:  # a shard may hold none of a stage, and a stage no layers
            calls.all_reduce(tuple(ranks[holder] for holder in plan.holders(stage)), held[stage], grad_bytes)
    return calls


class Bucket(NamedTuple):
    """Parameters in one flat buffer, the ranks of its sum, and under hybrid ZeRO those with its shard elsewhere."""

    parts: list[LocalParameter]
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    layout: Layout


def buckets_at(plan: PlanFields, config: ModelConfig, rank: int) -> list[Bucket]:
    """Return the flat buffers of a rank."""
    here = plan.topology.at(rank)
    dense, experts = (copy_ranks(here, axes, plan.hybrid) for axes in (plan.copy_axes, plan.expert_copy_axes))
    found = []
    for parts in buckets_of(parts_of(plan, config, rank), plan.zero == 3, plan.precision):
        ranks, replicas = experts if "ep" in parts[0].kind else dense
        found.append(Bucket(parts, ranks, replicas, Layout([part.numel for part in parts], len(ranks))))
    return found


def rank_actions(plan: PlanFields, pp_rank: int) -> list[Action]:
    """Return the actions of a rank; without pp every microbatch has an F and a B of the one stage."""
    if plan.program is None:
        return [Action(0, kind, number) for number in range(plan.num_microbatches) for kind in (F, B)]
    return list(plan.program.actions(pp_rank))


class Passes(NamedTuple):
    """How often a rank passes its stages, by their number."""

    gathers: Counter[int]  # forwards, and backwards with the input's gradient; of a pair on one stage one
    scatters: Counter[int]  # backwards with the weights' gradient
    splits: Counter[int]  # I and W that the runtime does not run as one


@lru_cache(maxsize=1024)
def passes_of(plan: PlanFields, pp_rank: int) -> Passes:
    """Count the passes of a step."""
    of: dict[str, Counter[int]] = {kind: Counter() for kind in (F, B, I, W)}
    for stage, kind, _ in rank_actions(plan, pp_rank):
        of[kind][stage] += 1
    gathers, splits = of[F] + of[B] + of[I], Counter(of[W])
    steps = () if plan.program is None else plan.program.ranks[pp_rank]
    if plan.overlap:
        pairs = [step for step in steps if isinstance(step, Overlap)]
        gathers -= Counter(pair.forward.stage for pair in pairs if pair.forward.stage == pair.backward.stage)
    else:
        runs = [one for one in pairwise(steps) if one[0][:2] == (0, I)]  # on stage 0 they are one where they are next
        splits[0] -= sum(other == one._replace(kind=W) for one, other in runs if isinstance(one, Action))
    return Passes(gathers, of[B] + of[W], splits)


def _gathers(plan: PlanFields, config: ModelConfig, first: LocalParameter, passes: Passes) -> int:
    """Return how often ZeRO-3 gathers a unit, of which this is the first parameter.

    W computes the weight of a router, which I has not, from a stage in pieces also the embedding's; it gathers layers
    with a router again, and prefetches the unit before each.
    """
    held = contents(plan, config)[first.stage]
    routers = held["sparse"] + held["second"]
    if plan.overlap or held["second"]:  # the stage is one unit
        again = bool(routers or held["first"])
    else:
        start = held["first"] + held["dense"]  # of the units with a router
        again = bool(routers) and start - 1 <= first.unit < start + held["sparse"]
    return passes.gathers[first.stage] + again * passes.splits[first.stage]
