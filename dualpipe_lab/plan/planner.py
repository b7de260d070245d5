"""`search`: every way to cut a model over a cluster, the fastest that fit first, and why the others lost.

In: a model, a cluster, the shape of a step.  Out: a `SearchResult`.
  1. every factorisation of the ranks, size of a microbatch, schedule, stage of ZeRO and recomputation is a candidate
  2. each has bounds from below: the mean work of a rank of pp, then that of its schedule's fullest rank with the wait
     for its first and behind its last action (`dualpipe_lab.plan.bounds`); and what a rank holds between steps
  3. in the order of that bound, rules, memory and time of a candidate are computed in full, until the bound of the next
     is above the seconds of those that were asked for: no candidate that was left out can be faster
So the first plans are the first of all candidates, under the assumptions of `step_time` and `estimate`.
Elsewhere: calculon's `llm-optimal-execution`; SimuMax's `search_best_parallel_strategy`; Galvatron.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.bounds import has_pairs, least_seconds
from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.estimate import Estimate, estimate, fullest_ranks
from dualpipe_lab.plan.fields import PlanFields, is_synchronous, registered_name
from dualpipe_lab.plan.gpt_config import GptConfig
from dualpipe_lab.plan.kept_tensors import MEGATRON, KeepRules
from dualpipe_lab.plan.legal import grids
from dualpipe_lab.plan.memory import RankMemory
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import first_problem, has_experts
from dualpipe_lab.plan.stage_times import StageTimes
from dualpipe_lab.plan.states import AnyModel, model_states
from dualpipe_lab.plan.step_time import StepTime, StepTimer
from dualpipe_lab.plan.time_rules import MEGATRON_TIME, TimeRules
from dualpipe_lab.pp import schedules

_GB = 10**9
_ROWS = (1, 2, 4, 8, 16)  # sequences of a microbatch
_MEMORY, _RULE, _SLOW = "memory", "rule", "slower"


class Choice(NamedTuple):
    """A plan that fits, with its memory and its seconds."""

    plan: Plan
    memory: Estimate
    time: StepTime

    @property
    def bytes(self) -> int:
        """Bytes of the rank that needs most, with the reserve."""
        return self.memory.largest.total.num_bytes

    def __str__(self) -> str:
        return f"{self.time.seconds:.3f} s, MFU {self.time.mfu:.1%}, {self.bytes / _GB:.0f} GB: {self.plan}"


class Lost(NamedTuple):
    """A plan that was not chosen: which constraint it failed, and the sentence that says how."""

    plan: Plan
    constraint: str
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    Attributes:
        choices: plans that fit, the fastest first: all that were computed in full.
        lost: plans that do not fit, break a rule, or cannot be faster, with their reasons.
        num_asked: how many of the choices are certain to be the first.
        complete: whether they are; False where the search stopped at its limit.
    """

    choices: tuple[Choice, ...]
    lost: tuple[Lost, ...]
    num_asked: int
    complete: bool

    @property
    def best(self) -> tuple[Choice, ...]:
        """The plans that were asked for, the fastest first."""
        return self.choices[: self.num_asked]

    @cached_property
    def frontier(self) -> tuple[Choice, ...]:
        """Of the choices, those of which none is both faster and smaller, the fastest first."""
        found: list[Choice] = []
        for choice in self.choices:
            if not found or choice.bytes < found[-1].bytes:
                found.append(choice)
        return tuple(found)

    @property
    def counts(self) -> dict[str, int]:
        """How many plans lost by each constraint."""
        return dict(Counter(lost.constraint for lost in self.lost))

    def why(self, plan: PlanFields) -> str:
        """Return why a plan is not the first.

        Raises:
            ValueError: it was no candidate.
        """
        for place, choice in enumerate(self.choices, 1):
            if choice.plan == plan:
                behind = choice.time.seconds / self.choices[0].time.seconds - 1
                return f"it is number {place}, {behind:.1%} behind the first" if place > 1 else "it is the first"
        for lost in self.lost:
            if lost.plan == plan:
                return lost.reason
        raise ValueError(f"{plan} was no candidate; `estimate` and `step_time` take any plan")

    def __str__(self) -> str:
        total = len(self.choices) + len(self.lost)
        lines = [f"{total} plans; {len(self.choices)} fit and were computed in full"]
        lines += [f"{place}. {choice}" for place, choice in enumerate(self.best, 1)]
        for constraint, count in sorted(self.counts.items()):
            example = next(lost for lost in self.lost if lost.constraint == constraint)
            lines.append(f"{count} lost by {constraint}, such as {example.plan}: {example.reason}")
        return "\n".join(lines)


def search(
    model: AnyModel,
    cluster: Cluster,
    sequence_length: int,
    global_batch: int,
    *,
    count: int = 5,
    memory: int | None = None,
    precision: str = "bfloat16",
    zeros: Sequence[int] = (0, 1, 2, 3),
    schedule_names: Sequence[str] | None = None,
    recompute: Sequence[bool] = (False, True),
    keep_rules: KeepRules = MEGATRON,
    time_rules: TimeRules = MEGATRON_TIME,
    limit: int = 400,
) -> SearchResult:
    """Return the fastest plans that fit, and why the others lost.

    Args:
        model: what is to be trained.
        cluster: on what.
        sequence_length: tokens of a sequence.
        global_batch: sequences of a step.
        count: plans to return with certainty.
        memory: bytes of a rank (default: those of the accelerator).
        precision: of the weights.
        zeros: stages of ZeRO to try.
        schedule_names: to try (default: every synchronous schedule).
        recompute: whether to try plans without, and with recomputation.
        keep_rules: what the framework keeps (default: Megatron's).
        time_rules: what it hides (default: Megatron's).
        limit: plans to compute in full at most.

    Raises:
        ValueError: a setting without meaning, or no plan at all.

    >>> from dualpipe_lab.models import LlamaConfig
    >>> llama3_8b = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
    >>> found = search(llama3_8b, Cluster.of("h100", 8), 8192, 64, count=1, schedule_names=["1f1b"])
    >>> found.complete, found.best[0].plan.world_size
    (True, 8)
    """
    if count < 1 or limit < count:
        raise ValueError(f"a search returns at least one plan and computes at least as many, got {count} and {limit}")
    asked = schedules.names(synchronous=True) if schedule_names is None else schedule_names
    names = [registered_name(name) for name in asked]
    for name in names:
        if not is_synchronous(name):
            raise ValueError(f"{name} updates the weights within a step; use a synchronous schedule")
    settings = _Settings(precision, tuple(zeros), tuple(names), tuple(recompute))
    shape = sequence_length, global_batch
    return _Search(model, cluster, shape, settings, (keep_rules, time_rules), memory).run(count, limit)


def _order(choice: Choice) -> tuple[float, int, int]:
    """The faster first; of plans that are equal to the fourth digit, the one with fewer axes, then the smaller."""
    seconds = choice.time.seconds
    return float(f"{seconds:.4g}"), sum(size > 1 for size in choice.plan.sizes.values()), choice.bytes


class _Settings(NamedTuple):
    precision: str
    zeros: tuple[int, ...]
    names: tuple[str, ...]
    recompute: tuple[bool, ...]


class _Candidate(NamedTuple):
    """A plan whose rules are not yet checked, and its bounds from below; they are in the order of seconds."""

    seconds: float
    number: int
    is_tight: bool
    num_bytes: int
    plan: Plan


class _Search:
    """One search: bounds of all candidates, then the candidates in full."""

    def __init__(
        self,
        model: AnyModel,
        cluster: Cluster,
        shape: tuple[int, int],
        settings: _Settings,
        rules: tuple[KeepRules, TimeRules],
        memory: int | None,
    ) -> None:
        self.model, self.cluster, self.settings = model, cluster, settings
        self.sequence_length, self.global_batch = shape
        self.keep_rules, self.time_rules = rules
        self.memory = cluster.accelerator.memory_bytes if memory is None else memory
        self.config: ModelConfig = model.outline if isinstance(model, GptConfig) else model
        self.works: dict[Plan, float] = {}
        self.tight: dict[Plan, float] = {}
        self.states: dict[tuple[object, ...], int] = {}
        self.choices: list[Choice] = []
        self.lost: list[Lost] = []

    def run(self, count: int, limit: int) -> SearchResult:
        """Compute candidates in the order of their bounds."""
        candidates = list(self._candidates())
        if not candidates:
            raise ValueError(
                f"{self.global_batch} sequences do not divide among any data ranks of {self.cluster.num_ranks}; use a "
                "multiple of the ranks"
            )
        heapify(candidates)
        num_full = 0
        while candidates:
            worst = self.choices[count - 1].time.seconds if len(self.choices) >= count else inf
            if candidates[0].seconds > 1.001 * worst or num_full >= limit:  # ties are told apart by the fourth digit
                break
            candidate = heappop(candidates)
            if candidate.is_tight:
                num_full += self._compute(candidate)
            else:
                heappush(candidates, self._tightened(candidate))
        complete = num_full < limit or not candidates
        self._leave(candidates, self.choices[count - 1].time.seconds if complete and candidates else None)
        return SearchResult(tuple(self.choices), tuple(self.lost), count, complete)

    def _candidates(self) -> Iterator[_Candidate]:
        base, numbers = Plan(precision=self.settings.precision), iter(range(10**9))
        for grid in grids(base, self.config, self.cluster.num_ranks):
            share, rest = divmod(self.global_batch, grid.data_size)
            for num_rows in _ROWS if share and not rest else ():
                if share % num_rows == 0:
                    for plan, seconds, num_bytes in self._of_grid(replace(grid, num_microbatches=share // num_rows)):
                        yield _Candidate(seconds, next(numbers), False, num_bytes, plan)

    def _of_grid(self, grid: Plan) -> Iterator[tuple[Plan, float, int]]:
        """Yield the plans of a grid, each with its bounds."""
        for again in self.settings.recompute:
            plan = replace(grid, recompute=again, sequence_parallel=grid.tp > 1)
            seconds = self._mean_seconds(plan)
            zeros = self.settings.zeros if plan.num_copies > 1 else self.settings.zeros[:1]
            for zero in zeros:
                num_bytes = self._least_bytes(replace(plan, zero=zero))
                for name, overlap in self._schedules(plan):
                    yield replace(plan, zero=zero, schedule=name, overlap=overlap), seconds, num_bytes

    def _schedules(self, plan: Plan) -> Iterator[tuple[str, bool]]:
        """Yield the schedules to try, and with experts those with pairs once more, overlapped."""
        for name in self.settings.names if plan.pp > 1 else self.settings.names[:1]:
            yield name, False
            if plan.pp > 1 and has_experts(self.config) and has_pairs(name, plan.pp):
                yield name, True

    def _times(self, plan: Plan) -> StageTimes:
        num_rows = self.global_batch // plan.data_size // plan.num_microbatches
        return StageTimes(self.model, plan, self.cluster, self.time_rules, num_rows, self.sequence_length)

    def _mean_seconds(self, plan: Plan) -> float:
        """Return the mean seconds of the ranks of pp without what overlapped pairs hide: no schedule takes less."""
        flat = replace(plan, pp=1)
        if flat not in self.works:
            table = self._times(flat).of(0)
            hidden = sum(kind.get("ep", 0.0) for kind in table.values())
            self.works[flat] = (sum(sum(kind.values()) for kind in table.values()) - hidden) * plan.num_microbatches
        return self.works[flat] / plan.pp

    def _tightened(self, candidate: _Candidate) -> _Candidate:
        """Return a candidate with the bound that its schedule and its stages have."""
        plan = candidate.plan
        key = replace(plan, zero=0)
        if key not in self.tight:
            try:
                self.tight[key] = least_seconds(self._times(plan))
            except ValueError:  # `_compute` says which rule
                self.tight[key] = 0.0
        return candidate._replace(seconds=max(candidate.seconds, self.tight[key]), is_tight=True)

    def _least_bytes(self, plan: Plan) -> int:
        """Return the mean bytes that the ranks of pp hold between steps."""
        flat = replace(plan, pp=1, num_microbatches=1, schedule="1f1b")
        key = (flat.dp, flat.cp, flat.tp, flat.ep, flat.experts_in_data, flat.zero)
        if key not in self.states:
            self.states[key] = model_states(self.model, flat).total
        return self.states[key] // plan.pp

    def _compute(self, candidate: _Candidate) -> bool:
        """Compute a candidate in full, and return whether that took time."""
        plan = candidate.plan
        if candidate.num_bytes > self.memory:
            states = f"parameters, gradients, masters and moments take {candidate.num_bytes / _GB:.0f} GB on a rank"
            self.lost.append(Lost(plan, _MEMORY, f"{states}, of {self.memory / _GB:.0f}"))
            return False
        problem = first_problem(plan, self.config, self.sequence_length)
        if problem is not None:
            self.lost.append(Lost(plan, _RULE, problem))
            return False
        shape = self.sequence_length, self.global_batch
        fullest = max(fullest_ranks(self.model, plan, *shape, self.keep_rules), key=lambda one: one.allocated)
        if fullest.total.num_bytes > self.memory:
            self.lost.append(Lost(plan, _MEMORY, self._too_large(fullest)))
            return False
        found = estimate(self.model, plan, self.cluster, *shape, self.keep_rules)
        seconds = StepTimer(self.model, plan, self.cluster, *shape, self.time_rules).result
        self.choices.append(Choice(plan, found, seconds))
        self.choices.sort(key=_order)
        return True

    def _too_large(self, fullest: RankMemory) -> str:
        """Return which rank needs how much, and the largest parts of it."""
        parts = sorted(fullest.figures, key=lambda figure: -figure.num_bytes)[:2]
        named = ", ".join(f"{figure.name} {figure.num_bytes / _GB:.0f} GB" for figure in parts)
        total = fullest.total.num_bytes / _GB
        return f"rank {fullest.pp_rank} of pp needs {total:.0f} GB of {self.memory / _GB:.0f}: {named}"

    def _leave(self, candidates: Sequence[_Candidate], worst: float | None) -> None:
        """Enter candidates that are not computed, with their bounds."""
        for candidate in candidates:
            reason = "the search stopped at its limit"
            if worst is not None:
                reason = f"it takes at least {candidate.seconds:.3f} s, and {worst:.3f} s are reached without it"
            self.lost.append(Lost(candidate.plan, _SLOW if worst is not None else "limit", reason))
