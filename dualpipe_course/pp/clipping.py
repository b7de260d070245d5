"""One clipped step of two copies of every stage: judged by the norm it reports and by how far each copy moved.

Chapter: book/pp/dualpipe.  In: the learner's function.  Out: nothing, or `Wrong` naming rank and stage.
  norm    of the gradient of the whole model; every parameter counts once
  step    lr * min(1, max_norm / norm) * gradient, the same bits on both mirrors
"""

from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import Any, NamedTuple

from dualpipe_course.differences import apart
from dualpipe_course.pp.gradients import ROWS, WIDTH, make_batch, make_stage
from dualpipe_course.pp.mirrors import (
    GATHERED_BYTES,
    MESSAGE_BYTES,
    Parts,
    Vector,
    is_near,
    shares_of,
    times,
    total,
)
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

LR = 0.5  # a power of two: dividing by it loses nothing
NORM_BYTES = 64  # room for an all-reduce of a few numbers
_SUM_FIRST = "the copies' gradients are halves until they are summed over the mirrors, and the norm comes after that"
_ONCE = "every parameter is counted twice, once for each copy; let rank r answer for stage r alone"


class ClipReport(NamedTuple):
    """What a rank reports: the norm that it returned, and by stage (weights before - weights after) / lr."""

    norm: float
    steps: dict[int, Vector]
    after: dict[int, Vector]


def check_clipped_step(fn: Callable[..., Any], num_ranks: int, num_microbatches: int, max_norm: float) -> None:
    """Raise `Wrong` unless `fn(rank, world_size, stages, max_norm, lr)` makes the step of one process."""
    case = f"{num_ranks} ranks, {num_microbatches} microbatches, max_norm {max_norm:g}"
    results = on_ranks(_clipped_step, num_ranks, fn, num_microbatches, max_norm, case=case)
    shares: Parts = on_ranks(shares_of, 1, num_ranks, num_microbatches, case="the reference")[0]
    right = _norm(map(total, shares))
    for rank, moved in enumerate(results):
        if not abs(moved.norm - right) <= 1e-9 * right:  # nan too
            differ = moved.after[rank] != results[num_ranks - 1 - rank].after[rank]
            words = _of_norm(moved, right, shares, differ)
            raise Wrong(f"{case}: rank {rank} returned the norm {apart(moved.norm, right).found}, {words}")
    for rank, moved in enumerate(results):
        for stage in sorted(moved.steps):
            if problem := _of_step(moved.steps[stage], stage, int(rank != stage), max_norm / right, shares):
                raise Wrong(f"{case}: rank {rank}, stage {stage}: {problem}")
            if moved.after[stage] != results[num_ranks - 1 - rank].after[stage]:
                raise Wrong(f"{case}: the copies of stage {stage} differ in their last bits: one sum, one arithmetic")
    for rank in range(num_ranks):
        links = (rank > 0) + (rank < num_ranks - 1)
        enough = links * num_microbatches * MESSAGE_BYTES + GATHERED_BYTES + NORM_BYTES
        if (sent := results.ledger.sent(rank=rank)) > enough:
            raise Wrong(f"{case}: rank {rank} sent {sent} bytes, {enough} are enough: gradients go to the mirror alone")


def _of_norm(moved: ClipReport, right: float, shares: Parts, differ: bool) -> str:
    """Say what a norm is instead of the right one; `differ` if the two copies of a stage differ after the step."""
    for value, words in _norms(right, shares, differ):
        if abs(moved.norm - value) <= 1e-9 * value:
            return words
    both = apart(moved.norm, right, 1e-9 * right)
    return f"that of one process is {both.expected}{both.why}"


def _norms(right: float, shares: Parts, differ: bool) -> Iterator[tuple[float, str]]:
    half = len(shares[0]) // 2
    down, up = [total(share[:half]) for share in shares], [total(share[half:]) for share in shares]
    yield sqrt(2) * right, f"sqrt(2) times that of one process: {_ONCE}"
    yield right / 2, "half of that of one process: 1/m is in every microbatch already, so the copies are added"
    symptom = f"that of one process is {right:.6g}; and after the step the two copies of a stage differ"
    yield _norm([*down, *up]), symptom if differ else f"that of both directions side by side: {_SUM_FIRST}"
    yield _norm(down), f"that of direction 0 alone: {_SUM_FIRST}"
    wholes = list(map(total, shares))
    for stage, whole in enumerate(wholes):
        mirror = wholes[len(wholes) - 1 - stage]
        words = "that of this rank's stages alone: squares are summed over all ranks before the root"
        yield _norm([whole]), words
        yield _norm([whole, mirror]), words
    yield sum(_norm([whole]) for whole in wholes), "the sum of the stages' norms; squares add up, norms do not"
    yield right * right, "the square of that of one process"


def _of_step(step: Vector, stage: int, direction: int, factor: float, shares: Parts) -> str | None:
    """Say what a step is instead of the right one."""
    half = len(shares[stage]) // 2
    own = total(shares[stage][half:] if direction else shares[stage][:half])
    whole, factor = total(shares[stage]), min(1.0, factor)
    clipped = times(whole, factor)
    if is_near(step, clipped):
        return None
    if not any(step):
        return "its weights have not moved"
    for words, other in (
        (f"it moved by the gradient of direction {direction} alone: {_SUM_FIRST}", times(own, factor)),
        (f"it moved by the unclipped gradient of direction {direction} alone: {_SUM_FIRST}", own),
        ("it moved by the whole gradient, unclipped", whole),
        ("it moved up the gradient; a step goes down", times(clipped, -1)),
    ):
        if is_near(step, other):
            return words
    largest = max(range(len(clipped)), key=lambda i: abs(clipped[i]))
    return f"it moved {step[largest] / clipped[largest]:.4g} times as far as one process does"


def _norm(vectors: Iterator[Vector] | Sequence[Vector]) -> float:
    return sqrt(sum(value * value for vector in vectors for value in vector))


def _clipped_step(
    rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int, max_norm: float
) -> ClipReport:
    import torch
    from torch import nn

    from dualpipe_lab.pp.runtime import PipelineRuntime
    from dualpipe_lab.pp.schedules.dualpipe import dualpipe

    stages = {stage: make_stage(stage) for stage in (rank, world_size - 1 - rank)}  # a rank's own stage first
    like = torch.empty(ROWS, WIDTH, dtype=torch.float64)
    program = dualpipe(world_size, num_microbatches)
    runtime = PipelineRuntime(program, stages, nn.functional.mse_loss, like, sum_copies=False)
    torch.manual_seed(100 + rank)
    runtime.step(*make_batch([ROWS] * num_microbatches))
    before = {stage: _weights(module) for stage, module in stages.items()}
    norm = fn(rank, world_size, stages, max_norm, LR)
    after = {stage: _weights(module) for stage, module in stages.items()}
    steps = {stage: [(a - b) / LR for a, b in zip(before[stage], after[stage], strict=True)] for stage in stages}
    return ClipReport(float("nan") if norm is None else float(norm), steps, after)


def _weights(module: Any) -> Vector:
    return [value for parameter in module.parameters() for value in parameter.detach().flatten().tolist()]
