"""Closed forms: bytes that each stage of ZeRO holds and sends.

Chapter: book/dp/zero-3.  In: a stage, N ranks, bytes per number.  Out: bytes per parameter; bytes per step.
           holds per parameter             sends per step, times (N - 1) / N * bytes of the parameters
  ddp      w + g + s                       2
  zero1    w + g + s / N                   2
  zero2    w + (g + s) / N                 m + 1
  zero3    (w + g + s) / N                 3 m       (2 m with reshard_after_forward=False)
with w bytes per working weight, g per gradient, s per state (master copy and moments), m microbatches.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), sections 5 and 7.
"""

from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

Stage: TypeAlias = Literal["ddp", "zero1", "zero2", "zero3"]
ZERO_STAGES: tuple[Stage, ...] = ("ddp", "zero1", "zero2", "zero3")


class Precision(NamedTuple):
    """Bytes per parameter of working weights, gradients, and optimizer state with the master copy."""

    weight: int
    grad: int
    state: int


BF16 = Precision(2, 2, 12)  # master copy and two moments in fp32
BF16_FP32_GRADS = Precision(2, 4, 12)
FP32 = Precision(4, 4, 8)  # the weights are their own master copy


def bytes_per_parameter(stage: Stage, num_ranks: int, precision: Precision = BF16) -> Fraction:
    """Return the bytes that one rank holds between steps, per parameter of the model.

    >>> [str(bytes_per_parameter(stage, 4)) for stage in ZERO_STAGES]
    ['16', '7', '11/2', '4']

    Raises:
        ValueError: an unknown stage, or no rank.
    """
    if stage not in ZERO_STAGES or num_ranks < 1:
        raise ValueError(f"stages are {', '.join(ZERO_STAGES)}, on 1 rank at least; got {stage!r} on {num_ranks}")
    shared = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[stage]  # state first, weights last
    parts = (precision.state, precision.grad, precision.weight)
    return sum((Fraction(part, num_ranks if place < shared else 1) for place, part in enumerate(parts)), Fraction(0))


def sent_bytes(
    stage: Stage,
    num_ranks: int,
    padded_numel: int,
    num_microbatches: int = 1,
    precision: Precision = BF16,
    reshard_after_forward: bool = True,
) -> int:
    """Return the bytes that one rank sends in a step, to sum the gradients and to gather the weights.

    >>> [sent_bytes(stage, 4, 400, num_microbatches=3) for stage in ZERO_STAGES]
    [1200, 1200, 2400, 5400]
    """
    gathers = {"ddp": 0, "zero1": 1, "zero2": 1, "zero3": (2 if reshard_after_forward else 1) * num_microbatches}[stage]
    sums = {"ddp": 2, "zero1": 1, "zero2": num_microbatches, "zero3": num_microbatches}[stage]
    elements = Fraction((num_ranks - 1) * padded_numel, num_ranks)
    return int(elements * (gathers * precision.weight + sums * precision.grad))
