"""`estimate`: the memory of every rank at the peak of its own list of actions, before a run and without an accelerator.

In: a model, a plan, a cluster, the shape of a step.  Out: bytes by what they are, each exact, assumed or fitted.
  states         parameters, gradients, master weights, moments: exact, `dualpipe_lab.plan.states`
  activations    of a rank's stages: what each of its forwards keeps, from that F to its B, or to its W where the
                 backward is split, in the order of its own actions: `dualpipe_lab.plan.kept_tensors`
  working        while an action runs: the loss, then the head's gradients, then a layer's: assumed
  received       inputs from other stages and their gradients that a framework holds until the next ones: assumed
  buffers        of ZeRO-2 two buckets of gradients, of ZeRO-3 the weights and gradients of two units, and what a
                 framework keeps for the gradients of weights and for products: assumed
  reserve        the allocator's share, 7.1% (1.1 to 12.4), and what lies outside of it, 2.9 GiB (2.8 to 3.9): fitted
The reserve is fitted to ranks that trained OPT-350M on GH200 with Megatron, published with Sailor (arXiv 2504.17096):
medians and maxima of 740 ranks, minima of 52 of them.
Of experts the tokens of every rank are assumed: `imbalance` times their mean, whatever ep is.
Not in it: time, which is `step_time`'s; the buffers of ring attention; memory that a library takes for its messages
beyond the reserve.  That all of an activation lives to the W of a split backward is assumed: an I may free some of it.
Elsewhere: Megatron `theoretical_memory_usage.py`; SimuMax; llm-analysis.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.efficiency import is_number
from dualpipe_lab.plan.memory import Peak, RankMemory
from dualpipe_lab.plan.plan import Plan

if TYPE_CHECKING:  # an estimate reads what it needs when it is asked for
    from dualpipe_lab.models.stage_rules import ModelConfig
    from dualpipe_lab.plan.kept_tensors import KeepRules
    from dualpipe_lab.plan.states import AnyModel, ModelStates, NumberBytes

_GIB = 2**30


@dataclass(frozen=True)
class Estimate:
    """The memory of every rank under one plan; it prints as a table, one row for ranks that are equal.

    Attributes:
        model, plan, cluster, sequence_length, global_batch, rules: what it is for.
        places: by place along pp, cp and tp.
    """

    model: "AnyModel"
    plan: Plan
    cluster: Cluster
    sequence_length: int
    global_batch: int
    rules: "KeepRules"
    places: dict[tuple[int, int, int], RankMemory]

    def of(self, rank: int) -> RankMemory:
        """Return the memory of a rank.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.plan.world_size:
            raise ValueError(f"the plan has ranks 0 to {self.plan.world_size - 1}, got {rank}")
        here = self.plan.topology.coordinates(rank)
        return self.places[here.get("pp", 0), here.get("cp", 0), here.get("tp", 0)]

    @property
    def ranks(self) -> list[RankMemory]:
        """The memory of every rank, in order."""
        return [self.of(rank) for rank in range(self.plan.world_size)]

    @cached_property
    def largest(self) -> RankMemory:
        """The memory of the first of the ranks that need most."""
        return max(self.places.values(), key=lambda one: one.allocated)

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory, with the reserve as it is in the median."""
        return self.largest.total.num_bytes <= self.cluster.accelerator.memory_bytes

    def bytes_by_link(self) -> dict[str, int]:
        """Return the bytes that all ranks send in a step, inside of nodes and between them: `Plan.traffic`.

        The time grows with the number of ranks: a second or two for 64.

        Raises:
            ValueError: a GPT, which no runtime here trains.
        """
        from dualpipe_lab.plan.gpt_config import GptConfig

        if isinstance(self.model, GptConfig):
            raise ValueError(
                "messages are counted for models that the runtime trains, got a GptConfig; use LlamaConfig"
            )
        ledger = self.plan.traffic(self.model, self.global_batch, self.sequence_length).ledger
        between = ledger.between_nodes(min(self.cluster.ranks_per_node, self.plan.world_size))
        return {"inside": ledger.sent() - between, "between": between}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("ranks", "states", "activations", "logits", "working", "allocated", "with reserve", "peak at", "kept")
        ]
        for memory, places in self._rows():
            peak, kept = memory.peak, " ".join(f"{stage}:{count}" for stage, count in memory.peak.kept)
            working = peak.working + peak.received + memory.buffers
            parts = memory.states.total, peak.layers + peak.ends, peak.logits, working
            cells = [f"{part / _GIB:.2f}" for part in (*parts, memory.allocated, memory.total.num_bytes)]
            rows.append((places, *cells, peak.action, kept))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"{self.plan}; {self.rules.name}; GiB", *lines])

    def _rows(self) -> Iterator[tuple[RankMemory, str]]:
        """Yield the memories that differ, with their places."""
        found: dict[tuple[ModelStates, Peak, int], list[RankMemory]] = {}
        for memory in self.places.values():
            found.setdefault((memory.states, memory.peak, memory.buffers), []).append(memory)
        for same in found.values():
            axes = [axis for axis in ("pp", "cp", "tp") if self.plan.sizes[axis] > 1]
            names = [f"{axis} {_spans(sorted({getattr(one, f'{axis}_rank') for one in same}))}" for axis in axes]
            yield same[0], ", ".join(names) or "all"


def estimate(
    model: "AnyModel",
    plan: Plan,
    cluster: Cluster,
    sequence_length: int,
    global_batch: int,
    rules: "KeepRules | None" = None,
    numbers: "NumberBytes | None" = None,
    imbalance: float = 1.0,
) -> Estimate:
    """Return the memory of every rank of a plan.

    Args:
        model: a `LlamaConfig`, a `V3MoEConfig` or a `GptConfig`.
        plan: for as many ranks as the cluster has.
        cluster: whose accelerators have the memory.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step, over all data ranks and microbatches.
        rules: what the framework keeps for the backward (default: this library).
        numbers: bytes per parameter (default: those of the plan's precision).
        imbalance: tokens for the experts of a rank, divided by their mean: every rank is as full as the fullest one.

    Raises:
        ValueError: as `Plan.check`, sequences that do not divide, or an imbalance below 1.

    >>> from dualpipe_lab.models import LlamaConfig
    >>> llama3_8b = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
    >>> plan = Plan(dp=8, zero=1, num_microbatches=2, precision="bfloat16")
    >>> found = estimate(llama3_8b, plan, Cluster.of("h100", 8), sequence_length=8192, global_batch=16)
    >>> print(*found.of(0).figures[:4], found.fits, sep="; ")
    parameters 14.96 GiB (exact); gradients 29.92 GiB (exact); masters 3.74 GiB (exact); moments 7.48 GiB (exact); False
    """
    from dualpipe_lab.plan.kept_tensors import LAB
    from dualpipe_lab.plan.places import MemoryMaker
    from dualpipe_lab.plan.rules import lengths_of
    from dualpipe_lab.plan.states import config_of
    from dualpipe_lab.plan.traffic import check_traffic

    if not is_number(imbalance) or not 1 <= imbalance < inf:
        raise ValueError(f"the fullest rank has the mean of tokens or more, got imbalance={imbalance!r}; use 1 or more")
    plan = checked(plan, config_of(model), cluster, sequence_length)
    num_rows = check_traffic(plan, global_batch)
    rules = rules or LAB
    maker = MemoryMaker(model, plan, rules, num_rows, lengths_of(plan, sequence_length), numbers, imbalance)
    return Estimate(model, plan, cluster, sequence_length, global_batch, rules, dict(maker.places()))


def fullest_ranks(
    model: "AnyModel", plan: Plan, sequence_length: int, global_batch: int, rules: "KeepRules"
) -> "list[RankMemory]":
    """Return the memory of the fullest rank of each rank of pp, for a legal plan: all that a search asks for."""
    from dualpipe_lab.plan.places import MemoryMaker
    from dualpipe_lab.plan.rules import lengths_of
    from dualpipe_lab.plan.traffic import check_traffic

    num_rows = check_traffic(plan, global_batch)
    maker = MemoryMaker(model, plan, rules, num_rows, lengths_of(plan, sequence_length), None, 1.0)
    return [memory for _, memory in maker.places(every=False)]


def checked(plan: Plan, config: "ModelConfig", cluster: Cluster, sequence_length: int) -> Plan:
    """Return a legal plan with the cluster's nodes.

    Raises:
        ValueError: as `Plan.check`, or other nodes than the cluster's.
    """
    if plan.hybrid and plan.world_size == cluster.num_ranks:  # it needs nodes to be legal
        plan = _with_nodes(plan, cluster)
    plan.check(config, sequence_length, cluster.num_ranks)
    return _with_nodes(plan, cluster)


def _with_nodes(plan: Plan, cluster: Cluster) -> Plan:
    size = min(cluster.ranks_per_node, cluster.num_ranks)
    if plan.ranks_per_node not in (None, size):
        raise ValueError(
            f"the cluster has {size} ranks per node, got a plan with ranks_per_node={plan.ranks_per_node}; leave it out"
        )
    return plan if plan.ranks_per_node else replace(plan, ranks_per_node=size)


def _spans(numbers: list[int]) -> str:
    """Return ascending numbers as text.

    >>> _spans([0, 1, 2, 5])
    '0-2 5'
    """
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
