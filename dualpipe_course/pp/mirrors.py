"""Two copies of every stage on real ranks: each copy's gradient against one process, and what it is if it is wrong.

Chapter: book/pp/easy-dualpipe.  In: the learner's function.  Out: nothing, or `Wrong` naming rank and stage.
The reference is kept apart by stage and microbatch, so that half of a gradient, one microbatch's, or the sum of two
different stages' is recognised.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.differences import TOLERANCE
from dualpipe_course.pp.gradients import ROWS, WIDTH, grads_of, make_batch, make_stage
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from dualpipe_lab.launch.launcher import Results

Vector = list[float]
Parts = list[list[Vector]]  # per stage and microbatch, its share of the gradient
STAGE_BYTES = 76 * 8  # the parameters of `make_stage`
GATHERED_BYTES = 4 * STAGE_BYTES  # the gradients of two stages to one other rank, and as much again for their packing
MESSAGE_BYTES = ROWS * WIDTH * 8


def check_mirror_sum(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless `fn(rank, world_size, stages)` gives both copies of each stage the whole gradient."""
    case = f"{num_ranks} ranks, {num_microbatches} microbatches"
    results = on_ranks(_mirror_sum, num_ranks, fn, num_microbatches, case=case)
    _compare(list(results), num_microbatches, case)
    for rank in range(num_ranks):
        links = (rank > 0) + (rank < num_ranks - 1)
        _check_bytes(results, links * num_microbatches * MESSAGE_BYTES, case, [rank])


def _check_bytes(results: "Results", messages: int, case: str, ranks: Sequence[int] = (0, 1)) -> None:
    for rank in ranks:
        if (sent := results.ledger.sent(rank=rank)) > messages + GATHERED_BYTES:
            raise Wrong(
                f"{case}: rank {rank} sent {sent} bytes, {messages + 2 * STAGE_BYTES} are enough: {messages} of "
                f"activations and gradients between stages, and once, to the mirror alone, the gradients of 2 stages, "
                f"{2 * STAGE_BYTES}"
            )


def _compare(found: Sequence[dict[int, Vector]], num_microbatches: int, case: str) -> None:
    parts: Parts = on_ranks(shares_of, 1, len(found), num_microbatches, case="the reference")[0]
    for rank, stages in enumerate(found):
        for stage, gradient in sorted(stages.items()):
            if problem := _problem(gradient, stage, int(rank != stage), parts):
                raise Wrong(f"{case}: rank {rank}, stage {stage}: {problem}")


def _problem(found: Vector, stage: int, direction: int, parts: Parts) -> str | None:
    """Say what the gradient of a stage's copy for one direction is instead of the whole."""
    whole = total(parts[stage])
    if is_near(found, whole):
        return None
    if not any(found):
        return "its gradient is all zero or missing"
    for name, other in _suspects(stage, direction, parts):
        if is_near(found, other):
            return f"its gradient is {name}"
    error = max(abs(a - b) for a, b in zip(found, whole, strict=True))
    return f"its gradient differs from one process by up to {error:.2g}"


def _suspects(stage: int, direction: int, parts: Parts) -> Iterator[tuple[str, Vector]]:
    """What a gradient typically is instead, with the words for it."""
    number, mirror = len(parts[stage]), len(parts) - 1 - stage
    half = number // 2
    mine = slice(half, number) if direction else slice(half)
    whole, own = total(parts[stage]), total(parts[stage][mine])
    crossed = total([own, *parts[mirror][mine]])
    last = parts[stage][mine][-1]
    added = f"1/{number} has been applied to each microbatch already, so the copies are added, not averaged"
    order = f"of stage {stage}'s half and stage {mirror}'s: both mirrors must take their stages in one order"
    wins = "the last one replaced what was there, where it must be added"
    yield f"that of direction {direction} alone; the other half is on its mirror rank", own
    yield f"half of that of one process: {added}", times(whole, 0.5)
    yield "twice that of one process: the loss is the mean over the microbatches of both directions", times(whole, 2)
    yield f"{number} times too large, which is the number of microbatches", times(whole, number)
    yield f"the sum {order}", crossed
    yield f"the mean of stage {stage}'s half and stage {mirror}'s", times(crossed, 0.5)
    yield f"that of microbatch {(number if direction else half) - 1} alone: {wins}", last
    near = slice(len(parts) // 2) if stage < mirror else slice(len(parts) // 2, len(parts))
    mixed = total([total(other) for other in parts[near]])
    yield "the sum over several stages: only the two mirrors of a stage belong to a group", mixed
    both = total([parts[stage][half - 1], parts[stage][-1]])
    yield f"that of microbatches {half - 1} and {number - 1} alone: {wins}", both


def total(vectors: Sequence[Vector]) -> Vector:
    """Return the sum of vectors, entry by entry."""
    return [sum(values) for values in zip(*vectors, strict=True)]


def times(vector: Vector, factor: float) -> Vector:
    """Return a multiple of a vector."""
    return [factor * value for value in vector]


def is_near(found: Vector, expected: Vector) -> bool:
    """Whether a vector is the expected one, but for rounding."""
    scale = max(1.0, *map(abs, expected))
    return len(found) == len(expected) and all(
        abs(a - b) <= TOLERANCE * scale for a, b in zip(found, expected, strict=True)
    )


def shares_of(rank: int, world_size: int, num_stages: int, num_microbatches: int) -> Parts:
    """Return the share of each microbatch in the gradient of each stage, from one process."""
    from torch import nn

    stages = [make_stage(index) for index in range(num_stages)]
    columns = []
    for x, y in zip(*make_batch([ROWS] * num_microbatches), strict=True):
        for stage in stages:
            stage.zero_grad()
        (nn.functional.mse_loss(nn.Sequential(*stages)(x), y) / num_microbatches).backward()
        columns.append([_flat(stage) for stage in stages])
    return [list(row) for row in zip(*columns, strict=True)]


def _flat(stage: Any) -> Vector:
    """A stage's gradient as one list; zeros where a parameter has none."""
    parts = zip(stage.parameters(), grads_of(stage), strict=True)
    return [value for parameter, grad in parts for value in (grad or [0.0] * parameter.numel())]


def _mirror_sum(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> dict[int, Vector]:
    import torch
    from torch import nn

    from dualpipe_lab.pp.runtime import PipelineRuntime
    from dualpipe_lab.pp.schedules.easy_dualpipe import easy_dualpipe

    stages = {stage: make_stage(stage) for stage in (rank, world_size - 1 - rank)}  # a rank's own stage first
    like = torch.empty(ROWS, WIDTH, dtype=torch.float64)
    program = easy_dualpipe(world_size, num_microbatches)
    runtime = PipelineRuntime(program, stages, nn.functional.mse_loss, like, sum_copies=False)
    torch.manual_seed(100 + rank)
    runtime.step(*make_batch([ROWS] * num_microbatches))
    fn(rank, world_size, stages)
    return {number: _flat(stage) for number, stage in stages.items()}
