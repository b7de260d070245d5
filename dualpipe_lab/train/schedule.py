"""`LRSchedule`: the factor of the learning rate, as a function of the step alone.

Chapter: book/whole/training.  In: a step, from 0.  Out: a factor from 0 to 1.
  warm-up    (step + 1) / w              for step < w: the first update is not lost
  hold       1 for h steps
  decay      from 1 at step w + h to `final` at the last step, n - 1; `final` afterwards, until `later` says otherwise
             linear 1 - (1 - f) x        cosine f + (1 - f) (1 + cos(pi x)) / 2    x = (step - w - h) / (n - 1 - w - h)
Nothing is counted, so a resumed run needs the step and nothing else.
Elsewhere: torch `LambdaLR`; Megatron `OptimizerParamScheduler`.
Source: all pieces together are the schedule of DeepSeek-V3 (arXiv 2412.19437, section 4.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Literal, TypeAlias, get_args

Decay: TypeAlias = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LRSchedule:
    """Warm-up, hold, decay and later pieces of the learning rate.

    Attributes:
        decay: constant, linear or cosine.
        num_warmup: steps of the warm-up.
        num_steps: warm-up, hold and decay together; linear and cosine reach `final` in the last of them.
        final: the last factor.
        num_hold: steps at 1 between warm-up and decay.
        later: pairs of a step and the factor that holds from there on, after the decay.

    Raises:
        ValueError: a name, number of steps or factor that has no meaning.

    >>> [round(LRSchedule("linear", num_warmup=2, num_steps=6).factor(step), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.667, 0.333, 0.0, 0.0]
    >>> pieces = LRSchedule("linear", num_warmup=2, num_hold=2, num_steps=6, final=0.2, later=[(7, 0.1)])
    >>> [round(pieces.factor(step), 3) for step in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.2, 0.2, 0.1, 0.1]
    """

    decay: Decay = "constant"
    num_warmup: int = 0
    num_steps: int | None = None
    final: float = 0.0
    num_hold: int = 0
    later: Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "later", tuple((step, factor) for step, factor in self.later))
        if self.decay not in get_args(Decay):
            raise ValueError(f"a schedule decays {', '.join(get_args(Decay))}, got {self.decay!r}")
        if min(self.num_warmup, self.num_hold) < 0 or not 0 <= self.final <= 1:
            raise ValueError(
                f"a schedule needs num_warmup and num_hold of at least 0 and final from 0 to 1, got {self.num_warmup}, "
                f"{self.num_hold}, {self.final}"
            )
        before = self.num_warmup + self.num_hold
        if self.decay != "constant" and (self.num_steps is None or self.num_steps <= before):
            raise ValueError(
                f"a {self.decay} decay ends at num_steps, which must be above num_warmup + num_hold = {before}, "
                f"got {self.num_steps}; give the number of steps, or use constant"
            )
        first = self.num_steps or before
        starts = [step for step, _ in self.later]
        if starts != sorted(set(starts)) or min(starts, default=first) < first:
            raise ValueError(f"later pieces start one after the other, from step {first} on, got {list(self.later)}")
        if not all(0 <= factor <= 1 for _, factor in self.later):
            raise ValueError(
                f"later pieces multiply the learning rate by 0 to 1, got later={list(self.later)}; give such factors"
            )

    def factor(self, step: int) -> float:
        """Return the factor of one step."""
        reached = [factor for start, factor in self.later if step >= start]
        if reached:
            return reached[-1]
        if step < self.num_warmup:
            return (step + 1) / self.num_warmup
        if self.decay == "constant" or self.num_steps is None:
            return 1.0
        before = self.num_warmup + self.num_hold
        x = min(1.0, max(0.0, (step - before) / max(self.num_steps - 1 - before, 1)))
        shape = 1 - x if self.decay == "linear" else (1 + cos(pi * x)) / 2
        return self.final + (1 - self.final) * shape
