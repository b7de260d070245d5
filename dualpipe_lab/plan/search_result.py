"""`SearchResult`: what a search has found: plans that fit, the fastest first, and why the others lost.

In: plans with their memory and seconds, and the reasons of the others.  Out: text.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from dualpipe_lab.plan.estimate import Estimate
from dualpipe_lab.plan.fields import PlanFields
from dualpipe_lab.plan.plan import Plan
from dualpipe_lab.plan.step_time import StepTime

_GB = 10**9


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
    """Plans that were not chosen: which constraint they failed, and the sentence that says how.

    Attributes:
        plan: that lost; where there are several, one of them: the others have another schedule or stage of ZeRO.
        constraint: memory, rule, slower, or limit.
        reason: how it failed.
        num_plans: that lost by it.
        num_bytes: that the fullest rank needs, where that was computed.
        is_states: whether these are its states alone, which do not fit.
    """

    plan: Plan
    constraint: str
    reason: str
    num_plans: int = 1
    num_bytes: int | None = None
    is_states: bool = False

    def stands_for(self, plan: PlanFields) -> bool:
        """Return whether a plan is among these."""
        if self.num_plans == 1:
            return self.plan == plan
        mine = self.plan
        return replace(plan, zero=mine.zero, schedule=mine.schedule, overlap=mine.overlap) == mine


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
        found: Counter[str] = Counter()
        for lost in self.lost:
            found[lost.constraint] += lost.num_plans
        return dict(found)

    @property
    def num_plans(self) -> int:
        """How many plans there were."""
        return len(self.choices) + sum(lost.num_plans for lost in self.lost)

    def why(self, plan: PlanFields) -> str:
        """Return why a plan is not the first.

        Raises:
            ValueError: it was no candidate.
        """
        for place, choice in enumerate(self.choices, 1):
            if choice.plan == plan:
                return f"it is number {place}, {self._behind(choice)}" if place > 1 else "it is the first"
        for lost in self.lost:
            if lost.stands_for(plan):
                return lost.reason
        raise ValueError(f"{plan} was no candidate; `estimate` and `step_time` take any plan")

    def _behind(self, choice: Choice) -> str:
        """Return how far a choice is behind the first, and on what it spends most of that."""
        first, mine = self.choices[0].time, choice.time
        more = {name: seconds - first.parts.get(name, 0.0) for name, seconds in mine.parts.items()}
        name = max(more, key=more.__getitem__)
        said = f"{mine.seconds / first.seconds - 1:.1%} behind the first"
        is_seen = more[name] >= 0.001 * first.seconds
        return f"{said}; the largest part is {name}, {more[name]:.3f} s more" if is_seen else said

    def __str__(self) -> str:
        lines = [f"{self.num_plans} plans; {len(self.choices)} fit and were computed in full"]
        lines += [f"{place}. {choice}" for place, choice in enumerate(self.best, 1)]
        for constraint, count in sorted(self.counts.items()):
            example = next(lost for lost in self.lost if lost.constraint == constraint)
            lines.append(f"{count} lost by {constraint}, such as {example.plan}: {example.reason}")
        return "\n".join(lines)
