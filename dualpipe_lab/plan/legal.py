"""`legal_plans` and `nearest_plan`: every plan of so many ranks that a model allows, and the one nearest to a plan.

Chapter: book/whole/cuts.  In: a config, a number of ranks.  Out: plans.
  distance     the number of fields that differ; of equals, the least sum of |log2| of the ratios and other steps
  search       the rules stand in groups that share the sizes of the axes alone (`dualpipe_lab.plan.rules`), so for
               each factorisation of the ranks every group is searched on its own, and the distances add up
Ties: the plan with the most data ranks, then the first in the order of enumeration: the answer is always the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from math import log2
from typing import Any, TypeAlias

from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import Rule, first_problem, grid, has_experts, pipeline, sequence, zero
from dualpipe_lab.pp import schedules

Distance: TypeAlias = tuple[int, float]  # fields that differ, and the sum of their steps
_Choice: TypeAlias = tuple[Distance, dict[str, Any]]  # values of the fields of a group, and how far they are
_AXES = ("pp", "dp", "cp", "tp", "ep")


def factorisations(num_ranks: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write a number as an ordered product, the first factor ascending.

    >>> list(factorisations(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if num_factors == 1:
        yield (num_ranks,)
        return
    for first in range(1, num_ranks + 1):
        if num_ranks % first == 0:
            for others in factorisations(num_ranks // first, num_factors - 1):
                yield (first, *others)


def distance(plan: Plan, other: Plan, fields: Iterable[str]) -> Distance:
    """Return how many of the fields differ, and by how much."""
    steps = [_step(name, getattr(plan, name), getattr(other, name)) for name in fields]
    return sum(step > 0 for step in steps), round(sum(steps), 6)


def _plus(one: Distance, other: Distance) -> Distance:
    return one[0] + other[0], round(one[1] + other[1], 6)


def nearest_plan(
    plan: Plan,
    config: ModelConfig,
    sequence_length: int | None = None,
    num_ranks: int | None = None,
    global_batch: int | None = None,
) -> Plan | None:
    """Return what `Plan.nearest` says."""
    world_size = plan.world_size if num_ranks is None else num_ranks
    best: tuple[Distance, Plan] | None = None
    found = ((distance(plan, grid, (*_AXES, "experts_in_data")), grid) for grid in grids(plan, config, world_size))
    for far, grid_plan in sorted(found, key=lambda pair: (pair[0], -pair[1].dp)):  # of equals, the most data ranks
        if best is not None and far >= best[0]:
            break  # the other groups only add to it
        share, rest = (None, 0) if global_batch is None else divmod(global_batch, grid_plan.data_size)
        chosen = None if rest else _settle(plan, grid_plan, config, sequence_length, share)
        if chosen is not None and (best is None or _plus(far, chosen[0]) < best[0]):
            best = _plus(far, chosen[0]), chosen[1]
    return None if best is None else best[1]


def legal_plans(
    plan: Plan,
    config: ModelConfig,
    num_ranks: int,
    sequence_length: int | None,
    zeros: Sequence[int],
    schedule_names: Sequence[str] | None,
) -> Iterator[Plan]:
    """Yield what `Plan.all` says: without pp there is one schedule, that of `plan`."""
    names = schedules.names(synchronous=True) if schedule_names is None else list(schedule_names)
    for grid_plan in grids(plan, config, num_ranks):
        for name, stage in product(names if grid_plan.pp > 1 else [plan.schedule], zeros):
            found = replace(grid_plan, schedule=name, zero=stage)
            if first_problem(found, config, sequence_length) is None:
                yield found


def grids(plan: Plan, config: ModelConfig, num_ranks: int) -> Iterator[Plan]:
    """Yield the plan with every factorisation of the ranks that keeps the rules of the grid."""
    for pp, dp, cp, tp, ep in factorisations(num_ranks, len(_AXES)):
        found = replace(plan, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, experts_in_data=False)
        if grid(found, config, None) is None:
            yield replace(found, experts_in_data=plan.experts_in_data) if found.ep == 1 else found
    if not has_experts(config):
        return
    for pp, dp, cp, tp in factorisations(num_ranks, 4):
        for ep in range(2, dp * cp + 1):
            if dp * cp % ep == 0:
                found = replace(plan, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, experts_in_data=True)
                if grid(found, config, None) is None:
                    yield found


def _settle(
    plan: Plan, grid_plan: Plan, config: ModelConfig, sequence_length: int | None, share: int | None
) -> tuple[Distance, Plan] | None:
    """Choose the fields of each group of rules; None if a group has no legal choice in this grid.

    `share`: the sequences of a data rank, if they must divide into microbatches.
    """
    chosen = _settle_pipeline(plan, grid_plan.pp, config, share)
    total: Distance = (0, 0.0)
    for rule, choices in _choices(plan, grid_plan.pp, config.num_layers, share):
        if rule is not pipeline:
            chosen = _first_legal(rule, choices, grid_plan, config, sequence_length)
        if chosen is None:
            return None
        total, grid_plan = _plus(total, chosen[0]), replace(grid_plan, **chosen[1])
    return total, grid_plan


@lru_cache(maxsize=64)
def _settle_pipeline(plan: Plan, pp: int, config: ModelConfig, share: int | None) -> _Choice | None:
    # they depend on pp and the share alone, and programs take time to build
    _, choices = _choices(plan, pp, config.num_layers, share)[0]
    return _first_legal(pipeline, choices, replace(plan, pp=pp), config, None)


def _first_legal(
    rule: Rule, choices: list[_Choice], plan: Plan, config: ModelConfig, sequence_length: int | None
) -> _Choice | None:
    return next((one for one in choices if rule(replace(plan, **one[1]), config, sequence_length) is None), None)


@lru_cache(maxsize=64)
def _choices(plan: Plan, pp: int, num_layers: int, share: int | None) -> list[tuple[Rule, list[_Choice]]]:
    """Return, for each group of rules behind the grid's, all values of its fields to try, the nearest first."""
    counts = [plan.num_microbatches, 2 * pp, plan.num_microbatches + 1, max(1, plan.num_microbatches - 1)]
    if share is not None:
        counts = [count for count in (plan.num_microbatches, *range(1, share + 1)) if share % count == 0]
    groups: list[tuple[Rule, dict[str, list[Any]]]] = [
        (
            pipeline,
            {
                "schedule": [plan.schedule, "1f1b", *schedules.names(synchronous=True)],
                "num_microbatches": counts,
                "chunks": [plan.chunks, None, *range(1, num_layers // pp + 1)] if plan.chunks else [None],
                "layers": [plan.layers, None],
                "overlap": [plan.overlap, False],
                "loss_chunk": [plan.loss_chunk, None],
            },
        ),
        (
            sequence,
            {
                "sequence_parallel": [plan.sequence_parallel, False],
                "layout": [plan.layout, "zigzag", "striped", "contiguous"],
                "multi_token": [plan.multi_token, None],
            },
        ),
        (
            zero,
            {
                "zero": [plan.zero, 0, 1, 2, 3],
                "hybrid": [plan.hybrid, False],
                "ranks_per_node": [plan.ranks_per_node, None],
            },
        ),
    ]
    found = []
    for rule, values in groups:
        choices = []
        for chosen in product(*map(dict.fromkeys, values.values())):
            steps = [_step(name, getattr(plan, name), new) for name, new in zip(values, chosen, strict=True)]
            far = sum(step > 0 for step in steps), round(sum(steps), 6)
            choices.append((far, dict(zip(values, chosen, strict=True))))
        found.append((rule, sorted(choices, key=lambda choice: choice[0])))
    return found


def _step(name: str, before: Any, after: Any) -> float:
    """How large the change of one field is; 0 for none."""
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
