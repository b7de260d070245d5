"""A V on real ranks: every stage's gradient against one process, and whether each stage's backward runs by itself.

Chapter: book/pp/v-shapes.  In: the learner's step.  Out: nothing, or `Wrong` naming the stages that are wrong and how.
A backward is known by its number: autograd says in a hook which call of backward is running.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course.differences import difference
from dualpipe_course.exercise import Wrong
from dualpipe_course.pp.gradients import (
    OLD,
    ROWS,
    WIDTH,
    added_to,
    leave_gradients,
    make_batch,
    make_stage,
    reference,
    without_runtime,
)
from dualpipe_course.start.ranks import SENDS, all_waited_for, check_messages_only
from dualpipe_course.trial import on_ranks
from dualpipe_lab._private import backward_id

Vector = list[float]


def check_turn(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless a V has the gradients of one process, stage by stage, and 4 (p - 1) m messages."""
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es)"
    results = on_ranks(_v_step, num_ranks, without_runtime(fn), num_microbatches, case=case)
    expected: list[Vector] = [
        flat(grads) for grads in on_ranks(reference, 1, 2 * num_ranks, num_microbatches, case="the reference")[0]
    ]
    found = [grads for (grads, _), _, _ in results] + [grads for (_, grads), _, _ in reversed(results)]
    _check_gradients(found, expected, case)
    for rank, (_, runs, shared) in enumerate(results):
        if any(number != num_microbatches for number in runs):
            raise Wrong(f"{case}: on rank {rank} the backwards of the two stages ran {runs[0]} and {runs[1]} times")
        if shared:
            raise Wrong(
                f"{case}: on rank {rank} one call of backward runs through both stages; their gradients are right, "
                "but a schedule could put nothing between the two: cut the graph at the turn"
            )
    if num_ranks > 1:
        check_messages_only(results, case)
    sent = sum(results.ledger.count(name) for name in SENDS)
    if sent != (needed := 4 * (num_ranks - 1) * num_microbatches):
        raise Wrong(f"{case}: {sent} messages, expected 4 (p - 1) m = {needed}; the turn needs none")


def _check_gradients(found: Sequence[Vector], expected: Sequence[Vector], case: str) -> None:
    ratios = [_ratio(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    wrong = [stage for stage, ratio in enumerate(ratios) if ratio != 1]
    if not wrong:
        return
    if any(_ratio([x + OLD for x in found[stage]], expected[stage]) == 1 for stage in wrong):
        raise Wrong(f"{case}: the gradients of the step before are gone; a step adds to what is there")
    factors = {ratios[stage] for stage in wrong}
    named = ", ".join(map(str, wrong))
    if None in factors or len(factors) > 1:
        raise Wrong(f"{case}: the gradients of stage(s) {named} differ from one process")
    factor = factors.pop()
    if factor == 0:
        raise Wrong(f"{case}: the gradients of stage(s) {named} are zero or missing")
    raise Wrong(f"{case}: the gradients of stage(s) {named} are {factor:g} times those of one process")


def _ratio(ours: Vector, theirs: Vector) -> float | None:
    """By which factor the gradients differ, rounded; None if by none."""
    if not any(ours):
        return 0.0
    if len(ours) != len(theirs):
        return None
    off = difference(ours, theirs)
    if off is None:
        return 1.0
    return None if off.ratio is None else round(off.ratio, 6)


def _v_step(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> tuple[Any, ...]:
    """One rank: the gradients of both stages, how often the backward of each ran, whether one call ran both."""
    import torch

    stages = [make_stage(rank), make_stage(2 * world_size - 1 - rank)]
    calls: list[list[int]] = [[], []]
    for stage, seen in zip(stages, calls, strict=True):
        # the last layer's output, since the first stage's input has no gradient
        stage[-1].register_full_backward_hook(lambda *_, seen=seen: seen.append(backward_id()))
    batch = list(zip(*make_batch([ROWS] * num_microbatches), strict=True))
    if rank > 0:  # only the first rank has data
        batch = [(torch.full_like(x, float("nan")), torch.full_like(y, float("nan"))) for x, y in batch]
    torch.manual_seed(100 + rank)
    for stage in stages:
        leave_gradients(stage)
    fn(rank, world_size, *stages, batch, torch.empty(ROWS, WIDTH, dtype=torch.float64))
    all_waited_for()
    runs = [len(seen) for seen in calls]
    return [flat(added_to(stage)) for stage in stages], runs, bool(set(calls[0]) & set(calls[1]))


def flat(grads: Sequence[Vector]) -> Vector:
    """The gradients of a stage's parameters as one list."""
    return [number for part in grads for number in part]
