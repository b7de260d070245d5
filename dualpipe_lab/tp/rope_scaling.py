"""How rotary angles are stretched to sequences longer than those that a model was first trained on.

Chapter: book/whole/weights.  In: a few numbers.  Out: the factor of each angle; no torch.
Short waves (2 pi / angle per position) are unchanged: they tell neighbours apart.  Long waves are divided by `factor`,
so that positions that were never seen look like positions that were.  Between the two is a mixture.
Elsewhere: transformers `_compute_llama3_parameters`, `_compute_yarn_parameters`; torchtitan `RoPE`.
Source: Grattafiori et al. 2024 (arXiv 2407.21783), section 3.4.2, with the formula of the published code; Peng et al.
2023 (arXiv 2309.00071), sections 3.2 to 3.4; DeepSeek-AI 2024 (arXiv 2412.19437), section 4.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, inf, log, pi
from typing import Any, ClassVar, TypeAlias


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary angles in Llama 3.1: a mixture that is linear in the waves in the original length.

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
    rotated_factor: ClassVar[float] = 1.0
    score_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.low_factor < self.high_factor and self.original_length > 0):
            raise ValueError(
                f"rotary angles are scaled with positive numbers, low_factor below high_factor, got {self}"
            )

    def factors(self, base: float, head_size: int) -> list[float]:
        """Return by what the angle of each pair of features is multiplied."""
        return [self.factor_of(base ** (-i / head_size)) for i in range(0, head_size, 2)]

    def factor_of(self, angle: float) -> float:
        """Return by what an angle per position is multiplied."""
        waves = self.original_length * angle / (2 * pi)
        share = min(1.0, max(0.0, (waves - self.low_factor) / (self.high_factor - self.low_factor)))
        return share + (1 - share) / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """The scaling of rotary angles by yarn, as in DeepSeek-V3: a mixture that is linear in the number of the pair.

    Yarn sharpens attention too, since more positions share it: with m(s) = 1 + s ln(factor) / 10, rotated features are
    multiplied by m(mscale) / m(mscale_all_dim), or m(1) where not both are given, and scores of latent attention by
    m(mscale_all_dim)^2.

    Attributes:
        factor: by which angles of long waves are divided.
        original_length: tokens of the sequences before the stretch.
        beta_fast, beta_slow: a wave that fits more often than the first, or less often than the second, into
            `original_length` is short, or long.
        mscale, mscale_all_dim: 0 where not given.

    >>> scaling = YarnScaling(40, 4096, mscale=1, mscale_all_dim=1)
    >>> [round(factor, 3) for factor in scaling.factors(10_000, 64)][8:14]
    [1.0, 1.0, 1.0, 0.925, 0.85, 0.775]
    >>> scaling.rotated_factor, round(scaling.score_factor, 3)
    (1.0, 1.874)
    """

    factor: float
    original_length: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        fits = 1 <= self.factor < inf and 0 < self.beta_slow <= self.beta_fast and 0 < self.original_length < inf
        if not (fits and min(self.mscale, self.mscale_all_dim) >= 0):
            raise ValueError(
                "yarn scales rotary angles by a factor of at least 1, with beta_slow at most beta_fast and no number "
                f"below 0, got {self}"
            )

    @property
    def rotated_factor(self) -> float:
        """By what the rotated features of queries and keys are multiplied."""
        if self.mscale and self.mscale_all_dim:
            return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return self._sharpening(1.0)

    @property
    def score_factor(self) -> float:
        """By what the scores of latent attention are multiplied."""
        return self._sharpening(self.mscale_all_dim) ** 2

    def factors(self, base: float, head_size: int) -> list[float]:
        """Return by what the angle of each pair of features is multiplied."""
        low, high = (self._pair_of(waves, base, head_size) for waves in (self.beta_fast, self.beta_slow))
        low, high = max(floor(low), 0), min(ceil(high), head_size - 1)  # pairs are whole numbers, further apart
        width = high - low or 0.001
        shares = (min(1.0, max(0.0, (pair - low) / width)) for pair in range(head_size // 2))
        return [1 - share + share / self.factor for share in shares]

    def _pair_of(self, waves: float, base: float, head_size: int) -> float:
        """Return the number, with a fraction, of the pair that turns so often within the original length."""
        return head_size * log(self.original_length / (waves * 2 * pi)) / (2 * log(base))

    def _sharpening(self, scale: float) -> float:
        return 1 + 0.1 * scale * log(self.factor)


Scaling: TypeAlias = RopeScaling | YarnScaling


def scaling_of(values: Mapping[str, Any]) -> Scaling:
    """Return the scaling with these fields, such as `dataclasses.asdict` has returned.

    >>> scaling_of({"factor": 4, "original_length": 32}).factor
    4
    """
    return (RopeScaling if "low_factor" in values else YarnScaling)(**values)
