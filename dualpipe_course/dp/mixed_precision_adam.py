"""Exercises of "Mixed-precision Adam": stairs and scales, one decision, the order of a step, rounding at random.

Chapter: book/dp/mixed-precision-adam.  Scales are judged step by step beside `torch.amp.GradScaler`, messages by the
ledger, gradients against float64, and rounding over every one of the equally likely noises.
"""

import math
from collections.abc import Callable
from math import inf, nan, sqrt
from random import Random
from typing import Any, NamedTuple

from dualpipe_course.declared import Implement, Predict, Repair
from dualpipe_course.differences import apart
from dualpipe_course.switched_off import Without
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

NAMES = ("steps until the copy moves", "last scale", "steps made", "bytes per parameter")
_LIBRARY = "dualpipe_lab.dp.mixed_precision:LossScaler."
NUM_STEPS, INTERVAL = 40, 3


class Prepared(NamedTuple):
    """Scaled fp16 gradients by rank, and how they are to be prepared."""

    gradients: list[list[float]]
    scale: float
    max_norm: float


CASES = (
    Prepared([[0.5 * 1024]], 1024.0, 1.0),  # below the limit: to be unscaled only
    Prepared([[3 * 64.0, 4 * 64.0]], 64.0, 1.0),
    Prepared([[3 * 64.0], [4 * 64.0]], 64.0, 1.0),
    Prepared([[0.25 * 1024, 2.0**-20], [0.5 * 1024]], 1024.0, 1.0),
    Prepared([[1.0] * 4, [2.0] * 4, []], 1.0, 2.0),
    Prepared([[8.0], [], [-6.0]], 2.0, 100.0),
)


def _check_decisions(fn: Callable[..., Any]) -> None:
    """Raise `Wrong` unless all ranks decide as torch's scaler would if it saw everybody's gradients."""
    for world_size in (1, 2, 3):
        history = _history(world_size)
        results = on_ranks(_decide, world_size, fn, history, case=f"{world_size} rank(s)")
        expected = on_ranks(_by_torch, 1, [any(kinds) for kinds in history], case="torch's own")[0]
        for number, kinds in enumerate(history):
            for rank, found in enumerate(results):
                _check_decision(found[number], expected[number], kinds, f"{world_size} rank(s), step {number}", rank)
        _check_messages(results, world_size)


def _check_prepared(fn: Callable[..., Any]) -> None:
    """Raise `Wrong` unless gradients come out in fp32, unscaled, then clipped by the norm over all ranks."""
    for case in CASES:
        world_size = len(case.gradients)
        where = f"{world_size} rank(s), scale {case.scale:g}, max_norm {case.max_norm:g}, gradients {case.gradients}"
        results = on_ranks(_prepare, world_size, fn, case, case=where)
        true = [[g / case.scale for g in own] for own in case.gradients]
        norm = sqrt(sum(g * g for own in true for g in own))
        factor = min(1.0, case.max_norm / norm)
        for rank, (found, changed) in enumerate(results):
            if isinstance(found, str):
                raise Wrong(f"{where}: rank {rank} returned {found}, expected one fp32 tensor per gradient")
            if changed:
                raise Wrong(f"{where}: rank {rank} changed the gradients that it was given; return new tensors")
            problem = _prepared_problem(found, true, rank, factor, case, norm)
            if problem:
                raise Wrong(f"{where}: {problem}")


def _check_rounding(fn: Callable[..., Any]) -> None:
    """Raise `Wrong` unless every number is rounded to a neighbour, and its mean over all noises is the number."""
    problem = on_ranks(_round, 1, fn, case="rounding on one process")[0]
    if problem:
        raise Wrong(problem)


def _history(world_size: int) -> list[list[int]]:
    """Per step and rank, what the gradients hold: 0 finite, 1 inf, 2 nan, 3 -inf; single ranks overflow first."""
    draw = Random(world_size)  # noqa: S311 (cases, no secret)
    history = [[0] * world_size for _ in range(NUM_STEPS)]
    for rank in range(world_size):
        history[1 + 2 * rank][rank] = 1 + rank
    for kinds in history[12:]:
        if draw.random() < 0.15:
            kinds[draw.randrange(world_size)] = draw.randint(1, 3)
    return history


def _decide(rank: int, world_size: int, fn: Callable[..., Any], history: list[list[int]]) -> list[tuple[Any, ...]]:
    import torch

    state: dict[str, Any] = {"scale": 65536.0, "good": 0, "interval": INTERVAL}
    found = []
    for number, kinds in enumerate(history):
        own = [torch.full((3,), 60000.0, dtype=torch.float16), torch.zeros(2, 2, dtype=torch.float16)]
        if kinds[rank]:
            own[number % 2].view(-1)[-1] = (0.0, inf, nan, -inf)[kinds[rank]]
        elif rank and number % 5 == 4:
            own = []  # a stage of which nothing is trained
        answer = fn(own, state)
        found.append((type(answer).__name__, bool(answer), state["scale"], state["good"]))
    return found


def _by_torch(rank: int, world_size: int, overflows: list[bool]) -> list[tuple[bool, float, int]]:
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=INTERVAL)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, found = torch.optim.SGD([weight], 1.0), []
    for overflow in overflows:
        before, weight.grad = float(weight.detach()), torch.full((1,), inf if overflow else 1.0)
        scaler.scale(torch.zeros(1))
        scaler.step(optimizer)
        scaler.update()
        good = int(scaler.state_dict()["_growth_tracker"])
        found.append((float(weight.detach()) != before, float(scaler.get_scale()), good))
    return found


def _check_decision(
    found: tuple[str, bool, float, int], expected: tuple[bool, float, int], kinds: list[int], case: str, rank: int
) -> None:
    kind, steps, scale, good = found
    if kind != "bool":
        raise Wrong(f"{case}: rank {rank} returned a {kind}; return True (step) or False (skip)")
    said = {True: "steps", False: "skips"}
    names = ("finite", "an inf", "a nan", "a -inf")
    if steps != expected[0]:
        if not any(kinds):
            raise Wrong(
                f"{case}: rank {rank} skips, but every element is finite; gradients of 60000 are no overflow, "
                "although their sum is one in fp16"
            )
        guilty = next(other for other, what in enumerate(kinds) if what)
        alone = "" if guilty == rank else "; a rank that decides by its own gradients leaves the others behind"
        raise Wrong(f"{case}: rank {guilty} has {names[kinds[guilty]]}, but rank {rank} {said[steps]}{alone}")
    if (scale, good) != expected[1:]:
        raise Wrong(
            f"{case}: rank {rank} {said[steps]} and has scale {scale:g}, {good} good step(s); "
            f"torch has {expected[1]:g} and {expected[2]} (growth 2 after {INTERVAL} good steps in a row, backoff 0.5)"
        )


def _check_messages(results: Any, world_size: int) -> None:
    if world_size == 1:
        return
    for rank in range(world_size):
        count = results.ledger.count(rank=rank)
        if count != NUM_STEPS:
            raise Wrong(f"{world_size} rank(s): rank {rank} sent {count} messages in {NUM_STEPS} steps; one per step")
        if results.ledger.sent(rank=rank) > 16 * NUM_STEPS:
            raise Wrong(f"{world_size} rank(s): a decision is one number; rank {rank} sent more than 16 bytes per step")


def _prepare(rank: int, world_size: int, fn: Callable[..., Any], case: Prepared) -> tuple[Any, bool]:
    import torch

    own = [torch.tensor([[g, 0.0, 0.0]], dtype=torch.float16) for g in case.gradients[rank]]
    before = [g.clone() for g in own]
    found = fn(own, case.scale, case.max_norm)
    changed = not all(map(torch.equal, own, before))
    if not isinstance(found, (list, tuple)) or len(found) != len(own):
        return f"{type(found).__name__} of length {len(found)}" if hasattr(found, "__len__") else "no list", changed
    kinds = [str(getattr(g, "dtype", type(g).__name__)) for g in found]
    if set(kinds) - {"torch.float32"}:
        return f"a tensor of {next(kind for kind in kinds if kind != 'torch.float32')}", changed
    if shapes := [str(list(g.shape)) for g, given in zip(found, own, strict=True) if g.shape != given.shape]:
        return f"a tensor of shape {shapes[0]}, not {list(own[0].shape)}", changed
    return [float(g.sum()) for g in found], changed


def _prepared_problem(
    found: list[float], true: list[list[float]], rank: int, factor: float, case: Prepared, norm: float
) -> str | None:
    expected = [g * factor for g in true[rank]]
    if all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(found, expected, strict=True)):
        return None
    place = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not abs(a - b) <= 1e-5 * abs(b))
    both = apart(found[place], expected[place], 1e-5 * abs(expected[place]))
    said = f"rank {rank} has {both.found}, expected {both.expected} (true norm {norm:.4g})"
    wrong_order = min(1.0, case.max_norm / (norm * case.scale)) * true[rank][place]
    own = sqrt(sum(g * g for g in true[rank]))
    alone = min(1.0, case.max_norm / own) * true[rank][place]
    sums = sum(sqrt(sum(g * g for g in part)) for part in true)
    if abs(found[place] - wrong_order) <= 1e-3 * abs(wrong_order):
        return f"{said}: it was clipped before it was unscaled, so max_norm met a norm of {norm * case.scale:g}"
    if found[place] == 0.0:
        return f"{said}: {true[rank][place]:.3g} is below the smallest fp16 number; convert to fp32, then divide"
    if abs(found[place] - true[rank][place] * case.scale * min(1.0, case.max_norm / norm)) < 1e-3:
        return f"{said}: it still carries the scale"
    if abs(found[place] - expected[place]) <= 2.0**-10 * abs(expected[place]):
        return f"{said}: so near that something was rounded to fp16 on the way; convert to fp32 before you compute"
    if len(true) > 1 and abs(found[place] - alone) <= 1e-3 * abs(alone):
        return f"{said}: that is clipped by this rank's own norm, {own:.4g}; the limit is on the norm over all ranks"
    if abs(found[place] - min(1.0, case.max_norm / sums) * true[rank][place]) <= 1e-3 * abs(found[place]):
        return f"{said}: norms do not add up, {sums:.4g}; their squares do"
    return said


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


def _judge_all_step(fn: Callable[..., Any]) -> str:
    _check_decisions(Without(fn, _LIBRARY + "update", _LIBRARY + "found_inf"))
    return "1 to 3 ranks, 40 steps: scales equal torch's GradScaler, one message of one number per step"


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

all_step = Implement(
    "mixed_precision_adam-2",
    "One decision",
    "Write `all_step(gradients, state)`: whether the ranks step, and the next scale; alike on all ranks.",
    judge=_judge_all_step,
    minutes=15,
    points=3,
    hints=(
        "Make one number of your own gradients: 1 if any element is inf or nan, else 0. isfinite() tells.",
        "comm.all_reduce(number, 'max') makes it everybody's. A rank without gradients takes part too.",
        "On overflow: scale times 0.5, good = 0. Otherwise good + 1, and when good reaches the interval: scale times "
        "2, good = 0.",
    ),
)

prepare = Repair(
    "mixed_precision_adam-3",
    "The step that stays small",
    "Repair `prepare(gradients, scale, max_norm)`: fp32 gradients, unscaled, then clipped.",
    judge=_check_prepared,
    right="gradients on 1 to 3 ranks equal float64, clipped and not, and the smallest are still there",
    minutes=15,
    points=2,
    hints=(
        "Take one gradient of 0.5, a scale of 1024 and max_norm = 1, and follow the function by hand.",
        "max_norm is about the true gradient: divide by the scale before you take the norm.",
        "2^-20 / 1024 = 2^-30 is no fp16 number. In which type must the division be done?",
    ),
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
