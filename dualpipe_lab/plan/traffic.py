"""`traffic_of`: the messages and bytes of one training step, for every rank and operation, before a run.

Chapter: book/whole/sums.  In: a plan, a config, the sequences of a step.  Out: a ledger for each part of the step.
  layers      along tp and cp, forward and backward                        `dualpipe_lab.plan.layer_traffic`
  pipeline    activations, their gradients, and the shapes of a step
  gradients   mirrors, tied tables, data ranks, weights                    `dualpipe_lab.plan.gradient_traffic`
  norm        one sum of two numbers over the world, where gradients are clipped
The step is one of many: the first also exchanges headers of shapes, makes groups and compares shards.  What a trainer
sends to show its metrics comes on top.
"""

from dataclasses import dataclass
from html import escape

from dualpipe_lab.models.llama_config import LlamaConfig
from dualpipe_lab.models.stage_rules import ModelConfig, stage_layers
from dualpipe_lab.plan.calls import Calls
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.gradient_traffic import GradientTraffic
from dualpipe_lab.plan.layer_traffic import StageTraffic
from dualpipe_lab.pp.program import B, F, I, Program
from dualpipe_lab.pp.validation.routes import routes
from dualpipe_lab.world.record.ledger import Ledger, RankLedger

PARTS = ("layers", "pipeline", "gradients", "norm")
_NUMBER = 8  # bytes of a shape's number, and of a norm's power


@dataclass(frozen=True)
class StepTraffic:
    """The messages and bytes of one step; it prints as the ledger of a run does.

    Attributes:
        title: the plan and the batch.
        parts: a ledger for each of `layers`, `pipeline`, `gradients` and `norm`.
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


def check_traffic(plan: PlanFields, config: ModelConfig, batch_size: int) -> int:
    """Return the sequences of a microbatch; refuse a step whose traffic is not known exactly.

    Raises:
        ValueError: sequences that do not divide, or a plan that is not counted yet.
    """
    parts = plan.data_size * plan.num_microbatches
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"a step's sequences divide among {plan.data_size} data ranks x {plan.num_microbatches} microbatches, got "
            f"{batch_size}; use {-(-max(batch_size, 1) // parts) * parts}"
        )
    if not isinstance(config, LlamaConfig):
        raise ValueError(
            f"traffic is counted for a LlamaConfig, whose messages do not depend on a router, got {config}"
        )
    if plan.pp > 1 and config.tied:
        raise ValueError(f"traffic is counted without tied stages, got pp {plan.pp} and tied=True")
    return batch_size // parts


def traffic_of(
    plan: PlanFields, config: LlamaConfig, num_rows: int, sequence_length: int, clips: bool = True
) -> StepTraffic:
    """Return the messages and bytes of a step, for microbatches of `num_rows` sequences."""
    found: dict[str, list[RankLedger]] = {part: [] for part in PARTS}
    for rank in range(plan.world_size):
        for part, enter in _PARTS.items():
            calls = Calls(rank)
            if part != "norm" or clips:
                enter(plan, config, calls, num_rows, sequence_length)
            found[part].append(calls.ledger)
    title = f"{plan}; {num_rows * plan.data_size * plan.num_microbatches} sequences of {sequence_length} per step"
    return StepTraffic(title, {part: Ledger(ledgers) for part, ledgers in found.items()})


def _layers(plan: PlanFields, config: LlamaConfig, calls: Calls, num_rows: int, length: int) -> None:
    traffic = StageTraffic(plan, config, calls, num_rows, length)
    shares, last = stage_layers(config, plan.num_stages, plan.layers), plan.num_stages - 1
    program = plan.program
    if program is None:
        actions = [(0, kind) for kind in (F, B) for _ in range(plan.num_microbatches)]
    else:
        here = program.actions(plan.topology.at(calls.rank).rank("pp"))
        actions = [(stage, kind) for stage, kind, _ in here]
    for stage, kind in actions:
        ends = stage == 0, stage == last
        if kind == F:
            traffic.forward(len(shares[stage]), *ends)
        elif kind in (B, I):
            traffic.backward(len(shares[stage]), *ends)


def _pipeline(plan: PlanFields, config: LlamaConfig, calls: Calls, num_rows: int, length: int) -> None:
    program = plan.program
    if program is None:
        return
    num_bytes = StageTraffic(plan, config, calls, num_rows, length).boundary_bytes
    here = plan.topology.at(calls.rank)
    ranks, me = here.ranks("pp"), here.rank("pp")
    for route in routes(program):
        for stage in range(program.num_stages - 1):
            before, after = route[stage], route[stage + 1]
            if before == after or me not in (before, after):
                continue
            peer = ranks[after if me == before else before]
            calls.send(peer, num_bytes)  # of the activation, or of its gradient
            calls.receive(peer, num_bytes)
    _signatures(program, calls, ranks, me)


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


def _gradients(plan: PlanFields, config: LlamaConfig, calls: Calls, num_rows: int, length: int) -> None:
    traffic = GradientTraffic(plan, config, calls)
    traffic.enter_mirrors()
    traffic.enter()


def _norm(plan: PlanFields, config: LlamaConfig, calls: Calls, num_rows: int, length: int) -> None:
    calls.all_reduce(range(plan.world_size), 2, _NUMBER)


_PARTS = {"layers": _layers, "pipeline": _pipeline, "gradients": _gradients, "norm": _norm}


def _together(ledgers: tuple[RankLedger, ...]) -> RankLedger:
    total = RankLedger()
    for ledger in ledgers:
        for name, entry in ledger.entries.items():
            total.add(name, entry.sent, entry.received, entry.peers)
            total.entries[name].count += entry.count - 1
    return total
