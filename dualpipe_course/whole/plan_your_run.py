"""Exercises of "Plan your run": which rank is full, the fastest that fits, half of the network, forgotten logits.

Chapter: book/whole/plan-your-run.  Memory and seconds are those of `estimate` and `step_time`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dualpipe_course import check as checks
from dualpipe_course.exercise import Wrong, exercise, hint_of
from dualpipe_course.plain import plain
from dualpipe_course.trial import call_each, check_ints, ended, partial_score
from dualpipe_lab.models import LlamaConfig
from dualpipe_lab.plan import MEGATRON, MEGATRON_TIME, Cluster, Plan, estimate, step_time

NAMES = ("fullest rank", "its GB", "fullest rank with recomputation", "its GB")
EXPECTED = (0, 43, 3, 38)
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
_RULES = (
    "compare states, what min(4 - rank, 8) microbatches keep, and logits on the last rank",
    "18 bytes times weights, plus microbatches kept times 4 layers times 1 GB, plus logits on the last rank",
    "compare states, what is kept, and the larger of 1 GB anew and the logits",
    "18 bytes times weights, plus 0.25 GB for each layer and microbatch kept, plus the larger of anew and logits",
)
MODEL = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
LENGTH, BATCH, GB = 8192, 64, 10**9
LIMIT_BYTES, LIMIT_SECONDS = 50 * GB, 2.55
_BF16: dict[str, Any] = {"precision": "bfloat16"}


def hint(exercise: int | None = None) -> None:
    """Print the next hint for an exercise, or for the first unsolved one."""
    hint_of(checks.topic("plan_your_run"), exercise)


@exercise(
    "plan_your_run-1",
    "Which rank is full",
    "predict",
    minutes=10,
    points=2,
    hints=(
        "Rank 0 has 4 x 0.25 + 0.5 billion weights. How many microbatches does rank r of 1F1B keep?",
        "Rank r keeps min(4 - r, 8) microbatches of 4 layers; only the last rank has logits.",
        "With recomputation everybody keeps a quarter of that. The logits stay as they are.",
    ),
)
def numbers(answer: object) -> str:
    """Predict which rank needs most memory, without and with recomputation."""
    check_ints(answer, NAMES, EXPECTED, _SLIPS, _RULES)
    return "rank 0 with 43 GB; with recomputation rank 3 with 38 GB"


class Case(NamedTuple):
    """What `fastest` is called with."""

    model: LlamaConfig
    plans: list[Plan]
    cluster: Cluster
    sequence_length: int
    global_batch: int


@exercise(
    "plan_your_run-2",
    "The fastest that fits",
    "implement",
    minutes=15,
    points=3,
    hints=(
        "estimate(model, plan, cluster, sequence_length, global_batch, MEGATRON).fits: whether every rank has room.",
        "Call estimate inside try, and go on with the next plan where it raises ValueError.",
        "step_time(..., MEGATRON_TIME).seconds of those that fit; the smallest wins, and None where the list is empty.",
    ),
)
def fastest(fn: Callable[..., Any]) -> str:
    """Write `fastest(...)`: of some plans, the place of the one with the shortest step that fits."""
    cases = list(_cases())
    for (what, case), (is_fine, value) in zip(cases, call_each(fn, [case for _, case in cases]), strict=True):
        if not is_fine:
            raise Wrong(ended(what, value))
        times = dict(_times(case))
        if value is not None and (type(value) is not int or not 0 <= value < len(case.plans)):
            raise Wrong(f"{what}: return the place of a plan, 0 to {len(case.plans) - 1}, or None, got {value!r:.80}")
        if value is None and times:
            raise Wrong(f"{what}: got None, and {len(times)} of {len(case.plans)} plans fit")
        if value is not None and value not in times:
            raise Wrong(f"{what}: {case.plans[value]} {_why_not(case, case.plans[value])}")
        if value is not None and times[value] > min(times.values()) * (1 + 1e-9):
            plan, least = case.plans[value], min(times.values())
            raise Wrong(f"{what}: {plan} takes {times[value]:.3f} s, another that fits {least:.3f}")
    return f"the fastest that fits on {len(cases)} clusters, one of which fits none"


@exercise(
    "plan_your_run-3",
    "Half of the network",
    "puzzle",
    minutes=20,
    points=3,
    hints=(
        "Which axis sends least between two nodes? See the chart of the chapter.",
        "With pp 2 across, a node of 8 GPUs holds half of the layers. More microbatches make the bubble smaller.",
        "Long sequences can be cut along cp inside a node, so that a GPU keeps less; ZeRO-1 or 2 cuts the states.",
    ),
)
def half(answer: object) -> str:
    """Give a plan of 16 ranks within 50 GB and 2.55 s on a network of 6.25 GB/s."""
    if answer is ...:
        raise Wrong("not answered yet: give a lab.Plan")
    if type(answer) is not Plan:
        raise Wrong(f"give a lab.Plan, got {type(answer).__name__}")
    shape = slow_cluster(), LENGTH, BATCH
    try:
        memory = estimate(MODEL, answer, *shape, MEGATRON)
        seconds = step_time(MODEL, answer, *shape, MEGATRON_TIME).seconds
    except ValueError as error:
        raise Wrong(f"no legal plan: {error}") from None
    needs, allowed = memory.largest.total.num_bytes, LIMIT_BYTES
    found = f"{answer}: {needs / GB:.1f} GB of {allowed / GB:.0f}, {seconds:.2f} s of {LIMIT_SECONDS}"
    if needs > allowed:
        raise Wrong(f"{found}; rank {memory.largest.pp_rank} of pp needs too much")
    if seconds > LIMIT_SECONDS:
        raise Wrong(f"{found}; it is too slow", score=partial_score(seconds, 6.0, LIMIT_SECONDS))
    return "a plan within 50 GB and 2.55 s on half of the network"


@exercise(
    "plan_your_run-4",
    "The rank that ran out",
    "find the bug",
    minutes=10,
    points=2,
    hints=(
        "Which argument does the function never use?",
        "Only the last rank has the head. How many microbatches' logits are there at once?",
    ),
)
def peaks(fn: Callable[..., Any]) -> str:
    """Repair `peaks(...)`, which forgot the logits."""
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


def slow_cluster() -> Cluster:
    """Two nodes of 8 H100, and a network that has half of 12.5 GB/s."""
    cluster = Cluster.of("h100", 16)
    return replace(cluster, between=replace(cluster.between, bandwidth=6.25e9))


def _times(case: Case) -> Iterator[tuple[int, float]]:
    """The seconds of the plans that fit, by their place."""
    for place, plan in enumerate(case.plans):
        if _why_not(case, plan) is None:
            shape = case.cluster, case.sequence_length, case.global_batch
            yield place, step_time(case.model, plan, *shape, MEGATRON_TIME).seconds


def _why_not(case: Case, plan: Plan) -> str | None:
    """Why a plan cannot be chosen, or None."""
    try:
        memory = estimate(case.model, plan, case.cluster, case.sequence_length, case.global_batch, MEGATRON)
    except ValueError as error:
        return f"is illegal: {error}"
    if memory.fits:
        return None
    needs, has = memory.largest.total.num_bytes, case.cluster.accelerator.memory_bytes
    return f"does not fit: rank {memory.largest.pp_rank} of pp needs {needs / GB:.1f} GB of {has / GB:.1f}"


def _cases() -> Iterator[tuple[str, Case]]:
    again: dict[str, Any] = {"recompute": True, **_BF16}
    flat = Plan(dp=8, zero=1, num_microbatches=2, **_BF16)
    sharded, deep = replace(flat, zero=3), Plan(pp=8, num_microbatches=16, **_BF16)
    square = Plan(pp=4, dp=2, zero=1, num_microbatches=8, **_BF16)
    h100, small = Cluster.of("h100", 8), Cluster.of("a100-40", 8)
    yield "8 H100", Case(MODEL, [flat, deep, sharded, square], h100, LENGTH, 16)
    yield "8 H100, two that fit", Case(MODEL, [deep, square], h100, LENGTH, 16)
    tight = [sharded, replace(deep, recompute=True), Plan(pp=8, num_microbatches=8, **again)]
    yield "8 A100 of 40 GB", Case(MODEL, tight, small, LENGTH, 16)
    yield "8 A100 of 40 GB, nothing fits", Case(MODEL, [flat, sharded], small, LENGTH, 16)
    illegal = [Plan(dp=4, zero=3, **_BF16), Plan(tp=3, **_BF16), replace(deep, num_microbatches=3), deep]
    yield "8 H100, illegal plans among them", Case(MODEL, illegal, h100, LENGTH, 16)
    late = Plan(pp=2, dp=4, zero=1, num_microbatches=4, **again)  # its last rank needs most
    card = replace(h100.accelerator, memory_bytes=_between(late, h100))
    slow = Plan(pp=8, num_microbatches=16, **again)
    yield "8 GPUs on which a last rank is full", Case(MODEL, [late, slow], replace(h100, accelerator=card), LENGTH, 64)


def _between(plan: Plan, cluster: Cluster) -> int:
    """A memory that is enough for a plan's first rank, and not for its last."""
    memory = estimate(MODEL, plan, cluster, LENGTH, BATCH, MEGATRON)
    first, last = (memory.of(rank).total.num_bytes for rank in (0, plan.world_size - 1))
    return (first + last) // 2


def _pipelines() -> Iterator[tuple[list[int], list[int], int, int, int]]:
    yield [3, 2], [1, 1], 1, 10, 100
    yield [3, 2], [1, 1], 4, 10, 100
    yield [5], [4], 2, 7, 50
    yield [9, 4, 4, 8], [4, 4, 4, 3], 8, 1_000, 40_000
    yield [9, 4, 4, 8], [4, 4, 4, 3], 2, 1_000, 40_000
