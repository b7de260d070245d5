"""Exercises of "V-shapes": ZBV's and V-Min's numbers, a V between V-Half and ZBV, the turn that must cut the graph.

Chapter: book/pp/v-shapes.  Programs are judged by the validator and the simulator, the turn on ranks: every stage's
gradient against one process in float64, and in which backward each stage's part ran.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dualpipe_course.declared import Predict, Puzzle, Repair
from dualpipe_course.pp import programs
from dualpipe_course.pp.gradients import (
    ROWS,
    WIDTH,
    added_to,
    grads_of,
    leave_gradients,
    make_batch,
    make_stage,
    why_different,
    without_runtime,
)
from dualpipe_course.start.ranks import SENDS, all_waited_for, check_messages_only
from dualpipe_course.trial import on_ranks
from dualpipe_course.wrong import Wrong
from dualpipe_lab._private import backward_id
from dualpipe_lab.pp.cost import Cost
from dualpipe_lab.pp.schedules.v_shapes import (
    v_min_makespan,
    v_min_peak_activations,
    v_min_ticks_per_microbatch,
    zbv_makespan,
    zbv_peak_activations,
)
from dualpipe_lab.pp.simulator import simulate
from dualpipe_lab.timeline import Time

NAMES = ("held by ZBV", "idle with ZBV", "held by V-Min", "idle with V-Min", "one more microbatch")
RANKS, MICROBATCHES, LEAST, ROOM, SLOW = 3, 3, 21, 5, 25  # of the puzzle, F = I = W = 1; V-Min takes 25
_SLIPS: tuple[dict[int, str], ...] = (
    {10: "a full-size stage counts as two half-size ones", 12: "this is V-Half's p + 2"},
    {0: "that is the local bubble; the last rank's first input comes after p - 1 forwards", 18: "half-size ones"},
    {
        9: "2 (p + 4) / 3 is rounded down before it is doubled: whole microbatches",
        10: "this is 1F1B's p in full-size stages, or half of ZBV's; V-Min holds about a third of ZBV's",
        4: "each rank has two stages",
        12: "this is V-Half's p + 2",
    },
    {23: "this is V-Half's 3 p - 7", 39: "4 p - 1 is what rank 0 waits for at the start; some of it is filled"},
    {
        12: "this is the work; V-Min moves in lock-step: a tick of its block is as long as the longer of F and I",
        6: "each rank has two stages, and six ticks in its block",
    },
)
Vector = list[float]


def _two_vs(p: int, f: int, i: int) -> Sequence[Time]:
    held, idle = zbv_peak_activations(p, 30), zbv_makespan(p, 30) - 180
    held_min, idle_min = v_min_peak_activations(p, 30), v_min_makespan(p, 30) - 180
    return held, idle, held_min, idle_min, v_min_ticks_per_microbatch(p, Cost(F=f, I=i, W=1))


def _check_turn(fn: Callable[..., Any], num_ranks: int, num_microbatches: int) -> None:
    """Raise `Wrong` unless a V has the gradients of one process, stage by stage, and 4 (p - 1) m messages."""
    case = f"{num_ranks} rank(s), {num_microbatches} microbatch(es)"
    results = on_ranks(_v_step, num_ranks, without_runtime(fn), num_microbatches, case=case)
    expected: list[Vector] = [
        _flat(grads) for grads in on_ranks(_reference, 1, 2 * num_ranks, num_microbatches, case="the reference")[0]
    ]
    found = [grads for (grads, _), _, _ in results] + [grads for (_, grads), _, _ in reversed(results)]
    for stage, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if problem := why_different([ours], [theirs], num_microbatches):
            raise Wrong(f"{case}: stage {stage}: {problem}")
    for rank, (_, runs, shared) in enumerate(results):
        if any(number != num_microbatches for number in runs):
            raise Wrong(
                f"{case}: all gradients are right, and on rank {rank} the backwards of the two stages ran {runs[0]} "
                f"and {runs[1]} times; each runs once per microbatch, from all that came out of the stage"
            )
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


def _make_stage(index: int) -> Any:
    """Stage `index`, which returns a penalty of its activations beside its output."""
    from torch import nn

    class WithPenalty(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_stage(index)

        def forward(self, x: Any) -> Any:
            hidden = self.layers[:2](x)
            return self.layers[2](hidden), (index + 1) * hidden.square().mean()

    return WithPenalty()


def _reference(rank: int, world_size: int, num_stages: int, num_microbatches: int) -> list[list[Vector]]:
    """The gradients of each stage, accumulated over the microbatches by one process, all penalties included."""
    from torch.nn.functional import mse_loss

    stages = [_make_stage(index) for index in range(num_stages)]
    for x, target in zip(*make_batch([ROWS] * num_microbatches), strict=True):
        penalties = []
        for stage in stages:
            x, penalty = stage(x)
            penalties.append(penalty)
        ((mse_loss(x, target) + sum(penalties)) / num_microbatches).backward()
    return [grads_of(stage) for stage in stages]


def _v_step(rank: int, world_size: int, fn: Callable[..., Any], num_microbatches: int) -> tuple[Any, ...]:
    """One rank: the gradients of both stages, how often the backward of each ran, whether one call ran both."""
    import torch

    stages = [_make_stage(rank), _make_stage(2 * world_size - 1 - rank)]
    calls: list[list[int]] = [[], []]
    for stage, seen in zip(stages, calls, strict=True):
        # the layer that output and penalty share; not the first, since the first stage's input has no gradient
        stage.layers[1].register_full_backward_hook(lambda *_, seen=seen: seen.append(backward_id()))
    batch = list(zip(*make_batch([ROWS] * num_microbatches), strict=True))
    if rank > 0:  # only the first rank has data
        batch = [(torch.full_like(x, float("nan")), torch.full_like(y, float("nan"))) for x, y in batch]
    torch.manual_seed(100 + rank)
    for stage in stages:
        leave_gradients(stage)
    fn(rank, world_size, *stages, batch, torch.empty(ROWS, WIDTH, dtype=torch.float64))
    all_waited_for()
    runs = [len(seen) for seen in calls]
    return [_flat(added_to(stage)) for stage in stages], runs, bool(set(calls[0]) & set(calls[1]))


def _flat(grads: Sequence[Vector]) -> Vector:
    """The gradients of a stage's parameters as one list."""
    return [number for part in grads for number in part]


def _judge_between(answer: object) -> str:
    program = programs.parse(answer, RANKS, MICROBATCHES, num_stages=2 * RANKS)
    for rank in range(RANKS):
        stages = {action.stage for action in program.actions(rank)}
        if stages != {rank, 2 * RANKS - 1 - rank}:
            here = f"rank {rank} works on stages {sorted(stages)}"
            raise Wrong(f"{here}; on a V it has the stages {rank} and {2 * RANKS - 1 - rank}")
    timeline = simulate(program)
    peaks = [timeline.peak_activations(rank) for rank in range(RANKS)]
    quick = max(0, SLOW - max(timeline.makespan, LEAST)) / (SLOW - LEAST)
    if timeline.makespan > LEAST:
        late = f"valid, {timeline.makespan} ticks with {max(peaks)} activations; {LEAST} are enough with {ROOM}"
        score = round((0.9 if max(peaks) <= ROOM else 0.45) * quick, 2)
        raise Wrong(f"{late}. Rank 2 is idle for {timeline.bubble_time(2)}", score=score, picture=timeline)
    if max(peaks) > ROOM:
        worst = peaks.index(max(peaks))
        held = f"{timeline.makespan} ticks, but rank {worst} holds {peaks[worst]} activations"
        raise Wrong(f"{held}; there is room for {ROOM}", score=0.5, picture=timeline)
    return f"{LEAST} ticks with {max(peaks)} activations; no order with room for {ROOM} is quicker"


numbers = Predict(
    "v_shapes-1",
    "Two V shapes, counted",
    NAMES,
    _two_vs,
    "V-Min on {p} ranks",
    "Then F takes {f} ticks, I takes {i} and",
    minutes=10,
    points=2,
    hints=(
        "What would have to happen before the last rank can do anything at all? ZBV waits for this and nothing else.",
        "A life on stage i is 2 (2 p - i) + 1 ticks; add the two of a rank and divide by the 6 ticks between "
        "microbatches. Then look up how V-Min rounds.",
        "V-Min's block has six ticks, and with omega = 6 each of them takes as long as the longer of F and I.",
    ),
    slips=_SLIPS,
    p=(10, 7, 8, 9, 11, 12, 13, 14),
    f=(2, 3, 4),
    i=(3, 4, 5),
    called={"p": "ranks", "f": "F", "i": "I"},
)

between = Puzzle(
    "v_shapes-2",
    "Between two schedules",
    "Find a V for 3 ranks and 3 microbatches: 21 ticks, at most 5 half-size activations per rank.",
    judge=_judge_between,
    minutes=40,
    points=3,
    hints=(
        "21 ticks leave 3 idle ones per rank. The last rank waits 2 ticks for its first input; what else can it spare?",
        "Print ZBV's rows for 3 ranks and 3 microbatches, and see which rank holds 6 and when. A W that is done "
        "earlier makes room.",
        "Rank 0 can begin 0F0 0F1 0F2 5F0 5I0 5W0 5F1 5I1; rank 2 delays its W until it would otherwise be idle.",
    ),
)

turn = Repair(
    "v_shapes-3",
    "The turn",
    "Repair `v_step(rank, world_size, near, far, batch, like)`, whose stages run their backwards more than once.",
    cases=((1, 1), (1, 3), (2, 1), (2, 3), (3, 3)),
    judge=_check_turn,
    right="1 to 3 ranks: every gradient equals one process, and every stage's backward runs once, by itself",
    minutes=15,
    points=3,
    hints=(
        "Compare with the other ranks: what does a message do to the graph of autograd?",
        "How many times does the backward of each stage run for one microbatch, and from where is it started? Count "
        "the calls on the tip, and those that begin at a penalty.",
        "A backward may begin at several tensors at once: look at the arguments of torch.autograd.backward. Where no "
        "graph is used twice, none has to be retained.",
    ),
)
