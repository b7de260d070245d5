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

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from dualpipe_lab.models.stage_rules import ModelConfig
from dualpipe_lab.plan.bounds import has_pairs, least_seconds
from dualpipe_lab.plan.cluster import Cluster
from dualpipe_lab.plan.estimate import estimate, fullest_ranks
from dualpipe_lab.plan.fields import is_synchronous, registered_name
from dualpipe_lab.plan.kept_experts import held_model
from dualpipe_lab.plan.kept_tensors import MEGATRON, KeepRules
from dualpipe_lab.plan.legal import grids
from dualpipe_lab.plan.memory import RankMemory
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.rules import first_problem, has_experts
from dualpipe_lab.plan.search_result import Choice, Lost, SearchResult
from dualpipe_lab.plan.stage_times import StageTimes
from dualpipe_lab.plan.states import AnyModel, config_of, model_states, shard_counts
from dualpipe_lab.plan.step_time import StepTimer
from dualpipe_lab.plan.time_rules import MEGATRON_TIME, TimeRules
from dualpipe_lab.pp import schedules

_GB = 10**9
_ROWS = (1, 2, 4, 8, 16)  # sequences of a microbatch
_MEMORY, _RULE, _SLOW = "memory", "rule", "slower"


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
    """A plan, or all plans of a grid and a size of microbatches, with a bound from below; in the order of seconds."""

    seconds: float
    number: int
    plan: Plan
    is_group: bool


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
        self.shape, (self.sequence_length, self.global_batch) = shape, shape
        self.keep_rules, self.time_rules = rules
        self.memory = cluster.accelerator.memory_bytes if memory is None else memory
        self.config: ModelConfig = config_of(model)
        self.works: dict[tuple[object, ...], float] = {}
        self.calls: dict[tuple[object, ...], dict[str, str]] = {}
        self.states: dict[tuple[object, ...], int] = {}
        self.numbers = itertools.count()
        self.choices: list[Choice] = []
        self.lost: list[Lost] = []

    def run(self, count: int, limit: int) -> SearchResult:
        """Compute candidates in the order of their bounds."""
        candidates = list(self._groups())
        if not candidates:
            raise ValueError(
                f"{self.global_batch} sequences do not divide among any data ranks of {self.cluster.num_ranks}; use a "
                "multiple of the ranks"
            )
        heapify(candidates)
        while candidates and not self._is_over(candidates[0], count) and len(self.choices) < limit:
            candidate = heappop(candidates)
            if not candidate.is_group:
                self._compute(candidate.plan)
                continue
            for one in self._members(candidate):
                heappush(candidates, one)
        complete = not candidates or self._is_over(candidates[0], count)
        self._leave(candidates, self.choices[count - 1].time.seconds if complete and candidates else None)
        return SearchResult(tuple(self.choices), tuple(self.lost), count, complete)

    def _is_over(self, candidate: _Candidate, count: int) -> bool:
        """Whether a candidate is slower than those that were asked for; ties are told apart by the fourth digit."""
        return len(self.choices) >= count and candidate.seconds > 1.001 * self.choices[count - 1].time.seconds

    def _groups(self) -> Iterator[_Candidate]:
        """Yield all grids with all sizes of a microbatch, with and without recomputation."""
        for grid in grids(Plan(precision=self.settings.precision), self.config, self.cluster.num_ranks):
            share, rest = divmod(self.global_batch, grid.data_size)
            for num_rows in _ROWS if share and not rest else ():
                for again in self.settings.recompute if share % num_rows == 0 else ():
                    plan = replace(
                        grid, num_microbatches=share // num_rows, recompute=again, sequence_parallel=grid.tp > 1
                    )
                    seconds = self._mean_seconds(plan, num_rows)
                    yield _Candidate(seconds, next(self.numbers), plan, is_group=True)

    def _members(self, group: _Candidate) -> Iterator[_Candidate]:
        """Yield the plans of a group, each with the bound that its schedule, its stages and ZeRO's calls have."""
        for name, overlap in self._schedules(group.plan):
            plan = replace(group.plan, schedule=name, overlap=overlap)
            bounds: dict[int, float] = {}
            for zero in self._zeros(plan):
                counted = max(zero, 1)  # ZeRO-0 and 1 have no calls within the pipeline
                if counted not in bounds:
                    bounds[counted] = max(group.seconds, self._least_seconds(replace(plan, zero=counted)))
                yield _Candidate(bounds[counted], next(self.numbers), replace(plan, zero=zero), is_group=False)

    def _least_seconds(self, plan: Plan) -> float:
        try:
            timer = StepTimer(self.model, plan, self.cluster, *self.shape, self.time_rules)
            return least_seconds(plan, timer.stages)
        except ValueError:  # `_compute` says which rule
            return 0.0

    def _zeros(self, plan: Plan) -> tuple[int, ...]:
        return self.settings.zeros if plan.num_copies > 1 else self.settings.zeros[:1]

    def _schedules(self, plan: Plan) -> list[tuple[str, bool]]:
        """Return the schedules to try, and with experts those with pairs once more, overlapped."""
        found: list[tuple[str, bool]] = []
        for name in self.settings.names if plan.pp > 1 else self.settings.names[:1]:
            overlaps = plan.pp > 1 and has_experts(self.config) and has_pairs(name, plan.pp)
            found += [(name, False), (name, True)] if overlaps else [(name, False)]
        return found

    def _num_rows(self, plan: Plan) -> int:
        return self.global_batch // plan.data_size // plan.num_microbatches

    def _key(self, plan: Plan, num_rows: int) -> tuple[object, ...]:
        return (plan.cp, plan.tp, plan.ep, plan.experts_in_data, plan.recompute, num_rows)

    def _mean_seconds(self, plan: Plan, num_rows: int) -> float:
        """Return the mean seconds of the ranks of pp without what overlapped pairs hide: no schedule takes less.

        Those of a microbatch depend on what is inside of a data rank alone.
        """
        key = self._key(plan, num_rows)
        if key not in self.works:
            flat = replace(plan, pp=1)
            times = StageTimes(self.model, flat, self.cluster, self.time_rules, num_rows, self.sequence_length)
            table = times.of(0)
            hidden = sum(kind.get("ep", 0.0) for kind in table.values())
            self.works[key] = sum(sum(kind.values()) for kind in table.values()) - hidden
            self.calls[key] = _large_calls(times)
        return self.works[key] * plan.num_microbatches / plan.pp

    def _least_bytes(self, plan: Plan) -> int:
        """Return the mean bytes that the ranks of pp hold between steps."""
        flat = replace(plan, pp=1, num_microbatches=1, schedule="1f1b", overlap=False)
        key = (*shard_counts(flat), flat.tp, flat.ep, flat.experts_in_data, flat.zero)
        if key not in self.states:
            self.states[key] = model_states(held_model(self.model, flat, self.keep_rules.experts), flat).total
        return self.states[key] // plan.pp

    def _compute(self, plan: Plan) -> None:
        """Compute a plan in full: its rules, the memory of its fullest ranks, all of its memory, its seconds."""
        try:
            least = self._least_bytes(plan)
            if least > self.memory:
                states = f"parameters, gradients, masters and moments take {least / _GB:.0f} GB on a rank"
                self.lost.append(Lost(plan, _MEMORY, f"{states}, of {self.memory / _GB:.0f}", 1, least, is_states=True))
                return
            problem = first_problem(plan, self.config, self.sequence_length)
            if problem is not None:
                raise ValueError(problem)
            timer = StepTimer(self.model, plan, self.cluster, *self.shape, self.time_rules)
            fullest = max(fullest_ranks(self.model, plan, *self.shape, self.keep_rules), key=lambda one: one.allocated)
        except ValueError as broken:  # a rule of the plan, or of the framework: experts that do not divide along tp
            self.lost.append(Lost(plan, _RULE, str(broken)))
            return
        if fullest.total.num_bytes > self.memory:
            reason, num_bytes = self._too_large(fullest), fullest.total.num_bytes
            self.lost.append(Lost(plan, _MEMORY, reason, num_bytes=num_bytes))
            return
        found = estimate(self.model, plan, self.cluster, *self.shape, self.keep_rules)
        self.choices.append(Choice(plan, found, timer.result))
        self.choices.sort(key=_order)

    def _too_large(self, fullest: RankMemory) -> str:
        """Return which rank needs how much, and the largest parts of it."""
        parts = sorted(fullest.figures, key=lambda figure: -figure.num_bytes)[:2]
        named = ", ".join(f"{figure.name} {figure.num_bytes / _GB:.0f} GB" for figure in parts)
        total = fullest.total.num_bytes / _GB
        return f"rank {fullest.pp_rank} of pp needs {total:.0f} GB of {self.memory / _GB:.0f}: {named}"

    def _leave(self, candidates: Sequence[_Candidate], worst: float | None) -> None:
        """Enter candidates that are not computed, with their bounds."""
        for seconds, _, plan, is_group in candidates:
            reason, constraint = "the search stopped at its limit", "limit"
            if worst is not None:
                calls = self.calls[self._key(plan, self._num_rows(plan))]
                seen = [text for axis, text in calls.items() if axis != "ep" or not plan.overlap]  # pairs hide those
                reason = f"it takes at least {seconds:.3f} s, and {worst:.3f} s are reached without it"
                reason = "; ".join([reason, *seen[:1]])
                constraint = _SLOW
            num_plans = len(self._schedules(plan)) * len(self._zeros(plan)) if is_group else 1
            self.lost.append(Lost(plan, constraint, reason, num_plans))


def _large_calls(times: StageTimes) -> dict[str, str]:
    """Return the axes whose calls take a tenth of a layer or more, with a sentence each, the largest first."""
    table = times.layer(times.config.num_layers - 1)  # with experts if any has
    spent = {axis: sum(kind.get(axis, 0.0) for kind in table.values()) for axis in times.groups}
    least = sum(sum(kind.values()) for kind in table.values()) / 10
    found = {}
    for axis in sorted(spent, key=lambda axis: -spent[axis]):
        if spent[axis] >= least:
            place = "crosses nodes" if times.groups[axis].crosses else "stays inside of nodes"
            found[axis] = f"{axis} {place}: {1000 * spent[axis]:.3g} ms per layer of a microbatch"
    return found
