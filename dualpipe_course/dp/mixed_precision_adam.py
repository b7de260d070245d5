"""Exercises of "Mixed-precision Adam": stairs and scales, rounding at random.

Chapter: book/dp/mixed-precision-adam.  Rounding is judged over every one of the equally likely noises.
"""

import math
from collections.abc import Callable
from math import inf
from typing import Any

from dualpipe_course.declared import Implement, Predict
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

NAMES = ("steps until the copy moves", "last scale", "steps made", "bytes per parameter")


def _check_rounding(fn: Callable[..., Any]) -> None:
    """Raise `Wrong` unless every number is rounded to a neighbour, and its mean over all noises is the number."""
    problem = on_ranks(_round, 1, fn, case="rounding on one process")[0]
    if problem:
        raise Wrong(problem)


def _round(rank: int, world_size: int, fn: Callable[..., Any]) -> str:
    import torch

    noise = torch.arange(2**16, dtype=torch.int32)
    for x in (1.0, 1.001, -1.001, 0.1, -0.3, 3e-5, 1.9999, -1e30, 1e-40, 0.0, 2.0**-126):
        number = torch.tensor(x, dtype=torch.float32)
        given = number.repeat(2**16)
        found = fn(given, noise)
        if not torch.equal(given, number.repeat(2**16)):
            return f"{x:g}: x has changed; leave it as it is and return a new tensor"
        if getattr(found, "dtype", None) != torch.bfloat16 or found.shape != noise.shape:
            return f"{x:g}: expected a bf16 tensor of {2**16} elements, got {getattr(found, 'dtype', type(found))}"
        bits = int(number.view(torch.int32))
        towards_zero = torch.tensor(bits & -(2**16), dtype=torch.int32).view(torch.float32)
        away = torch.tensor((bits & -(2**16)) + 2**16, dtype=torch.int32).view(torch.float32)
        allowed = {float(towards_zero), float(away)} if bits % 2**16 else {float(number)}
        values, counts = found.double().unique(return_counts=True)
        strange = [value for value in values.tolist() if value not in allowed]
        if strange:
            return f"{x:g}: some noise makes it {strange[0]:.8g}; its neighbours in bf16 are {sorted(allowed)}"
        mean = float((values * counts).sum() / 2**16)
        if mean != float(number.double()):
            return _mean_problem(x, values.tolist(), counts.tolist(), float(number.double()), mean)
    bits = torch.tensor([[0x7F800000, -0x800000], [0x7FFFFFFF, 0x3F800000]], dtype=torch.int32)
    specials = bits.view(torch.float32).t()  # inf, a nan of which a carry would make 0, -inf, 1; not contiguous
    found = fn(specials, torch.full((2, 2), 2**16 - 1, dtype=torch.int32))
    if not (found[0, 0] == inf and found[1, 0] == -inf and bool(found[0, 1].isnan())):
        return f"inf, -inf and nan must stay what they are, got {found.t().flatten().tolist()[:3]}"
    return ""


def _mean_problem(x: float, values: list[float], counts: list[int], number: float, mean: float) -> str:
    if len(values) == 1:
        return (
            f"{x:g}: every noise makes it {values[0]:.8g}; where rounding to the nearest stands still, it must move "
            "sometimes"
        )
    share = (number - values[0]) / (values[1] - values[0])
    return (
        f"{x:g}: {counts[1]} of 65,536 noises go up to {values[1]:.8g}, expected {share * 2**16:.0f}: "
        f"the mean is {mean:.10g}, not {number:.10g}"
    )


numbers = Predict(
    "mixed_precision_adam-1",
    "Four numbers",
    NAMES,
    lambda step, scale: (math.ceil(2**-8 / step), scale // 2, 7, 7),
    "goes down by {step} per step",
    "A loss scale starts at {scale} and",
    minutes=12,
    points=2,
    hints=(
        "Below 2, neighbouring bf16 numbers are 2^-7 apart. How far must the master be from 2 to be rounded to the "
        "next one?",
        "An overflow halves the scale and starts the count of good steps anew; so does a doubling.",
        "Working weights and gradients are whole on every rank; the master and both moments are divided by N.",
    ),
    slips=(
        {
            79: "at 0.0079 the master is a whole spacing away; it is rounded to the nearest, so half is enough",
            78: "at 0.0078 the master is a whole spacing away; it is rounded to the nearest, so half is enough",
            20: "2^-8 is the spacing below 1; between 1 and 2 it is twice that",
            39: "after 39 steps the master is 0.0039 below 2, and the middle between the two is 0.00390625 below",
        },
        {
            1024: "the last overflow comes after the scale has grown to 1024 again",
            256: "after the first overflow, three good steps in a row double the scale",
            2048: "the first two good steps do not count with those after the overflow",
        },
        {9: "an overflow is a step that no rank makes", 5: "only the two overflows are skipped"},
        {
            16: "that is a rank without shards; masters and moments are divided by 4",
            4: "only masters and moments are sharded; weights and gradients stay whole",
            10: "the 12 bytes of master and moments are divided by 4, not by 2",
            6: "the master is a part of the optimizer state: 4 + 4 + 4 bytes, divided by 4",
        },
    ),
    step=(0.0001, 0.0002, 0.0003, 0.0005, 0.0006, 0.0007),
    scale=(1024, 256, 512, 2048, 4096),
)


round_at_random = Implement(
    "mixed_precision_adam-4",
    "Round at random",
    "Write `round_at_random(x, noise)`: fp32 to bf16, right on average over all noises.",
    judge=_check_rounding,
    right="over all 65,536 noises the mean is the number itself, to the last bit",
    minutes=15,
    points=3,
    hints=(
        "x.view(torch.int32) gives the bits of an fp32 number. Its upper 16 bits are a bf16 number: x rounded towards "
        "zero.",
        "Add the noise to the bits. How often does a carry reach the upper half, if the lower half is one quarter of "
        "2^16?",
        "Clear the lower half with & -(2**16), look at the bits as fp32 again, and convert; inf and nan must not get "
        "noise.",
    ),
)
