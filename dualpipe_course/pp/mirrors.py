"""Two copies of every stage on real ranks: each copy's gradient against one process, and what it is if it is wrong.

Chapter: book/pp/easy-dualpipe.  In: the learner's function.  Out: nothing, or `Wrong` naming rank and stage.
The reference is kept apart by stage and microbatch, so that half of a gradient, one microbatch's, or the sum of two
different stages' is recognised.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dualpipe_course.differences import TOLERANCE
from dualpipe_course.pp.gradients import ROWS, WIDTH, grads_of, make_batch, make_stage, without_runtime
from dualpipe_course.start.ranks import MS, all_waited_for
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong

if TYPE_CHECKING:
    from torch import Tensor

    from dualpipe_lab.launch.launcher import Results

Vector = list[float]
Parts = list[list[Vector]]  # per stage and microbatch, its share of the gradient
STAGE_BYTES = 76 * 8  # the parameters of `make_stage`
GATHERED_BYTES = 4 * STAGE_BYTES  # the gradients of two stages to one other rank, and as much again for their packing
MESSAGE_BYTES = ROWS * WIDTH * 8


def check_two_way_step(fn: Callable[..., Any], num_microbatches: int) -> None:
    """Raise `Wrong` unless a step of 2 ranks has the right gradients, two live microbatches and no idle time."""
    case = f"2 ranks, {num_microbatches} microbatches"
    results = on_ranks(_two_way_step, 2, without_runtime(fn), num_microbatches, case=case, clock="virtual")
    _compare([grads for grads, *_ in results], num_microbatches, case)
    for rank, (_, others, ticks, peak, one) in enumerate(results):
        if others:
            raise Wrong(f"{case}: on rank {rank} {others}")
        if peak > 2 * one:
            raise Wrong(
                f"{case}: on rank {rank} autograd keeps {peak} tensors at once, two microbatches need {2 * one}: "
                "finish a microbatch's backward before the next one's forward"
            )
        if ticks != 3 * num_microbatches:
            raise Wrong(
                f"{case}: rank {rank} ends at tick {ticks}, its work takes {3 * num_microbatches} (F 1, B 2): both "
                "ranks work on their own inputs, exchange, and work on each other's; whole backwards, each once",
                picture=results.timeline,
            )
    _check_bytes(results, num_microbatches * MESSAGE_BYTES, case)


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


def _two_way_step(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> tuple[Any, ...]:
    """One rank: its gradients, its last tick, most saved tensors at once, saved tensors of one microbatch."""
    import torch
    from torch import nn

    from dualpipe_course.pp.saved import Saved
    from dualpipe_course.pp.timed import Timed
    from dualpipe_lab.launch.context import rank_context

    inputs, targets = make_batch([ROWS] * num_microbatches)
    stages = [make_stage(0), make_stage(1)]
    probe = Saved()
    with probe:
        kept = nn.functional.mse_loss(stages[0](inputs[0].clone().requires_grad_()), targets[0])
        one = probe.peak + 1  # the division of the loss may keep one more
        del kept
    half, like = num_microbatches // 2, torch.empty(ROWS, WIDTH, dtype=torch.float64)
    mine, theirs = (slice(half), slice(half, None))[:: 1 if rank == 0 else -1]
    first, last = (Timed(stage, forward_ms=1, backward_ms=2) for stage in stages)
    torch.manual_seed(100 + rank)
    with torch.no_grad():
        activations = [stages[0](x) for x in inputs[theirs]]
    seen: list[list[torch.Tensor]] = [[], []]
    for stage, inputs_seen in zip((first, last), seen, strict=True):
        stage.register_forward_pre_hook(lambda _, args, found=inputs_seen: found.append(args[0].detach().clone()))
    saved = Saved()
    with saved:
        fn(rank, world_size, first, last, inputs[mine], targets[theirs], num_microbatches, like)
    all_waited_for()
    others = _others(seen, inputs[mine], activations)
    return {s: _flat(stage) for s, stage in enumerate(stages)}, others, rank_context().clock.now() / MS, saved.peak, one


def _others(seen: "list[list[Tensor]]", mine: "list[Tensor]", activations: "list[Tensor]") -> str:
    """Say which stage worked on other microbatches than those that enter on its side, if any."""
    import torch

    names = ("`first`", "`last`"), ("this rank's own inputs", "what `first` of the other rank made of its inputs")
    for name, whose, found, expected in zip(*names, seen, (mine, activations), strict=True):
        same = len(found) == len(expected) and all(
            any(x.shape == y.shape and torch.allclose(x, y) for x in found) for y in expected
        )
        if not same:
            return f"{name} did not work on {whose}, each once; a microbatch passes both ranks, as does its gradient"
    return ""


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
