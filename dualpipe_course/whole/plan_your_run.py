"""Exercises of "Plan your run": which rank is full, the best that fits, a slow network, forgotten logits.

Chapter: book/whole/plan-your-run.  Memory and seconds are those of `memory` and `estimate`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dualpipe_course.declared import Implement, Predict, Puzzle, Repair
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, ended, partial_score
from dualpipe_course.wrong import Wrong
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import H100, Plan, estimate, memory

NAMES = ("fullest rank", "its GB", "fullest rank with recomputation", "its GB")
_SLIPS: tuple[dict[int, str], ...] = (
    {3: "logits take 10 GB there, but rank 0 keeps four microbatches and the last rank one"},
    {
        41: "this is the last rank: 27 of states, 4 kept, 10 of logits and loss",
        59: "rank 0 keeps min(4 - 0, 8) = 4 microbatches of 4 layers, not 8",
        34: "the table of 0.5 billion weights lies on rank 0 too: 9 GB more",
        31: "rank 0 keeps four microbatches, not one",
    },
    {0: "rank 0 now has 27 + 4 + 1 GB; the last rank's logits did not shrink"},
    {
        32: "this is rank 0: 27 of states, 4 kept, 1 anew",
        39: "logits and the layer that is computed anew are not there at once: the loss is over by then",
        28: "logits and loss take 10 GB on the last rank",
    },
)
MODEL = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
LENGTH, BATCH, RANKS, GB = 8192, 64, 16, 10**9
NEAR = 1.05  # plans within this factor of the fastest are equal
SLOW = replace(H100, card=6.25e9)
LIMIT_BYTES, LIMIT_SECONDS = 45 * GB, 4.95
_BF16: dict[str, Any] = {"precision": "bfloat16"}


def _fullest(each: int, logits: int) -> Sequence[float]:
    held = [1.5 * each, each, each, 1.5 * each]
    plain = [weights + 4 * (4 - rank) + logits * (rank == 3) for rank, weights in enumerate(held)]
    again = [weights + (4 - rank) + (logits if rank == 3 else 1) for rank, weights in enumerate(held)]
    return plain.index(max(plain)), max(plain), again.index(max(again)), max(again)


class Case(NamedTuple):
    """What `best` is called with."""

    model: LlamaConfig
    plans: list[Plan]
    sequence_length: int
    global_batch: int
    memory_bytes: int


def peaks_of(
    weights: Sequence[int], layers: Sequence[int], num_microbatches: int, layer_bytes: int, logit_bytes: int
) -> list[int]:
    """The bytes of every rank of 1F1B.

    >>> peaks_of([1, 1], [1, 1], 4, 10, 100)
    [38, 128]
    """
    size = len(weights)
    kept = [min(size - rank, num_microbatches) * layers[rank] * layer_bytes for rank in range(size)]
    ends = [0] * (size - 1) + [logit_bytes]
    return [18 * one + held + end for one, held, end in zip(weights, kept, ends, strict=True)]


def num_axes(plan: Plan) -> int:
    """The axes of a plan that have more than one rank.

    >>> num_axes(Plan(pp=2, dp=4))
    2
    """
    return sum(size > 1 for size in plan.sizes.values())


def _choice_fault(case: Case, value: object) -> str | None:
    """What is wrong with a choice, or None."""
    plans, times = case.plans, dict(_times(case))
    if value is not None and (type(value) is not int or not 0 <= value < len(plans)):
        return f"return the place of a plan, 0 to {len(plans) - 1}, or None, got {value!r:.80}"
    if value is None:
        return f"got None, and {len(times)} of {len(plans)} plans fit" if times else None
    assert isinstance(value, int)
    if value not in times:
        return f"{plans[value]} {_why_not(case, plans[value])}"
    least = min(times.values())
    if times[value] > NEAR * least:
        return f"{plans[value]} takes {times[value]:.3f} s, another that fits {least:.3f}; that is more than 5% longer"
    equals = [place for place, seconds in times.items() if seconds <= NEAR * least]
    fewest = min(equals, key=lambda place: num_axes(plans[place]))
    if num_axes(plans[value]) > num_axes(plans[fewest]):
        return (
            f"{plans[value]} splits along {num_axes(plans[value])} axes; {plans[fewest]} is within 5% of the fastest "
            f"too, with {num_axes(plans[fewest])}"
        )
    return None


def _times(case: Case) -> Iterator[tuple[int, float]]:
    """The seconds of the plans that fit, by their place."""
    for place, plan in enumerate(case.plans):
        if _why_not(case, plan) is None:
            yield place, estimate(case.model, plan, case.sequence_length, case.global_batch).point


def _why_not(case: Case, plan: Plan) -> str | None:
    """Why a plan cannot be chosen, or None."""
    try:
        found = memory(case.model, plan, case.sequence_length, case.global_batch)
    except ValueError as error:
        return f"is illegal: {error}"
    if found.fits(case.memory_bytes):
        return None
    return f"does not fit: its largest rank needs {found.largest.total / GB:.1f} GB of {case.memory_bytes / GB:.1f}"


def _cases() -> Iterator[tuple[str, Case]]:
    again: dict[str, Any] = {"recompute": True, **_BF16}
    flat = Plan(dp=8, zero=1, num_microbatches=2, **_BF16)
    sharded, deep = replace(flat, zero=3), Plan(pp=8, num_microbatches=16, **_BF16)
    square = Plan(pp=4, dp=2, zero=1, num_microbatches=8, **_BF16)
    pairs = Plan(dp=4, tp=2, zero=1, num_microbatches=4, sequence_parallel=True, **_BF16)
    cube = Plan(pp=2, dp=2, cp=2, zero=1, num_microbatches=8, **_BF16)
    two = "8 GPUs of 80 GB, two plans"
    yield "8 GPUs of 80 GB", Case(MODEL, [flat, deep, pairs, square, sharded], LENGTH, 16, 80 * GB)
    yield two, Case(MODEL, [deep, square], LENGTH, 16, 80 * GB)
    yield two + " of one axis", Case(MODEL, [replace(flat, zero=2), sharded], LENGTH, 16, 80 * GB)
    yield "8 GPUs of 60 GB", Case(MODEL, [sharded, deep, cube, square], LENGTH, 16, 60 * GB)
    tight = [sharded, replace(deep, recompute=True), replace(sharded, recompute=True), deep]
    yield "8 GPUs of 40 GB", Case(MODEL, tight, LENGTH, 16, 40 * GB)
    yield "8 GPUs of 40 GB, nothing fits", Case(MODEL, [flat, sharded], LENGTH, 16, 40 * GB)
    illegal = [Plan(tp=3, **_BF16), replace(deep, num_microbatches=3), replace(deep, zero=1), deep]
    yield "8 GPUs of 80 GB, illegal plans among them", Case(MODEL, illegal, LENGTH, 16, 80 * GB)
    late = Plan(pp=2, dp=4, zero=1, num_microbatches=4, **again)  # its last rank needs most
    slow = replace(deep, recompute=True)
    yield "8 GPUs on which a last rank is full", Case(MODEL, [slow, late], LENGTH, 16, _between(late))


def _between(plan: Plan) -> int:
    """A memory that is enough for a plan's first rank, and not for its last."""
    found = memory(MODEL, plan, LENGTH, 16)
    return (found.of(0).total + found.of(plan.world_size - 1).total) // 2


def _pipelines() -> Iterator[tuple[list[int], list[int], int, int, int]]:
    yield [3, 2], [1, 1], 1, 10, 100
    yield [3, 2], [1, 1], 4, 10, 100
    yield [5], [4], 2, 7, 50
    yield [9, 4, 4, 8], [4, 4, 4, 3], 8, 1_000, 40_000
    yield [9, 4, 4, 8], [4, 4, 4, 3], 2, 1_000, 40_000


def _judge_best(fn: Callable[..., Any]) -> str:
    cases = list(_cases())
    for (what, case), (is_fine, value) in zip(cases, call_each(fn, [case for _, case in cases]), strict=True):
        if not is_fine:
            raise Wrong(ended(what, value))
        if (fault := _choice_fault(case, value)) is not None:
            raise Wrong(f"{what}: {fault}")
    return f"the best that fits in {len(cases)} cases, one of which has none"


def _judge_slow_network(answer: object) -> str:
    if answer is ...:
        raise Wrong("not answered yet: give a lab.Plan")
    if type(answer) is not Plan:
        raise Wrong(f"give a lab.Plan, got {type(answer).__name__}")
    if answer.world_size != RANKS or answer.precision != "bfloat16":
        raise Wrong(f"this puzzle is about {RANKS} ranks in bfloat16, got {answer}")
    try:
        needs = memory(MODEL, answer, LENGTH, BATCH).largest.total
        seconds = estimate(MODEL, answer, LENGTH, BATCH, hardware=SLOW).point
    except ValueError as error:
        raise Wrong(f"no legal plan: {error}") from None
    found = f"{answer}: {needs / GB:.1f} GB of {LIMIT_BYTES / GB:.0f}, {seconds:.2f} s of {LIMIT_SECONDS}"
    if needs > LIMIT_BYTES:
        raise Wrong(f"{found}; its largest rank needs too much")
    if seconds > LIMIT_SECONDS:
        raise Wrong(f"{found}; it is too slow", score=partial_score(seconds, 2 * LIMIT_SECONDS, LIMIT_SECONDS))
    return f"a plan within {LIMIT_BYTES / GB:.0f} GB and {LIMIT_SECONDS} s on a slow network"


def _judge_peaks(fn: Callable[..., Any]) -> str:
    cases = list(_pipelines())
    for case, (is_fine, value) in zip(cases, call_each(fn, cases), strict=True):
        where = f"weights {case[0]}, layers {case[1]}, {case[2]} microbatches, {case[3]} and {case[4]} bytes"
        if not is_fine:
            raise Wrong(ended(where, value))
        found, expected = plain(value), peaks_of(*case)
        if not isinstance(found, list) or any(type(size) is not int for size in found):
            raise Wrong(f"{where}: return a list of whole numbers, got {value!r:.80}")
        if found != expected:
            raise Wrong(f"{where}: got {found}, expected {expected}; which rank has logits, and of how many at once?")
    return f"right for {len(cases)} pipelines; the last rank has the logits of one microbatch"


numbers = Predict(
    "plan_your_run-1",
    "Which rank is full",
    NAMES,
    _fullest,
    "holds {each} bytes per weight",
    "Logits and loss of a microbatch take {logits} GB",
    minutes=10,
    points=2,
    hints=(
        "Rank 0 has 4 x 0.25 + 0.5 billion weights. How many microbatches does rank r of 1F1B keep?",
        "Rank r keeps min(4 - r, 8) microbatches of 4 layers; only the last rank has logits.",
        "With recomputation everybody keeps a quarter of that. The logits stay as they are.",
    ),
    slips=_SLIPS,
    each=(18, 16, 20),
    logits=(10, 5, 6, 7, 8, 9, 11),
    called={"each": "bytes per weight", "logits": "GB of logits"},
)

best = Implement(
    "plan_your_run-2",
    "The best that fits",
    "Write `best(...)`: of the plans that fit and are within 5% of the fastest, one with the fewest axes.",
    judge=_judge_best,
    minutes=15,
    points=3,
    hints=(
        "memory(model, plan, sequence_length, global_batch).fits(memory_bytes): whether every rank has room.",
        "Call memory inside try, and go on with the next plan where it raises ValueError.",
        "Keep estimate(...).point of every plan that fits. Which of them are at most 1.05 times the smallest?",
        "The axes of a plan: sum(size > 1 for size in plan.sizes.values()). min takes a key.",
    ),
)

slow_network = Puzzle(
    "plan_your_run-3",
    "A slow network",
    "Give a plan of 16 ranks within a budget of memory and one of seconds on cards of 6.25 GB/s.",
    judge=_judge_slow_network,
    minutes=20,
    points=3,
    hints=(
        "Which axis sends least between two nodes? print(estimate(...).parts) of plans with one axis across.",
        "With pp 2 across, a node of 8 GPUs holds half of the layers. More microbatches make the bubble smaller.",
        "ZeRO-1 or 2 shards the states; along cp a GPU keeps less of each sequence; recomputation costs a third more "
        "arithmetic.",
    ),
)

peaks = Repair(
    "plan_your_run-4",
    "The rank that ran out",
    "Repair `peaks(...)`, which forgot the logits.",
    judge=_judge_peaks,
    minutes=10,
    points=2,
    hints=(
        "Which argument does the function never use?",
        "Only the last rank has the head. How many microbatches' logits are there at once?",
    ),
)
