"""The rules that a plan and a model keep together, each as a sentence with the values; every plan that keeps them.

Chapter: book/whole/cuts.  In: a plan, a model's config, the length of a sequence.  Out: what is wrong, or None; plans.
The rules stand in four groups, which share the sizes of the axes alone.
  grid       pp, dp, cp, tp, ep, experts_in_data
  pipeline   num_microbatches, schedule, chunks, layers, overlap, loss_chunk
  sequence   sequence_parallel, layout, mtp
  zero       zero, hybrid, ranks_per_node; it also reads loss_chunk, mtp and overlap
The plan nearest to another one:
  distance   the number of fields that differ; of equals, the least sum of |log2| of the ratios and other steps
  search     for each factorisation of the ranks every group is searched on its own, and the distances add up
  ties       the plan with the most data ranks, then the first in the order of enumeration: always the same answer
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from math import log2
from typing import Any, TypeAlias, TypeVar

from dualpipe_lab.cp.layouts import make_layout
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig, check_mtp, check_sizes, stage_layers
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.pp import schedules

Rule: TypeAlias = Callable[[PlanFields, ModelConfig, int | None], None]  # raises ValueError
P = TypeVar("P", bound=PlanFields)
Distance: TypeAlias = tuple[int, float]  # fields that differ, and the sum of their steps
_Choice: TypeAlias = tuple[Distance, dict[str, Any]]  # values of the fields of a group, and how far they are
_AXES = ("pp", "dp", "cp", "tp", "ep")


def check_grid(plan: PlanFields, config: ModelConfig, sequence_length: int | None) -> None:
    """Raise ValueError unless the axes fit the model."""
    if plan.ep > 1 and not has_experts(config):
        raise ValueError(f"ep shards experts, and this model has none, got ep {plan.ep}")
    check_sizes(config, replace(plan, ranks_per_node=None).topology)  # nodes are of `check_zero`
    if plan.pp > config.num_layers:
        raise ValueError(f"every stage needs a layer, got {config.num_layers} layers for pp {plan.pp}")


def check_pipeline(plan: PlanFields, config: ModelConfig, sequence_length: int | None) -> None:
    """Raise ValueError unless the schedule has these microbatches, and the model layers for its stages."""
    if not schedules.named(plan.schedule).is_synchronous:
        raise ValueError(
            f"training needs one version of the weights per step, and {plan.schedule} updates them in between; use a "
            "synchronous schedule"
        )
    if plan.pp == 1 and plan.chunks is not None:
        raise ValueError(f"chunks are stages per rank of pp, got chunks={plan.chunks} and pp 1")
    layers_of(plan, config)
    if plan.overlap and not has_experts(config):
        raise ValueError("overlap hides the all-to-alls of experts, and this model has none, got overlap=True")
    if plan.overlap and not plan.has_pairs:
        where = f"{plan.schedule} has none" if plan.pp > 1 else "a single stage has none"
        raise ValueError(
            f"overlap needs pairs of a forward and a backward, and {where}; use dualpipe, dualpipev or paired_1f1b"
        )


def check_sequence(plan: PlanFields, config: ModelConfig, sequence_length: int | None) -> None:
    """Raise ValueError unless sequences can be sharded along cp and tp, and have the second targets of `mtp`."""
    if plan.mtp is not None:
        check_mtp(config, plan.tp, plan.mtp)
        if sequence_length == 1:
            raise ValueError("a second token needs sequences of 2 tokens or more, got a length of 1")
    if sequence_length is None:
        return
    uneven = next((size for size in lengths_of(plan, sequence_length) if size % plan.tp), None)
    if plan.sequence_parallel and uneven is not None:
        raise ValueError(
            f"sequence parallelism shards the tokens of a rank evenly along tp, got {uneven} tokens and tp {plan.tp}"
        )


def check_zero(plan: PlanFields, config: ModelConfig, sequence_length: int | None) -> None:
    """Raise ValueError unless there are copies, on the nodes that `hybrid` needs, which ZeRO can shard."""
    nodes = plan.ranks_per_node
    if nodes is not None and plan.world_size % nodes:
        raise ValueError(f"ranks_per_node must divide the ranks, got {nodes} and {plan.world_size} ranks")
    if plan.zero and plan.num_copies == 1:
        raise ValueError(
            f"ZeRO-{plan.zero} shards over the ranks of dp, cp and ep that copy a weight, got one; use zero=0"
        )
    # the loss in chunks calls the head behind its stage; ZeRO-3 frees a stage that it gathers as one unit before that
    is_tied = plan.pp == 1 and getattr(config, "tied", False)
    has_mtp_head = has_mtp(plan, config) and not plan.overlap  # overlapped experts hold a stage until its loss
    if plan.zero == 3 and plan.loss_chunk is not None and (is_tied or has_mtp_head):
        what = "a stage with a tied table at both ends" if is_tied else "a stage that predicts a second token"
        raise ValueError(
            f"ZeRO-3 frees {what} before a loss in chunks uses its head, got zero=3 and "
            f"loss_chunk={plan.loss_chunk}; use zero=2, or leave loss_chunk out"
        )
    if plan.hybrid:
        _check_hybrid(plan)


def _check_hybrid(plan: PlanFields) -> None:
    if plan.ranks_per_node is None:
        raise ValueError("hybrid ZeRO shards within a node, got ranks_per_node=None; give the ranks of a node")
    if not plan.zero:
        raise ValueError("hybrid says where ZeRO shards, got zero=0; use zero=1, 2 or 3")
    dense, _ = (plan.topology.parts_by_node(*axes) for axes in (plan.copy_axes, plan.expert_copy_axes))
    within, num_nodes = len(dense[0][0]), len(dense[0])
    if within == 1 or num_nodes == 1:
        raise ValueError(
            f"hybrid ZeRO needs copies of a weight on several ranks of each of several nodes, got {within} of "
            f"{plan.num_copies} copies on a node of {plan.ranks_per_node}"
        )


def first_problem(
    plan: PlanFields,
    config: ModelConfig,
    sequence_length: int | None = None,
    rules: Sequence[Rule] = (check_grid, check_pipeline, check_sequence, check_zero),
) -> str | None:
    """Return the first rule that a plan breaks, or None."""
    try:
        for rule in rules:
            rule(plan, config, sequence_length)
    except ValueError as error:
        return str(error)
    return None


def has_experts(config: ModelConfig) -> bool:
    """Whether a model has layers of experts."""
    return config.num_layers > int(getattr(config, "num_dense_layers", config.num_layers))


def has_mtp(plan: PlanFields, config: ModelConfig) -> bool:
    """Whether the model's last stage predicts a second token under this plan."""
    return plan.mtp is not None and not isinstance(config, LlamaConfig)


def layers_of(plan: PlanFields, config: ModelConfig) -> tuple[range, ...]:
    """Return the layers of every stage."""
    return stage_layers(config, plan.num_stages, plan.layers, has_mtp(plan, config))


def contents(plan: PlanFields, model: ModelConfig) -> list[Counter[str]]:
    """Return how many layers and ends of each kind every stage has: first, dense, sparse, last, second."""
    first, shares, found = getattr(model, "num_dense_layers", model.num_layers), layers_of(plan, model), []
    for number, layers in enumerate(shares):
        is_last, num_dense = number == len(shares) - 1, max(min(first, layers.stop) - layers.start, 0)
        ends = {"last": is_last, "second": is_last and has_mtp(plan, model)}
        found.append(+Counter(first=number == 0, dense=num_dense, sparse=len(layers) - num_dense, **ends))
    return found


def lengths_of(plan: PlanFields, sequence_length: int) -> list[int]:
    """Return the tokens of a sequence on each rank of cp; ValueError for none, or if the layout does not fit."""
    if sequence_length < 1:
        raise ValueError(f"a sequence has a token at least, got a length of {sequence_length}")
    if plan.cp == 1:
        return [sequence_length]
    layout = make_layout(plan.layout, sequence_length, plan.cp)
    return [layout.size(rank) for rank in range(plan.cp)]


def factorisations(num_ranks: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as an ordered product, the first factor ascending."""
    if num_factors == 1:
        yield (num_ranks,)
        return
    for first in range(1, num_ranks + 1):
        if num_ranks % first == 0:
            for others in factorisations(num_ranks // first, num_factors - 1):
                yield (first, *others)


def distance(plan: PlanFields, other: PlanFields, fields: Iterable[str]) -> Distance:
    """Return how many of the fields differ, and by how much."""
    return _far(_step(name, getattr(plan, name), getattr(other, name)) for name in fields)


def _far(steps: Iterable[float]) -> Distance:
    found = [step for step in steps if step > 0]
    return len(found), round(sum(found), 6)


def _plus(one: Distance, other: Distance) -> Distance:
    return one[0] + other[0], round(one[1] + other[1], 6)


def nearest_plan(
    plan: P,
    config: ModelConfig,
    sequence_length: int | None = None,
    num_ranks: int | None = None,
    global_batch: int | None = None,
) -> P | None:
    """Return what `Plan.nearest` says."""
    world_size = plan.world_size if num_ranks is None else num_ranks
    best: tuple[Distance, P] | None = None
    found = ((distance(plan, each, (*_AXES, "experts_in_data")), each) for each in grids(plan, config, world_size))
    for far, grid_plan in sorted(found, key=lambda pair: (pair[0], -pair[1].dp)):  # of equals, the most data ranks
        if best is not None and far >= best[0]:
            break  # the other groups only add to it
        share, rest = (None, 0) if global_batch is None else divmod(global_batch, grid_plan.data_size)
        chosen = None if rest else _settle(plan, grid_plan, config, sequence_length, share)
        if chosen is not None and (best is None or _plus(far, chosen[0]) < best[0]):
            best = _plus(far, chosen[0]), chosen[1]
    return None if best is None else best[1]


def legal_plans(
    plan: P,
    config: ModelConfig,
    num_ranks: int,
    sequence_length: int | None,
    zeros: Sequence[int],
    schedule_names: Sequence[str] | None,
) -> Iterator[P]:
    """Yield what `Plan.all` says: without pp there is one schedule, that of `plan`."""
    names = schedules.names(synchronous=True) if schedule_names is None else list(schedule_names)
    for grid_plan in grids(plan, config, num_ranks):
        for name, stage in product(names if grid_plan.pp > 1 else [plan.schedule], zeros):
            found = replace(grid_plan, schedule=name, zero=stage)
            if first_problem(found, config, sequence_length) is None:
                yield found


def grids(plan: P, config: ModelConfig, num_ranks: int) -> Iterator[P]:
    """Yield the plan with every factorisation of the ranks that keeps the rules of the grid."""
    for pp, dp, cp, tp, ep in factorisations(num_ranks, len(_AXES)):
        found = replace(plan, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, experts_in_data=False)
        if first_problem(found, config, None, [check_grid]) is None:
            yield replace(found, experts_in_data=plan.experts_in_data) if found.ep == 1 else found
    if not has_experts(config):
        return
    for pp, dp, cp, tp in factorisations(num_ranks, 4):
        for ep in range(2, dp * cp + 1):
            if dp * cp % ep == 0:
                found = replace(plan, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, experts_in_data=True)
                if first_problem(found, config, None, [check_grid]) is None:
                    yield found


def _settle(
    plan: P, grid_plan: P, config: ModelConfig, sequence_length: int | None, share: int | None
) -> tuple[Distance, P] | None:
    """Choose the fields of each group of rules; `share`: sequences of a data rank to divide into microbatches."""
    total, of_pp = (0, 0.0), replace(plan, pp=grid_plan.pp)  # all that a pipeline depends on; programs take their time
    for rule in (check_pipeline, check_sequence, check_zero):
        where = (of_pp, None) if rule is check_pipeline else (grid_plan, sequence_length)
        chosen = _first_legal(rule, plan, *where, config, share)
        if chosen is None:
            return None
        total, grid_plan = _plus(total, chosen[0]), replace(grid_plan, **chosen[1])
    return total, grid_plan


@lru_cache(maxsize=1024)
def _first_legal(
    rule: Rule, plan: PlanFields, there: PlanFields, sequence_length: int | None, config: ModelConfig, share: int | None
) -> _Choice | None:
    for choice in _choices(plan, there.pp, config.num_layers, share)[rule]:
        if first_problem(replace(there, **choice[1]), config, sequence_length, [rule]) is None:
            return choice
    return None


@lru_cache(maxsize=64)
def _choices(plan: PlanFields, pp: int, num_layers: int, share: int | None) -> dict[Rule, list[_Choice]]:
    """Return, for each group of rules behind the grid's, all values of its fields to try, the nearest first."""
    counts = [plan.num_microbatches, 2 * pp, plan.num_microbatches + 1, max(1, plan.num_microbatches - 1)]
    if share is not None:
        counts = [count for count in (plan.num_microbatches, *range(1, share + 1)) if share % count == 0]
    groups: dict[Rule, dict[str, list[Any]]] = {
        check_pipeline: {
            "schedule": [plan.schedule, "1f1b", *schedules.names(synchronous=True)],
            "num_microbatches": counts,
            "chunks": [plan.chunks, None, *range(1, num_layers // pp + 1)] if plan.chunks else [None],
            "layers": [plan.layers, None],
            "overlap": [plan.overlap, False],
            "loss_chunk": [plan.loss_chunk, None],
        },
        check_sequence: {
            "sequence_parallel": [plan.sequence_parallel, False],
            "layout": [plan.layout, "zigzag", "striped", "contiguous"],
            "mtp": [plan.mtp, None],
        },
        check_zero: {
            "zero": [plan.zero, 0, 1, 2, 3],
            "hybrid": [plan.hybrid, False],
            "ranks_per_node": [plan.ranks_per_node, None],
        },
    }
    found = {}
    for rule, values in groups.items():
        choices = []
        for chosen in product(*map(dict.fromkeys, values.values())):
            fields = dict(zip(values, chosen, strict=True))
            choices.append((_far(_step(name, getattr(plan, name), new) for name, new in fields.items()), fields))
        found[rule] = sorted(choices, key=lambda choice: choice[0])
    return found


def _step(name: str, before: Any, after: Any) -> float:
    if before == after:
        return 0.0
    if name in (*_AXES, "num_microbatches") or (name == "chunks" and None not in (before, after)):
        return abs(log2(after / before))
    if name == "zero":
        return float(abs(after - before))
    if name == "schedule":
        return 1 + _preference()[after]
    return 1.0


@cache
def _preference() -> dict[str, float]:
    """1F1B first, then the registry's order; less than a whole step in all."""
    names = list(dict.fromkeys(("1f1b", *schedules.names())))
    return {name: place / (2 * len(names)) for place, name in enumerate(names)}
