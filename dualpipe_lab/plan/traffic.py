"""`traffic_of`: the messages and bytes of one training step, for every rank and operation, before a run.

Chapter: book/whole/sums.  In: a plan, a config, the sequences of a step.  Out: a ledger for each part of the step.
  layers      along tp and cp, forward and backward                        `dualpipe_lab.plan.layer_traffic`
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
from dualpipe_lab.models.stage_rules import ModelConfig, stage_layers
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.expert_traffic import (
    ExpertTraffic,
    Routing,
    even_loads,
    router_calls,
    second_backward,
    second_forward,
)
from dualpipe_lab.plan.gradient_traffic import GradientTraffic
from dualpipe_lab.plan.layer_traffic import StageTraffic
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import has_experts, has_second
from dualpipe_lab.pp.program import B, F, I, Program
from dualpipe_lab.pp.validation.rules import routes

PARTS = ("layers", "pipeline", "gradients", "norm", "routers")
_NUMBER = 8  # bytes of a shape's number, and of a norm's power


@dataclass(frozen=True)
class StepTraffic:
    """The messages and bytes of one step; it prints as the ledger of a run does.

    Attributes:
        title: the plan and the batch.
        parts: a ledger for each of `PARTS`.
    """

    title: str
    parts: dict[str, Ledger]

    @property
    def ledger(self) -> Ledger:
        """All parts together."""
        return Ledger(
            [_together(ledgers) for ledgers in zip(*(part.ranks for part in self.parts.values()), strict=True)]
        )

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


def check_traffic(plan: Plan, batch_size: int) -> int:
    """Return the sequences of a microbatch.

    Raises:
        ValueError: sequences that do not divide.
    """
    parts = plan.data_size * plan.num_microbatches
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"a step's sequences divide among {plan.data_size} data ranks x {plan.num_microbatches} microbatches, got "
            f"{batch_size}; use {-(-max(batch_size, 1) // parts) * parts}"
        )
    return batch_size // parts


def traffic_of(
    plan: Plan,
    config: ModelConfig,
    num_rows: int,
    sequence_length: int,
    routing: Routing | None = None,
    clips: bool = True,
) -> StepTraffic:
    """Return the messages and bytes of a step, for microbatches of `num_rows` sequences."""
    found: dict[str, list[RankLedger]] = {part: [] for part in PARTS}
    step = _Step(plan, config, num_rows, sequence_length)
    loads = step.uniform() if routing is None else routing
    for rank in range(plan.world_size):
        for part in PARTS:
            calls = Calls(rank)
            if part == "layers":
                step.layers(calls, loads)
            elif part != "norm" or clips:
                getattr(step, part)(calls)
            found[part].append(calls.ledger)
    title = f"{plan}; {num_rows * plan.data_size * plan.num_microbatches} sequences of {sequence_length} per step"
    title += "" if routing is not None or not has_experts(config) else "; uniform routing"
    return StepTraffic(title, {part: Ledger(ledgers) for part, ledgers in found.items()})


class _Step:
    """One step under a plan; each method enters the calls of one rank in one part of it."""

    def __init__(self, plan: Plan, config: ModelConfig, num_rows: int, sequence_length: int) -> None:
        self.plan, self.config, self.shape = plan, config, (num_rows, sequence_length)
        self.has_second = has_second(plan, config)
        self.shares = stage_layers(config, plan.num_stages, plan.layers, self.has_second)

    def layers(self, calls: Calls, routing: Routing) -> None:
        """Enter forwards and backwards."""
        traffic = self._traffic(calls)
        for stage, kind in self._actions(calls.rank):
            ends = stage == 0, stage == len(self.shares) - 1
            if kind == F:
                traffic.forward(self.shares[stage], *ends)
                if self.has_second and ends[1]:
                    second_forward(traffic, self.config.num_layers)
            elif kind in (B, I):
                traffic.backward(self.shares[stage], *ends)
                if self.has_second and ends[1]:
                    second_backward(traffic, self.config.num_layers, has_table=not ends[0])
        if isinstance(traffic, ExpertTraffic):
            for layer in self._sparse_layers(calls.rank):
                traffic.enter_rows(layer, routing)

    def pipeline(self, calls: Calls) -> None:
        """Enter activations, their gradients, and the numbers of the step's shapes."""
        plan, program = self.plan, self.plan.program
        if program is None:
            return
        num_bytes, here = self._traffic(calls).boundary_bytes, plan.topology.at(calls.rank)
        ranks, me = here.ranks("pp"), here.rank("pp")
        for route in routes(program):
            for before, after in pairwise(route):
                if before != after and me in (before, after):
                    peer = ranks[after if me == before else before]
                    calls.send(peer, num_bytes)  # of the activation, or of its gradient
                    calls.receive(peer, num_bytes)
        _signatures(program, calls, ranks, me)

    def gradients(self, calls: Calls) -> None:
        """Enter mirrors, sums over the data ranks, and gathers of weights."""
        traffic = GradientTraffic(self.plan, self.config, calls)
        traffic.enter_mirrors()
        traffic.enter()

    def norm(self, calls: Calls) -> None:
        """Enter the norm's sum."""
        calls.all_reduce(range(self.plan.world_size), 2, _NUMBER)

    def routers(self, calls: Calls) -> None:
        """Enter the sums of loads."""
        if not isinstance(self.config, LlamaConfig):
            stages = sorted({stage for stage, _ in self._actions(calls.rank)})
            counts = {stage: len(self._sparse(stage)) for stage in stages}
            router_calls(calls, self.plan, counts, self.config.num_experts)

    def uniform(self) -> dict[tuple[int, int], list[int]]:
        """Return loads that are as even as they can be, by rank and layer."""
        found: dict[tuple[int, int], list[int]] = {}
        if isinstance(self.config, LlamaConfig):
            return found
        for rank in range(self.plan.world_size):
            forwards = Counter(stage for stage, kind in self._actions(rank) if kind == F)
            slots = self._traffic(Calls(rank)).num_tokens * self.config.num_experts_per_token
            for stage, count in forwards.items():
                loads = even_loads(slots * count, self.config.num_experts)
                found |= {(rank, layer): loads for layer in self._sparse(stage)}
        return found

    def _traffic(self, calls: Calls) -> StageTraffic:
        if isinstance(self.config, LlamaConfig):
            return StageTraffic(self.plan, self.config, calls, *self.shape)
        return ExpertTraffic(self.plan, self.config, calls, *self.shape)

    def _actions(self, rank: int) -> list[tuple[int, str]]:
        program = self.plan.program
        if program is None:
            return [(0, kind) for kind in (F, B) for _ in range(self.plan.num_microbatches)]
        return [(stage, kind) for stage, kind, _ in program.actions(self.plan.topology.at(rank).rank("pp"))]

    def _sparse_layers(self, rank: int) -> list[int]:
        stages = {stage for stage, _ in self._actions(rank)}
        return [layer for stage in stages for layer in self._sparse(stage)]

    def _sparse(self, stage: int) -> list[int]:
        first = getattr(self.config, "num_dense_layers", 0)
        extra = [self.config.num_layers] if self.has_second and stage == len(self.shares) - 1 else []
        return [layer for layer in self.shares[stage] if layer >= first] + extra


def _signatures(program: Program, calls: Calls, ranks: tuple[int, ...], me: int) -> None:
    """Enter the numbers of a step's shapes, which travel from the first stage to every other rank of a direction."""
    taken = routes(program)
    for route in sorted(set(taken)):
        num_bytes = taken.count(route) * _NUMBER
        for other in sorted(set(route) - {route[0]}):
            parent = route[route.index(other) - 1]
            if me == other:
                calls.receive(ranks[parent], num_bytes)
            elif me == parent:
                calls.send(ranks[other], num_bytes)


def _together(ledgers: tuple[RankLedger, ...]) -> RankLedger:
    total = RankLedger()
    for ledger in ledgers:
        for name, entry in ledger.entries.items():
            total.add(name, entry.sent, entry.received, entry.peers)
            total.entries[name].count += entry.count - 1
            total.entries[name].sent_to.update(entry.sent_to)
    return total
