"""`legal_plans` and `nearest_plan`: every plan of so many ranks that a model allows, and the one nearest to a plan.

Chapter: book/whole/cuts.  In: a config, a number of ranks.  Out: plans.
  distance     the number of fields that differ; of equals, the least sum of |log2| of the ratios and other steps
  search       the rules stand in groups that share the sizes of the axes alone (`dualpipe_lab.plan.rules`), so for
               each factorisation of the ranks every group is searched on its own, and the distances add up
Ties: the plan with the most data ranks, then the first in the order of enumeration: the answer is always the same.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from math import log2
from typing import Any, NamedTuple, TypeVar

from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.rules import Rule, first_problem, grid, has_experts, pipeline, sequence, zero
from dualpipe_lab.pp import schedules

AnyPlan = TypeVar("AnyPlan", bound=PlanFields)
_AXES = ("pp", "dp", "cp", "tp", "ep")
_SIZES = (*_AXES, "num_microbatches")


class Distance(NamedTuple):
    """How far one plan is from another."""

    num_fields: int
    step: float

    def plus(self, other: "Distance") -> "Distance":
        """Return the sum of two distances."""
        return Distance(self.num_fields + other.num_fields, round(self.step + other.step, 6))


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


def distance(plan: PlanFields, other: PlanFields, fields: Iterable[str]) -> Distance:
    """Return how many of the fields differ, and by how much."""
    return _distance({name: _step(name, getattr(plan, name), getattr(other, name)) for name in fields})


def _distance(steps: Mapping[str, float]) -> Distance:
    return Distance(sum(step > 0 for step in steps.values()), round(sum(steps.values()), 6))


def nearest_plan(
    plan: AnyPlan,
    config: ModelConfig,
    sequence_length: int | None = None,
    num_ranks: int | None = None,
    global_batch: int | None = None,
) -> AnyPlan | None:
    """Return the legal plan with the fewest, smallest changes; None if no plan of so many ranks fits the model.

    With `global_batch`, the sequences of a step divide among data ranks and microbatches.
    """
    world_size = plan.world_size if num_ranks is None else num_ranks
    best: tuple[Distance, AnyPlan] | None = None
    found = ((distance(plan, grid, (*_AXES, "experts_in_data")), grid) for grid in grids(plan, config, world_size))
    for far, grid_plan in sorted(found, key=lambda pair: (pair[0], -pair[1].dp)):  # of equals, the most data ranks
        if best is not None and far >= best[0]:
            break  # the other groups only add to it
        if global_batch is not None and global_batch % grid_plan.data_size:
            continue
        share = None if global_batch is None else global_batch // grid_plan.data_size
        chosen = _settle(plan, grid_plan, config, sequence_length, share)
        if chosen is not None and (best is None or far.plus(chosen[0]) < best[0]):
            best = far.plus(chosen[0]), chosen[1]
    return None if best is None else best[1]


def legal_plans(
    plan: AnyPlan,
    config: ModelConfig,
    num_ranks: int,
    sequence_length: int | None = None,
    zeros: Sequence[int] = (0, 1, 2, 3),
    schedule_names: Sequence[str] | None = None,
) -> Iterator[AnyPlan]:
    """Yield every legal plan: factorisations, with ep as an axis and within the data; schedules; stages of ZeRO.

    All other fields are those of `plan`.  Without pp there is one schedule, that of `plan`.
    """
    names = schedules.names(synchronous=True) if schedule_names is None else list(schedule_names)
    for grid_plan in grids(plan, config, num_ranks):
        for name, stage in product(names if grid_plan.pp > 1 else [plan.schedule], zeros):
            found = replace(grid_plan, schedule=name, zero=stage)
            if first_problem(found, config, sequence_length) is None:
                yield found


def grids(plan: AnyPlan, config: ModelConfig, num_ranks: int) -> Iterator[AnyPlan]:
    """Yield the plan with every factorisation of the ranks that keeps the rules of the grid."""
    for sizes in factorisations(num_ranks, len(_AXES)):
        pp, dp, cp, tp, ep = sizes
        found = replace(plan, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, experts_in_data=False)
        if grid(found, config, None) is None:
            yield replace(found, experts_in_data=plan.experts_in_data) if found.ep == 1 else found
    if not has_experts(config):
        return
    for pp, dp, cp, tp in factorisations(num_ranks, 4):
        for ep in range(2, dp * cp + 1):
            found = replace(plan, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, experts_in_data=True)
            if dp * cp % ep == 0 and grid(found, config, None) is None:
                yield found


def _settle(
    plan: PlanFields, grid_plan: AnyPlan, config: ModelConfig, sequence_length: int | None, share: int | None
) -> tuple[Distance, AnyPlan] | None:
    """Choose the fields of each group of rules; None if a group has no legal choice in this grid.

    `share`: the sequences of a data rank, if they must divide into microbatches.
    """
    chosen = _settle_pipeline(plan, grid_plan.pp, config, share)
    total = Distance(0, 0.0)
    for rule, choices in _choices(plan, grid_plan.pp, config.num_layers, share):
        if rule is not pipeline:
            chosen = _first_legal(rule, choices, grid_plan, config, sequence_length)
        if chosen is None:
            return None
        total, grid_plan = total.plus(chosen.far), replace(grid_plan, **chosen.fields)
    return total, grid_plan


@lru_cache(maxsize=64)
def _settle_pipeline(plan: PlanFields, pp: int, config: ModelConfig, share: int | None) -> "_Choice | None":
    # they depend on pp and the share alone, and programs take time to build
    _, choices = _choices(plan, pp, config.num_layers, share)[0]
    return _first_legal(pipeline, choices, replace(plan, pp=pp), config, None)


class _Choice(NamedTuple):
    """Values of the fields of a group of rules, and how far they are from the plan's."""

    far: Distance
    fields: dict[str, Any]


def _first_legal(
    rule: Rule, choices: list[_Choice], plan: PlanFields, config: ModelConfig, sequence_length: int | None
) -> _Choice | None:
    return next((one for one in choices if rule(replace(plan, **one.fields), config, sequence_length) is None), None)


@lru_cache(maxsize=64)
def _choices(plan: PlanFields, pp: int, num_layers: int, share: int | None) -> list[tuple[Rule, list[_Choice]]]:
    """Return, for each group of rules behind the grid's, all values of its fields to try, the nearest first."""
    found = []
    for rule, values in _groups(plan, pp, num_layers, share):
        fields = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
        far = [_distance({name: _step(name, getattr(plan, name), new[name]) for name in new}) for new in fields]
        choices = map(_Choice, far, fields)
        found.append((rule, sorted(choices, key=lambda choice: choice.far)))
    return found


def _groups(plan: PlanFields, pp: int, num_layers: int, share: int | None) -> list[tuple[Rule, dict[str, list[Any]]]]:
    """Return, for each group of rules behind the grid's, its fields and the values to try, the plan's own first."""
    counts = [plan.num_microbatches, 2 * pp, plan.num_microbatches + 1, max(1, plan.num_microbatches - 1)]
    if share is not None:
        counts = [count for count in (plan.num_microbatches, *range(1, share + 1)) if share % count == 0]
    pipeline_fields: dict[str, list[Any]] = {
        "schedule": _distinct(plan.schedule, "1f1b", *schedules.names(synchronous=True)),
        "num_microbatches": _distinct(*counts),
        "chunks": _distinct(plan.chunks, None, *range(1, num_layers // pp + 1)) if plan.chunks else [None],
        "layers": _distinct(plan.layers, None),
        "overlap": _distinct(plan.overlap, False),
        "loss_chunk": _distinct(plan.loss_chunk, None),
    }
    sequence_fields: dict[str, list[Any]] = {
        "sequence_parallel": _distinct(plan.sequence_parallel, False),
        "layout": _distinct(plan.layout, "zigzag", "striped", "contiguous"),
        "multi_token": _distinct(plan.multi_token, None),
    }
    zero_fields: dict[str, list[Any]] = {
        "zero": _distinct(plan.zero, 0, 1, 2, 3),
        "hybrid": _distinct(plan.hybrid, False),
        "ranks_per_node": _distinct(plan.ranks_per_node, None),
    }
    return [(pipeline, pipeline_fields), (sequence, sequence_fields), (zero, zero_fields)]


def _distinct(*values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _step(name: str, before: Any, after: Any) -> float:
    """How large the change of one field is; 0 for none."""
    if before == after:
        return 0.0
    if name in _SIZES or (name == "chunks" and None not in (before, after)):
        return abs(log2(after / before))
    if name == "zero":
        return float(abs(after - before))
    if name == "schedule":
        return 1 + _preference()[after]
    return 1.0


@cache
def _preference() -> dict[str, float]:
    """1F1B first, then the registry's order; less than a whole step in all."""
    names = _distinct("1f1b", *schedules.names())
    return {name: place / (2 * len(names)) for place, name in enumerate(names)}
