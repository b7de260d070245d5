"""`LRSchedule`: the factor of the learning rate, as a function of the step alone.

Chapter: book/whole/training.  In: a step, from 0.  Out: a factor from 0 to 1.
  warm-up    (step + 1) / w              for step < w: the first update is not lost
  decay      from 1 at step w to `final` at the last step, n - 1; `final` afterwards
             linear 1 - (1 - f) x        cosine f + (1 - f) (1 + cos(pi x)) / 2        x = (step - w) / (n - 1 - w)
Nothing is counted, so a resumed run needs the step and nothing else.
Elsewhere: torch `LambdaLR`; Megatron `OptimizerParamScheduler`.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal, TypeAlias, get_args

Decay: TypeAlias = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class LRSchedule:
    """Warm-up and decay of the learning rate.

    Attributes:
        decay: constant, linear or cosine.
        num_warmup: steps of the warm-up.
        num_steps: of the training; linear and cosine reach `final` in the last one.
        final: the last factor.

    Raises:
        ValueError: a name, number of steps or factor that has no meaning.

    >>> [round(LRSchedule("linear", num_warmup=2, num_steps=6).factor(step), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.667, 0.333, 0.0, 0.0]
    """

    decay: Decay = "constant"
    num_warmup: int = 0
    num_steps: int | None = None
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.decay not in get_args(Decay):
            raise ValueError(f"a schedule decays {', '.join(get_args(Decay))}, got {self.decay!r}")
        if self.num_warmup < 0 or not 0 <= self.final <= 1:
            raise ValueError(
                f"a schedule needs num_warmup of at least 0 and final from 0 to 1, got {self.num_warmup}, {self.final}"
            )
        if self.decay != "constant" and (self.num_steps is None or self.num_steps <= self.num_warmup):
            raise ValueError(
                f"a {self.decay} decay ends with the training: num_steps must be above num_warmup={self.num_warmup}, "
                f"got {self.num_steps}; give the number of steps, or use constant"
            )

    def factor(self, step: int) -> float:
        """Return the factor of one step."""
        if step < self.num_warmup:
            return (step + 1) / self.num_warmup
        if self.decay == "constant" or self.num_steps is None:
            return 1.0
        x = min(1.0, (step - self.num_warmup) / max(self.num_steps - 1 - self.num_warmup, 1))
        shape = 1 - x if self.decay == "linear" else (1 + cos(pi * x)) / 2
        return self.final + (1 - self.final) * shape
