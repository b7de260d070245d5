"""`traffic_of`: the messages and bytes of one training step, for every rank and operation, before a run.

Chapter: book/whole/sums.  In: a plan, a config, the sequences of a step.  Out: a ledger for each part of the step.
  layers      along tp, cp and ep, forward and backward                    `dualpipe_lab.plan.stage_traffic`
  pipeline    activations, their gradients, and the shapes of a step
  gradients   mirrors, tied tables, data ranks, weights                    `dualpipe_lab.plan.gradient_traffic`
  norm        one sum of two numbers over the world, where gradients are clipped
  routers     the sum of the experts' loads, by which the routers' biases move
The step is one of many: the first also exchanges headers of shapes, makes groups and compares shards.  What a trainer
sends to show its metrics comes on top.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise
from typing import TypeAlias

from dualpipe_lab.launch.record.ledger import Ledger
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.calls import Calls, total
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gradient_traffic import gradients, mirrors, rank_actions
from dualpipe_lab.plan.rules import has_experts, has_mtp, layers_of
from dualpipe_lab.plan.stage_traffic import COUNT_BYTES, StageTraffic
from dualpipe_lab.pp.program import F

Routing: TypeAlias = Mapping[tuple[int, int], Sequence[int]]  # by rank and layer: load_E of the rank's step
PARTS = ("layers", "pipeline", "gradients", "norm", "routers")
_NUMBER = 8  # bytes of a shape's number, and of a norm's power


@dataclass(frozen=True)
class StepTraffic:
    """The messages and bytes of one step; it prints as the ledger of a run does.

    Attributes:
        title: the plan and the batch.
        ranks: the calls of each rank, by part of the step.
    """

    title: str
    ranks: list[dict[str, Calls]]

    @cached_property
    def parts(self) -> dict[str, Ledger]:
        """The ledger of each of `PARTS`."""
        return {part: Ledger([found[part].ledger for found in self.ranks]) for part in PARTS}

    @cached_property
    def ledger(self) -> Ledger:
        """All parts together."""
        return Ledger([total(found.values(), rank).ledger for rank, found in enumerate(self.ranks)])

    def sent(self, rank: int | None = None, part: str | None = None) -> int:
        """Return the bytes that a rank, or all, send in a part of the step, or in all of it."""
        return (self.ledger if part is None else self.parts[part]).sent(rank=rank)

    def calls(self, rank: int) -> dict[str, tuple[int, int, int]]:
        """Return, by operation, the number of calls of a rank, the bytes that it sends and the bytes it receives."""
        entries = self.ledger.ranks[rank].entries
        return {name: (entry.count, entry.sent, entry.received) for name, entry in sorted(entries.items())}

    def __str__(self) -> str:
        return f"{self.title}\n{self.ledger}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.title)}</p>{self.ledger._repr_html_()}"


def check_traffic(plan: PlanFields, batch_size: int) -> int:
    """Return the sequences of a microbatch; ValueError for sequences that do not divide."""
    parts = plan.data_size * plan.num_microbatches
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"a step's sequences divide among {plan.data_size} data ranks x {plan.num_microbatches} microbatches, got "
            f"{batch_size}; use {-(-max(batch_size, 1) // parts) * parts}"
        )
    return batch_size // parts


def traffic_of(
    plan: PlanFields, config: ModelConfig, num_rows: int, sequence_length: int, routing: Routing | None, clips: bool
) -> StepTraffic:
    """Return the messages and bytes of a step, for microbatches of `num_rows` sequences."""
    found = []
    for rank in range(plan.world_size):
        norm = Calls(rank)
        if clips:
            norm.all_reduce(tuple(range(plan.world_size)), 2, _NUMBER)
        stages = StageTraffic(plan, config, rank, num_rows, sequence_length)
        sums = mirrors(plan, config, rank).add(gradients(plan, config, rank))
        parts = layers(stages, routing), pipeline(stages), sums, norm, routers(plan, config, rank)
        found.append(dict(zip(PARTS, parts, strict=True)))
    title = f"{plan}; {num_rows * plan.data_size * plan.num_microbatches} sequences of {sequence_length} per step"
    title += "" if routing is not None or not has_experts(config) else "; uniform routing"
    return StepTraffic(title, found)


def layers(stages: StageTraffic, routing: Routing | None) -> Calls:
    """Return the calls of a rank's layers and ends; `routing` None: loads that are as even as they can be."""
    found, plan = Calls(stages.rank), stages.plan
    forwards = Counter(action.stage for action in rank_actions(plan, stages.pp_rank) if action.kind == F)
    for stage, count in forwards.items():
        found.add(stages.stage(stage, count))
        for layer in sparse_layers(plan, stages.model)[stage]:
            even = [stages.uniform(count)] * len(stages.ep)
            found.add(stages.rows(even if routing is None else [routing[rank, layer] for rank in stages.ep]))
    return found


def sparse_layers(plan: PlanFields, config: ModelConfig) -> list[list[int]]:
    """Return the layers with experts of every stage."""
    first = getattr(config, "num_dense_layers", config.num_layers)
    found = [[layer for layer in share if layer >= first] for share in layers_of(plan, config)]
    found[-1] += [config.num_layers] * has_mtp(plan, config)
    return found


def pipeline(stages: StageTraffic) -> Calls:
    """Return activations, their gradients, and the shapes' numbers, from a direction's first stage to the others."""
    calls, plan = Calls(stages.rank), stages.plan
    ranks, me = plan.topology.at(stages.rank).ranks("pp"), stages.pp_rank
    for route, count in plan.routes:
        for before, after in pairwise(route):
            if before != after and me in (before, after):  # an activation one way, its gradient the other
                calls.exchange(ranks, ranks[after if me == before else before], stages.boundary_bytes, count)
        for other in sorted(set(route) - {route[0]}):
            parent = route[route.index(other) - 1]
            if me == other:
                calls.receive(ranks, ranks[parent], count * _NUMBER)
            elif me == parent:
                calls.send(ranks, ranks[other], count * _NUMBER)
    return calls


def routers(plan: PlanFields, config: ModelConfig, rank: int) -> Calls:
    """Return the sums of the experts' loads, by which the routers' biases move, once per step."""
    calls, here, sparse = Calls(rank), plan.topology.at(rank), sparse_layers(plan, config)
    stages = plan.stages(here.rank("pp"))
    num_routers = sum(len(sparse[stage]) for stage in stages)
    if isinstance(config, LlamaConfig) or not num_routers:
        return calls
    ranks = here.ranks(*plan.copy_axes) if plan.copy_axes else (rank,)
    calls.all_reduce(ranks, num_routers * config.num_experts, COUNT_BYTES)
    shared = Counter[tuple[int, ...]]()  # by the ranks of pp with copies: the routers of those
    for stage in stages:
        shared[plan.holders(stage)] += len(sparse[stage])
    for holders, count in shared.items():
        if len(holders) > 1 and count:
            mirrored = tuple(here.ranks("pp")[holder] for holder in holders)
            calls.all_reduce(mirrored, count * config.num_experts, COUNT_BYTES)
    return calls
