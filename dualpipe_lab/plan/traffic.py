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
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from dualpipe_lab.launch.record.ledger import Ledger, RankLedger
from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gradient_traffic import GradientTraffic, rank_actions
from dualpipe_lab.plan.rules import has_experts, has_mtp, layers_of
from dualpipe_lab.plan.stage_traffic import COUNT_BYTES, Routing, StageTraffic
from dualpipe_lab.pp.program import B, F, I
from dualpipe_lab.pp.validation.rules import routes

PARTS = ("layers", "pipeline", "gradients", "norm", "routers")
_NUMBER = 8  # bytes of a shape's number, and of a norm's power


@dataclass(frozen=True)
class StepTraffic:
    """The messages and bytes of one step; it prints as the ledger of a run does."""

    title: str  # the plan and the batch
    parts: dict[str, Ledger]  # by `PARTS`

    @property
    def ledger(self) -> Ledger:
        """All parts together."""
        by_rank = zip(*(part.ranks for part in self.parts.values()), strict=True)
        return Ledger([_together(ledgers) for ledgers in by_rank])

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
    found: dict[str, list[RankLedger]] = {part: [] for part in PARTS}
    step = _Step(plan, config, num_rows, sequence_length)
    loads = step.uniform() if routing is None else routing
    for rank in range(plan.world_size):
        calls = {part: Calls(rank) for part in PARTS}
        step.layers(calls["layers"], loads)
        step.pipeline(calls["pipeline"])
        gradients = GradientTraffic(plan, config, calls["gradients"])
        gradients.enter_mirrors()
        gradients.enter()
        if clips:
            calls["norm"].all_reduce(range(plan.world_size), 2, _NUMBER)
        step.routers(calls["routers"])
        for part in PARTS:
            found[part].append(calls[part].ledger)
    title = f"{plan}; {num_rows * plan.data_size * plan.num_microbatches} sequences of {sequence_length} per step"
    title += "" if routing is not None or not has_experts(config) else "; uniform routing"
    return StepTraffic(title, {part: Ledger(ledgers) for part, ledgers in found.items()})


class _Step:
    """Each method enters the calls of one rank in one part of the step."""

    def __init__(self, plan: PlanFields, config: ModelConfig, num_rows: int, sequence_length: int) -> None:
        self.plan, self.config, self.shape = plan, config, (num_rows, sequence_length)
        self.has_mtp, self.shares = has_mtp(plan, config), layers_of(plan, config)
        first = getattr(config, "num_dense_layers", config.num_layers)
        self.sparse = [[layer for layer in share if layer >= first] for share in self.shares]
        self.sparse[-1] += [config.num_layers] * self.has_mtp

    def layers(self, calls: Calls, routing: Routing) -> None:
        traffic, actions = self._traffic(calls), rank_actions(self.plan, calls.rank)
        for stage, kind, _ in actions:
            ends = stage == 0, stage == len(self.shares) - 1
            if kind == F:
                traffic.forward(self.shares[stage], *ends)
                if self.has_mtp and ends[1]:
                    traffic.mtp_forward()
            elif kind in (B, I):
                traffic.backward(self.shares[stage], *ends)
                if self.has_mtp and ends[1]:
                    traffic.mtp_backward(has_table=not ends[0])
        for stage in {action.stage for action in actions}:
            for layer in self.sparse[stage]:
                traffic.enter_rows(layer, routing)

    def pipeline(self, calls: Calls) -> None:
        """Enter activations, their gradients, and the shapes' numbers, from a direction's first stage to the others."""
        plan, program = self.plan, self.plan.program
        if program is None:
            return
        num_bytes, here = self._traffic(calls).boundary_bytes, plan.topology.at(calls.rank)
        ranks, me, taken = here.ranks("pp"), here.rank("pp"), Counter(routes(program))
        for route, count in taken.items():
            for before, after in pairwise(route):
                if before != after and me in (before, after):
                    for _ in range(count):  # an activation one way, its gradient the other
                        calls.exchange(ranks[after if me == before else before], num_bytes)
        for route, count in sorted(taken.items()):
            for other in sorted(set(route) - {route[0]}):
                parent = route[route.index(other) - 1]
                if me == other:
                    calls.receive(ranks[parent], count * _NUMBER)
                elif me == parent:
                    calls.send(ranks[other], count * _NUMBER)

    def routers(self, calls: Calls) -> None:
        """Enter the sums of the experts' loads, by which the routers' biases move, once per step."""
        plan, here = self.plan, self.plan.topology.at(calls.rank)
        stages = sorted({action.stage for action in rank_actions(plan, calls.rank)})
        total = sum(len(self.sparse[stage]) for stage in stages)
        if isinstance(self.config, LlamaConfig) or not total:
            return
        ranks = here.ranks(*plan.copy_axes) if plan.copy_axes else (calls.rank,)
        calls.all_reduce(ranks, total * self.config.num_experts, COUNT_BYTES)
        shared = Counter[tuple[int, ...]]()  # by the ranks of pp with copies: the routers of those
        for stage in stages:
            shared[plan.holders(stage)] += len(self.sparse[stage])
        for holders, count in shared.items():
            if len(holders) > 1 and count:
                ranks = tuple(here.ranks("pp")[other] for other in holders)
                calls.all_reduce(ranks, count * self.config.num_experts, COUNT_BYTES)

    def uniform(self) -> dict[tuple[int, int], list[int]]:
        """Return loads that are as even as they can be, by rank and layer."""
        found: dict[tuple[int, int], list[int]] = {}
        if isinstance(self.config, LlamaConfig):
            return found
        for rank in range(self.plan.world_size):
            forwards = Counter(action.stage for action in rank_actions(self.plan, rank) if action.kind == F)
            slots = self._traffic(Calls(rank)).num_tokens * self.config.num_experts_per_token
            for stage, count in forwards.items():
                share, more = divmod(slots * count, self.config.num_experts)
                loads = [share + (expert < more) for expert in range(self.config.num_experts)]
                found |= {(rank, layer): loads for layer in self.sparse[stage]}
        return found

    def _traffic(self, calls: Calls) -> StageTraffic:
        return StageTraffic(self.plan, self.config, calls, *self.shape)


def _together(ledgers: tuple[RankLedger, ...]) -> RankLedger:
    total = RankLedger()
    for ledger in ledgers:
        for name, entry in ledger.entries.items():
            total.add(name, entry.sent, entry.received, entry.peers)
            total.entries[name].count += entry.count - 1
            total.entries[name].sent_to.update(entry.sent_to)
    return total
