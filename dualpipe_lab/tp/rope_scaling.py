"""`RopeScaling`: how Llama 3.1 stretches its rotary angles to sequences longer than those it was first trained on.

Chapter: book/whole/weights.  In: four numbers.  Out: the factor of each angle; no torch.
  wave length of a pair   2 pi / angle per position
  short waves             unchanged: they tell neighbours apart
  long waves              divided by `factor`, so that positions that were never seen look like positions that were
  between                 a mixture, linear in the number of waves that fit into the original length
Elsewhere: transformers `_compute_llama3_parameters`; torchtitan `RoPE`.
Source: Grattafiori et al. 2024 (arXiv 2407.21783), section 3.4.2; the formula is that of the published code.
"""

from dataclasses import dataclass
from math import pi


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary angles.

    Attributes:
        factor: by which angles of long waves are divided.
        low_factor, high_factor: a wave that fits less often than the first, or more often than the second, into
            `original_length` is long, or short.
        original_length: tokens of the sequences before the stretch.

    >>> scaling = RopeScaling(8, 1, 4, 8192)
    >>> scaling.factor_of(1.0), scaling.factor_of(1e-6)
    (1.0, 0.125)
    """

    factor: float
    low_factor: float
    high_factor: float
    original_length: float

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.low_factor < self.high_factor and self.original_length > 0):
            raise ValueError(
                f"rotary angles are scaled with positive numbers, low_factor below high_factor, got {self}"
            )

    def factor_of(self, angle: float) -> float:
        """Return by what an angle per position is multiplied."""
        waves = self.original_length * angle / (2 * pi)
        share = min(1.0, max(0.0, (waves - self.low_factor) / (self.high_factor - self.low_factor)))
        return share + (1 - share) / self.factor
